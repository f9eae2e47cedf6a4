"""The throughput model: its units, what must never make a step faster, and numbers worked out by hand."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fused_grpo.errors import InputError
from fused_grpo.trainer.throughput import (
    GPUS,
    ModelSize,
    Rates,
    Run,
    Step,
    rollout_seconds,
    splits,
    survivors,
    token_seconds,
    train_seconds,
)

SIZE = ModelSize(model_params=8e9, layers=32, hidden_size=4096, heads=32, kv_heads=8, vocab_size=128_000)
MOE = replace(SIZE, model_params=30e9, active_params=3e9)
RUN = Run(size=SIZE, gpus=16, prompts=64, num_generations=16, prompt_length=256, completion_length=1000)
IDEAL = Rates(bandwidth=1, decode=1, host=0, sequence=0, all_reduce=0, far_all_reduce=0, mfu=1, expert_mfu=1)

# With one more token of the prompts the cache has no room for all sequences at once.
WAITING = {"completion_length": 1252.0, "max_completion_length": 6760, "share_prompts": False}

# A mean that is less than a tenth of one of the equal parts of all lengths.
SHORT = {"completion_length": 3.0, "max_completion_length": 2000}

runs = st.builds(
    Run,
    size=st.sampled_from([SIZE, MOE, replace(SIZE, model_params=2e9, tie_word_embeddings=True)]),
    gpus=st.integers(12, 24),
    prompts=st.integers(1, 64),
    num_generations=st.integers(1, 16),
    prompt_length=st.integers(1, 2000),
    completion_length=st.floats(1, 2000),
    max_completion_length=st.integers(2000, 8000),
    generate_ahead=st.integers(0, 2),
    in_flight=st.booleans(),
    share_prompts=st.booleans(),
)


def best(run: Run) -> float:
    return splits(run)[0].seconds


@settings(max_examples=40, deadline=None)
@given(runs)
def test_more_gpus_are_never_slower_at_the_best_split(run):
    assert best(replace(run, gpus=run.gpus + 1)) <= best(run) * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(runs, st.floats(1, 2))
@example(replace(RUN, gpus=12, prompts=1, num_generations=1, prompt_length=1, **SHORT), math.nextafter(1, 2))
def test_longer_completions_are_never_faster(run, factor):
    longest = math.ceil(run.max_completion_length * factor)
    longer = replace(run, completion_length=run.completion_length * factor, max_completion_length=longest)
    assert best(longer) >= best(run) * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(runs, st.sampled_from(["prompts", "prompt_length", "log_prob_passes", "reward_seconds", "tool_seconds"]))
@example(replace(RUN, gpus=12, prompts=49, num_generations=12, prompt_length=12, **WAITING), "prompt_length")
def test_more_work_is_never_faster(run, name):
    more = replace(run, **{name: getattr(run, name) + 1})
    assert best(more) >= best(run) * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(runs)
def test_training_meanwhile_is_never_slower_than_in_turn(run):
    waits, meanwhile = (Step(replace(run, generate_ahead=k, in_flight=False), 4, 8, 1) for k in (0, 1))
    assert meanwhile.seconds <= waits.seconds
    assert meanwhile.seconds >= max(waits.phases["rollouts"], waits.phases["training"])


@pytest.mark.parametrize("mean", [3.0, 200.0, 500.0, 940.0, 1000.0])
def test_lengths_have_the_given_mean_and_maximum(mean):
    shares = survivors(mean, 1000.0)
    assert sum(shares) * 1000 / len(shares) == pytest.approx(mean, rel=1e-6)
    assert all(1 >= earlier >= later >= 0 for earlier, later in pairwise(shares))


def test_a_token_of_one_sequence_takes_the_time_to_read_the_weights():
    run = replace(RUN, rates=IDEAL)
    assert token_seconds(run, 1, 1, 0) == pytest.approx(16e9 / 3.35e12, rel=0.01)
    assert token_seconds(run, 4, 1, 0) == pytest.approx(4e9 / 3.35e12, rel=0.01)
    # Of 1,000 sequences at 1,000 tokens: 131 kB a token, and 2 FLOP a parameter.
    assert SIZE.token_bytes == 32 * 2 * 8 * 128 * 2
    cache, products = 1e6 * SIZE.token_bytes / 3.35e12, 1e3 * 2 * (8e9 - 128_000 * 4096) / 989e12
    attention = 1e6 * 32 * 4 * 4096 / 989e12
    assert token_seconds(run, 1, 1000, 1000) == pytest.approx(16e9 / 3.35e12 + cache + products + attention)


def test_the_host_is_not_split_and_far_all_reduces_are_slower():
    run = replace(RUN, rates=replace(IDEAL, host=1.0, sequence=0.5))
    for width in (1, 2, 8):
        assert token_seconds(run, width, 4, 0) == pytest.approx(3, rel=0.01)
    slow = replace(RUN, rates=replace(IDEAL, all_reduce=1e-3, far_all_reduce=1e-2))
    # Two a layer; a doubling for each of them: 8 is three, and 16 leaves the machine.
    near, far = (token_seconds(slow, width, 1, 0) - 16e9 / 3.35e12 / width for width in (8, 16))
    assert (near, far) == pytest.approx((64 * 3e-3, 64 * (4e-3 + 1e-2)), rel=1e-3)


def test_training_counts_flop_as_the_plans_do():
    run = replace(RUN, rates=IDEAL, completion_length=1000, max_completion_length=1000, gradient_checkpointing=False)
    tokens, prompts, body, head = 1024 * 1000, 64 * 256, 8e9 - 2 * 128_000 * 4096, 128_000 * 4096
    attention = 6 / 2 * 32 * 4 * 4096 * (tokens * (256 + 500) + prompts * 128)
    flop = 6 * body * (tokens + prompts) + 6 * head * tokens + attention
    assert train_seconds(run, 8) == pytest.approx(flop / (8 * 989e12), rel=1e-4)
    # Gradient checkpointing: two more for the layers and their attention, none for the head.
    more = 2 * body * (tokens + prompts) + attention / 3
    checkpointed = replace(run, gradient_checkpointing=True)
    assert train_seconds(checkpointed, 8) == pytest.approx((flop + more) / (8 * 989e12), rel=1e-4)
    # Each prompt once for each completion.
    apart = train_seconds(replace(run, share_prompts=False), 8)
    assert apart - train_seconds(run, 8) == pytest.approx(
        15 * (6 * body * prompts + 3 * 32 * 4 * 4096 * prompts * 128) / (8 * 989e12), rel=1e-4
    )


def test_a_mixture_of_experts_reads_more_of_its_weights_for_more_sequences():
    run = replace(RUN, size=MOE, rates=IDEAL)
    reads = [token_seconds(run, 1, count, 0) - count * 2 * MOE.in_products / 989e12 for count in (1, 8, 500)]
    assert reads == pytest.approx([6e9 / 3.35e12, 34.17e9 / 3.35e12, 60e9 / 3.35e12], rel=1e-3)
    assert train_seconds(run, 8) < train_seconds(replace(run, size=replace(MOE, active_params=None)), 8) / 8


def test_the_longest_completion_bounds_a_batch_and_not_servers_that_refill():
    equal = replace(RUN, max_completion_length=1000, prompt_length=0)
    assert rollout_seconds(equal, 8, 1) == pytest.approx(1000 * token_seconds(RUN, 1, 128, 500), rel=0.01)
    # Of 1,024 lengths with a mean of 1,000 the longest is about 7,500.
    long = replace(RUN, max_completion_length=16_000)
    assert rollout_seconds(long, 8, 1) > 7000 * token_seconds(RUN, 1, 1, 4000)
    in_flight = replace(long, in_flight=True, generate_ahead=2)
    assert rollout_seconds(in_flight, 8, 1) == pytest.approx(
        128 * 1000 / 256 * token_seconds(RUN, 1, 256, 256 + 1000), rel=0.05
    )


def test_sequences_that_do_not_fit_into_the_cache_wait():
    memory = {"a100": replace(GPUS["h100"], memory=22e9), "h200": replace(GPUS["h100"], memory=1e15)}
    waits, fits = (replace(RUN, prompts=16, gpu=gpu) for gpu in memory)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fused_grpo.trainer.throughput.GPUS", memory)
        # 3.8 GB: 24 of 256 sequences at a time.
        assert rollout_seconds(waits, 1, 1) > 1.8 * rollout_seconds(fits, 1, 1)
        assert rollout_seconds(replace(waits, size=replace(SIZE, model_params=10e9)), 1, 1) == math.inf


def test_a_split_needs_memory_for_the_optimizer_and_for_an_engine():
    possible = splits(replace(RUN, gpus=8, generate_ahead=1))
    assert {one.train_gpus for one in possible} <= {2, 3, 4, 5, 6, 7}  # 128 GB at 72 GB a GPU
    assert not any(one.colocate for one in possible)
    assert any(one.colocate and one.tensor_parallel == 1 for one in splits(replace(RUN, gpus=8)))
    with pytest.raises(InputError, match=r"got 2 x h100 for 8B parameters, want memory .*128 GB.*fix: more GPUs"):
        splits(replace(RUN, gpus=2))


def test_a_step_is_the_sum_of_its_phases_or_the_longer_of_two():
    run = replace(RUN, reward_seconds=3.0, tool_seconds=5.0, sync_bandwidth=1.6e9)
    one = Step(run, 8, 8, 1)
    assert one.phases["sync"] == pytest.approx(10)
    assert one.phases["rollouts"] == pytest.approx(Step(replace(run, tool_seconds=0), 8, 8, 1).phases["rollouts"] + 5)
    assert one.seconds == pytest.approx(one.phases["rollouts"] + 3 + one.phases["training"] + 10)
    assert Step(replace(run, generate_ahead=1), 8, 8, 1).seconds == pytest.approx(
        max(one.phases["rollouts"], 3 + one.phases["training"]) + 10
    )
    learning = Step(
        replace(run, generate_ahead=1, max_completion_length=1024, tool_seconds=0, reward_seconds=90), 8, 8, 1
    )
    assert learning.seconds == pytest.approx(90 + learning.phases["training"] + 10)
    assert Step(replace(run, sync_bandwidth=1.0), 8, 8, 1).bottleneck == "sync"
    assert Step(run, 8, 8, 2).replicas == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gpu": "rtx"}, r"got gpu='rtx', want one of a100, h20, h100"),
        ({"gpus": 0}, "got gpus=0, want 1 to 16384"),
        ({"gpus": 10**6}, "got gpus=1000000, want 1 to 16384"),  # half an hour
        ({"gpus": 2.5}, "got gpus=2.5, want int"),
        ({"prompts": "64"}, "got prompts='64', want int; fix: 64"),
        ({"gpu": ["h100"]}, r"got gpu=\['h100'\], want str"),
        ({"rates": None}, "got rates=None, want Rates"),
        ({"tool_seconds": math.inf}, "got tool_seconds=inf, want at least 0"),
        ({"completion_length": 5000}, r"completion_length=5000, max_completion_length=4096, want a mean .*fix"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization=1.5, want above 0, at most 1, or None"),
        ({"sync_bandwidth": math.nan}, "sync_bandwidth=nan"),
    ],
)
def test_an_impossible_run_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        replace(RUN, **options)


@pytest.mark.parametrize(("value", "wanted"), [("8e9", "float; fix: 8000000000"), (math.inf, "above 0")])
def test_a_size_that_is_no_number_is_refused(value, wanted):
    with pytest.raises(InputError, match=f"got model_params={value!r}, want {wanted}"):
        replace(SIZE, model_params=value)


def test_more_active_parameters_than_there_are_is_refused():
    with pytest.raises(InputError, match=r"active_params=9e\+09, want at most model_params=8e\+09"):
        replace(SIZE, active_params=9e9)


@pytest.mark.parametrize("sizes", [{"active_params": 1e9}, {"model_params": 1e9}])
def test_fewer_parameters_than_embedding_and_head_have_are_refused(sizes):
    """Training would take less than no time."""
    with pytest.raises(InputError, match=r"got 1e\+09 parameters for a token, want more than the 1.04858e\+09 of the"):
        replace(SIZE, **sizes)
    replace(SIZE, **sizes, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [("mfu", 0.0, "above 0, at most 1"), ("decode", 1.5, "above 0, at most 1"), ("host", -1.0, "at least 0")],
)
def test_rates_that_no_gpu_has_are_refused(name, value, wanted):
    with pytest.raises(InputError, match=f"got {name}={value}, want {wanted}"):
        Rates(**{name: value})
