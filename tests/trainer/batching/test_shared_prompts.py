"""Completions of one prompt that share it: the same log-probs and gradients, in fewer places."""

import copy
from dataclasses import replace
from itertools import chain

import pytest
import torch
from accelerate import Accelerator
from batches import batch_of
from hypothesis import given
from hypothesis.strategies import integers, lists, none, one_of
from peft import LoraConfig, get_peft_model
from tiny_models import tiny_model

from fused_grpo import GRPOLossConfig
from fused_grpo.errors import UnsupportedError
from fused_grpo.integrations.model_modes import checkpoint_activations, disable_dropout
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.batching.micro_batches import Packing, by_trees, micro_batches, pack, slowest
from fused_grpo.trainer.learner import Learner
from fused_grpo.trainer.models.attention import tree_cost, tree_sizes
from fused_grpo.trainer.policy import PolicyLoss, tree_mask
from fused_grpo.trainer.self_check import self_check
from fused_grpo.trainer.types import Sample, with_fields

CPU = torch.device("cpu")
COUNTS = {"num_tokens": 30.0, "num_sequences": 7.0}
SHARING = ["llama", "qwen2", "qwen3", "gemma", "gpt2", "gpt_neox", "phi", "olmo2", "granite", "cohere", "opt"]


@pytest.fixture
def batch() -> list[Sample]:
    """Two groups, one of them with tokens of an environment, and a prompt with one completion."""
    completions = [[8, 9, 1], [10], [11, 12, 13, 14, 1], [8, 15, 1], [16, 17], [18, 19, 20, 21], [22, 1]]
    masks = [[True] * len(ids) for ids in completions]
    masks[2][1:3] = False, False
    masks[4][0] = False
    return batch_of(
        prompt_ids=[[2, 3, 4, 5]] * 3 + [[2, 3, 4]] + [[6, 7, 3, 2, 5]] * 3,
        completion_ids=completions,
        completion_mask=masks,
        sampling_logprobs=[[-1.0] * len(ids) for ids in completions],
        advantage=torch.tensor([1.0, -1.0, 0.5, 2.0, -0.5, 0.3, -2.0]),
    )


def cut(batch, *, share_prompts: bool, sequences: int = 7, **options):
    named = {"one_row": False, "share_prompts": share_prompts, "attention": 1e-3, "sequences": sequences}
    return micro_batches(batch, Packing(**named | options), device=CPU)


def test_a_tree_is_a_prompt_with_its_completions_behind(batch):
    packed = pack(batch, [[0, 2], [1]], Packing(one_row=False), device=CPU)
    assert packed.input_ids.tolist() == [[2, 3, 4, 5, 8, 9, 1, 11, 12, 13, 14, 1], [2, 3, 4, 5, 10, *[0] * 7]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 7, 8], [0, 1, 2, 3, 4, *[0] * 7]]
    assert packed.seen_until.tolist() == [[12] * 4 + [7] * 3 + [12] * 5, [5] * 5 + list(range(6, 13))]
    assert packed.predictors.tolist() == [3, 4, 5, 3, 9, 10, 15]
    assert packed.targets.tolist() == [8, 9, 1, 11, 14, 1, 10]
    assert packed.cu_seqlens.tolist() == [0, 3, 6, 7]
    assert packed.attention_mask.sum().item() == 17


def test_a_token_sees_its_prompt_and_its_own_completion(batch):
    packed = pack(batch, [[0, 2], [3]], Packing(one_row=True), device=CPU)
    (mask,) = tree_mask(packed.seen_until, torch.float64)[0]
    owner = [None] * 4 + [0] * 3 + [2] * 5 + [3] * 6
    for query, query_owner in enumerate(owner):
        for key, other in enumerate(owner):
            sees = key <= query and (other == query_owner or (other is None and query_owner in (0, 2)))
            assert mask[query, key].item() == (0.0 if sees else torch.finfo(torch.float64).min)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("model_type", SHARING)
def test_log_probs_and_gradients_are_those_of_whole_sequences(batch, model_type, attention):
    model = tiny_model(model_type)
    model.set_attn_implementation(attention)
    assert self_check(PolicyLoss(model, GRPOLossConfig(), temperature=1.0)).share_prompts
    same(model.double(), batch, 1e-9 if attention == "sdpa" else 1e-5)  # the other's softmax is of fp32


@pytest.mark.parametrize("options", [{"sequences": 4}, {"max_tokens": 12}, {"max_tokens": 24}, {"share_rows": False}])
def test_it_holds_for_every_cut(batch, options):
    same(tiny_model("llama").double(), batch, 1e-9, **options)


def test_it_holds_for_adapters_that_recompute_their_activations(batch):
    torch.manual_seed(0)
    model = get_peft_model(tiny_model("llama"), LoraConfig(r=2, init_lora_weights=False, target_modules="all-linear"))
    checkpoint_activations(model, {})
    same(model.double(), batch, 1e-9)


def test_a_reference_and_ratios_stay_with_their_completions(batch):
    old = [torch.linspace(-3, -1, sample.num_own) - place for place, sample in enumerate(batch)]
    batch = with_fields(batch, {"old_logprobs": old, "ref_logprobs": [values - 0.1 for values in old]})
    same(tiny_model("llama").double(), batch, 1e-9, config=GRPOLossConfig(beta=0.1, loss_type="grpo"))


def same(model, batch, tolerance: float, config: GRPOLossConfig | None = None, **options) -> None:
    """Loss, log-probs of each sequence and all gradients, with and without shared prompts."""
    results = []
    disable_dropout(model)
    for share in (False, True):
        policy = PolicyLoss(copy.deepcopy(model), config or GRPOLossConfig(), temperature=0.8).train()
        parts = cut(batch, share_prompts=share, **options)
        assert any(part.seen_until is not None for part in parts) is share
        outputs = [policy(part, **COUNTS) for part in parts]
        sum(output.loss for output in outputs).backward()
        logprobs = {}
        for part, output in zip(parts, outputs, strict=True):
            pieces = output.logprobs.detach().split(part.cu_seqlens.diff().tolist())
            logprobs |= dict(zip(part.sequence_index.tolist(), pieces, strict=True))
        gradients = {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}
        results.append((sum(output.loss.item() for output in outputs), logprobs, gradients))
    (loss, logprobs, gradients), (shared_loss, shared_logprobs, shared_gradients) = results
    assert shared_loss == pytest.approx(loss, rel=0, abs=max(tolerance, 1e-6))  # a loss is an fp32 number
    assert logprobs.keys() == shared_logprobs.keys() == set(range(len(batch)))
    assert gradients.keys() == shared_gradients.keys()
    for ours, separate in ((shared_logprobs, logprobs), (shared_gradients, gradients)):
        for name, expected in separate.items():
            torch.testing.assert_close(ours[name], expected, rtol=0, atol=max(tolerance, 1e-6), msg=str(name))


OTHERS = ["gemma2", "gemma3_text", "mistral", "gpt_oss", "llama4_text", "bloom", "mamba", "gpt_neo", "doge", "big_bird"]


@pytest.mark.parametrize("model_type", OTHERS)
def test_windows_other_masks_and_recurrent_layers_are_told_from_the_others(model_type):
    assert not self_check(PolicyLoss(tiny_model(model_type), GRPOLossConfig(), temperature=1.0)).share_prompts


def test_a_layer_that_forgets_the_mask_is_found(make_model):
    model = make_model()
    for layer in model.model.layers[1:]:
        own = layer.forward
        layer.forward = lambda *args, own=own, **options: own(*args, **options | {"attention_mask": None})
    measured = self_check(PolicyLoss(model, GRPOLossConfig(), temperature=1.0))
    assert not measured.share_prompts


def test_a_model_that_cannot_take_such_a_mask_keeps_whole_sequences(make_model):
    model = make_model()
    own = model.model.forward

    def forward(*args, attention_mask=None, **options):
        assert attention_mask is None or attention_mask.ndim == 2
        return own(*args, attention_mask=attention_mask, **options)

    model.model.forward = forward
    assert not self_check(PolicyLoss(model, GRPOLossConfig(), temperature=1.0)).share_prompts


def test_gradients_of_a_shared_place_are_added_in_one_order(make_model):
    """Else a run would not repeat itself: on a CPU, threads add what an index has gathered as they come."""
    policy = PolicyLoss(make_model(), GRPOLossConfig(), temperature=1.0)
    samples = batch_of(prompt_ids=[[2]] * 2000, completion_ids=[[3]] * 2000, sampling_logprobs=None)
    part = pack(samples, [list(range(2000))], Packing(one_row=False), device=CPU)
    states = torch.zeros(1, part.input_ids.shape[1], 64, requires_grad=True)
    given, threads = torch.randn(2000, 64), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        hidden, *_ = policy._head_inputs(part, states)
        gradients = [torch.autograd.grad(hidden, states, given, retain_graph=True)[0] for _ in range(20)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(gradient, gradients[0]) for gradient in gradients)


@given(
    integers(1, 300),
    lists(integers(1, 300), min_size=1, max_size=20),
    one_of(none(), integers(1, 2000)),
    one_of(none(), integers(1, 8)),
)
def test_a_group_is_cut_where_it_costs_least(prompt, completions, limit, most):
    sizes = tree_sizes(prompt, completions, attention=1e-3, max_tokens=limit, most=most)
    assert max(sizes) <= (most or len(completions))
    assert sum(sizes) == len(completions)
    alone = sum(tree_cost(prompt + length, 1, 1e-3) for length in completions)
    cost, start = 0.0, 0
    for size in sizes:
        places = prompt + sum(completions[start : start + size])
        cost += tree_cost(places, size, 1e-3)
        assert size == 1 or limit is None or places <= limit
        start += size
    assert cost <= alone * (1 + 1e-9)


def test_long_prompts_are_shared_and_long_completions_are_not():
    assert tree_sizes(256, [32] * 8, attention=1 / (6 * 576)) == [8]
    assert tree_sizes(256, [256] * 8, attention=1 / (6 * 576)) == [4, 4]
    assert tree_sizes(64, [4096] * 8, attention=1 / (6 * 576)) == [1] * 8
    assert tree_sizes(256, [32] * 8, attention=1 / (6 * 576), max_tokens=400) == [4, 4]
    assert tree_sizes(256, [32] * 8, attention=1 / (6 * 576), max_tokens=300) == [1] * 8


@pytest.fixture
def groups() -> list[Sample]:
    """Four groups of four."""
    return batch_of(
        prompt_ids=[[group] * 40 for group in (2, 3, 4, 5) for _ in range(4)],
        completion_ids=[[6] * (3 + place % 3) for place in range(16)],
        sampling_logprobs=None,
        advantage=torch.ones(16),
    )


def shares(batch, sequences=16, **limits) -> tuple[list[list[list[int]]], list[float]]:
    """By prompt and by sequence, for two ranks, and what each of them costs."""
    packing = Packing(one_row=False, share_prompts=True, attention=1e-3, sequences=sequences, **limits)
    both = [by_trees(batch, 2, way) for way in (packing, replace(packing, share_prompts=False))]
    return both, [slowest(batch, ranks, packing) for ranks in both]


def test_whole_groups_go_to_a_rank_where_that_is_less_work(groups):
    """Four groups on two ranks: two each, with two prompts and not four; of one group, each has half."""
    both, costs = shares(groups)
    assert all(sorted(chain.from_iterable(ranks)) == list(range(16)) for ranks in both)
    assert sorted(len({groups[index].prompt_ids[0] for index in share}) for share in both[0]) == [2, 2]
    assert costs[0] < 0.7 * costs[1]
    _, costs = shares(groups[:4])
    assert costs[1] < costs[0]


def test_ranks_are_balanced_for_the_micro_batches_that_they_run(groups):
    """Three groups on two ranks, one sequence at a time: no prompt is shared, so each rank has half of them."""
    assert sorted(map(len, shares(groups[:12])[0][0])) == [4, 8]
    for limits in ({"sequences": 1}, {"max_tokens": 46}):
        both, costs = shares(groups[:12], **limits)
        assert [len(share) for share in both[0]] == [6, 6]
        assert costs[0] == costs[1]


@pytest.mark.parametrize("options", [{}, {"beta": 0.1}, {"top_entropy_quantile": 0.5}, {"kl_cov_ratio": 0.2}])
def test_a_rank_without_sequences_makes_the_step_too(groups, make_model, tmp_path, options):
    packing = Packing(one_row=False, share_prompts=True, attention=1e-3, sequences=8)
    assert [] in by_trees(groups[:8], 3, packing)
    args = GRPOConfig(str(tmp_path), bf16=False, **options)
    learner = Learner(make_model(), args, Accelerator(cpu=True), max_steps=1)
    batch, metrics = learner.learn(learner.with_old_logprobs([]))
    assert (batch, metrics["loss"], metrics["grad_norm"]) == ([], 0.0, 0.0)


def places(trainer, batch) -> int:
    return sum(part.input_ids.numel() for part in trainer.learner._pack(batch))


def test_the_option_decides_where_the_model_allows_it(make_trainer, make_model, batch):
    options = {"per_device_train_batch_size": 8}
    count = {share: places(make_trainer(share_prompts=share, **options), batch) for share in (None, True, False)}
    assert count[None] == count[True] < count[False]


def test_where_the_model_does_not_allow_it_the_option_says_so(make_model, batch, tmp_path):
    def layout(**options):
        model = make_model(use_sliding_window=True, sliding_window=8, max_window_layers=0)
        args = GRPOConfig(str(tmp_path), bf16=False, **options)
        return Learner(model, args, Accelerator(cpu=True), max_steps=1).packing

    assert not layout().share_prompts
    with pytest.raises(UnsupportedError, match=r"got share_prompts=True with Qwen2ForCausalLM, .* fix: leave it out"):
        layout(share_prompts=True)
