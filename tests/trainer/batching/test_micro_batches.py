"""Cutting a batch into micro-batches, and laying sequences into rows."""

from itertools import combinations, pairwise

import pytest
import torch
from batches import batch_of, column
from hypothesis import given
from hypothesis.strategies import booleans, integers, lists
from transformers import modeling_flash_attention_utils as flash

from fused_grpo import GRPOLossConfig
from fused_grpo.head.checks import LossArguments, loss_inputs
from fused_grpo.trainer.batching import micro_batches as packing
from fused_grpo.trainer.batching.micro_batches import Packing, cut_by_length, cut_by_tokens, micro_batches, pack, place
from fused_grpo.trainer.batching.rollout_buffer import as_tensors, from_tensors
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.types import ListedTokens, Sample, with_fields

CPU = torch.device("cpu")
LENGTHS = lists(integers(1, 30), min_size=1, max_size=30)


@pytest.fixture
def batch() -> list[Sample]:
    return batch_of(
        prompt_ids=[[2, 3], [4, 5, 6], [7]],
        completion_ids=[[8, 9, 1], [1], [10, 11, 12, 1]],
        sampling_logprobs=[[-1.0, -2.0, -3.0], [-4.0], [-5.0, -6.0, -7.0, -8.0]],
        advantage=torch.tensor([1.0, -1.0, 0.5]),
    )


def test_packing_keeps_every_token_and_what_predicts_it(batch):
    packed = pack(batch, [[0], [1], [2]], Packing(one_row=True), device=CPU)
    assert packed.input_ids.tolist() == [[2, 3, 8, 9, 1, 4, 5, 6, 1, 7, 10, 11, 12, 1]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3, 0, 1, 2, 3, 4]]
    assert packed.predictors.tolist() == [1, 2, 3, 7, 9, 10, 11, 12]
    assert packed.targets.tolist() == packed.input_ids[0, packed.predictors + 1].tolist() == [8, 9, 1, 1, 10, 11, 12, 1]
    assert packed.cu_seqlens.tolist() == [0, 3, 4, 8]
    assert packed.sampling_logprobs.tolist() == [-1, -2, -3, -4, -5, -6, -7, -8]


def test_advantages_of_tokens_stay_those_of_tokens(batch):
    """Where a completion has no token of its own, there may be as many tokens as sequences."""
    masks = [[False] * 3, [True], [True, False, False, True]]
    fields = {"completion_mask": masks, "token_advantages": [torch.zeros(0), torch.ones(1), torch.tensor([2.0, 3.0])]}
    packed = pack(with_fields(batch, fields), [[0], [1], [2]], Packing(one_row=True), device=CPU)
    given = LossArguments(advantages=packed.advantages, cu_seqlens=packed.cu_seqlens)
    options = {"dtype": torch.float32, "device": CPU}
    inputs = loss_inputs(given, packed.targets.shape, GRPOLossConfig(), **options)
    assert inputs.tokens.advantages.tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("options", [{}, {"max_tokens": 8}, {"one_row": True, "max_tokens": 8}], ids=str)
def test_each_token_keeps_its_support_however_sequences_are_packed(batch, options):
    kept = [[[8, 9], [9], []], [[0, 1]], [[10], [2, 11], [], [1, 5, 6]]]
    batch = with_fields(batch, {"listed_tokens": list(map(ListedTokens.of, kept)), "skipped": [False, True, False]})
    support_of_sequences = []
    for part in micro_batches(batch, Packing(**{"one_row": False} | options), device=CPU):
        tokens, offsets = part.support
        supports = [tokens[start:end].tolist() for start, end in pairwise(offsets.tolist())]
        assert len(supports) == len(part.targets)
        ends = part.cu_seqlens.tolist()
        support_of_sequences += zip(
            part.sequence_index.tolist(), [supports[a:b] for a, b in pairwise(ends)], strict=True
        )
    assert sorted(support_of_sequences) == [(0, kept[0]), (2, kept[2])]
    assert pack(batch, [], Packing(one_row=False), device=CPU).support[1].tolist() == [0]


def test_experts_are_of_the_tokens_that_predict_and_none_without_rows(batch):
    counts = [len(sample.prompt_ids) + len(sample.completion_ids) - 1 for sample in batch]
    experts = [torch.full((count, 3, 2), number) for number, count in enumerate(counts)]
    batch = with_fields(batch, {"routed_experts": experts})
    table = pack(batch, [[0], [1], [2]], Packing(one_row=True), device=CPU).routed_experts
    assert table[:, 0, 0].tolist() == [0, 0, 0, 0, -1, 1, 1, 1, -1, 2, 2, 2, 2, -1]
    assert pack(batch, [], Packing(one_row=True), device=CPU).routed_experts is None


def listed(is_top_k: bool) -> dict[str, list]:
    """A column of three completions: ids of each token, and log-probs that say which."""
    ids = [[[8, 9], [9], [3]], [[0, 1]], [[10], [2, 11], [], [1, 5, 6]]]
    logprobs = [[{token: -float(token) for token in step} for step in steps] for steps in ids]
    return {"listed_tokens": [ListedTokens.of(steps, is_top_k=is_top_k) for steps in logprobs]}


def test_logprobs_of_likely_tokens_are_in_the_rows_of_predicted_tokens(batch):
    masks = [[True, False, True], [True], [True] * 4]
    batch = with_fields(batch, {**listed(True), "completion_mask": masks})
    packed = pack(batch, [[2], [0]], Packing(one_row=True), device=CPU)
    ids, logprobs = packed.centering
    assert packed.support is None
    # In the order of `targets`: the second token of the first completion is not the model's own.
    rows = [[10, -1, -1], [2, 11, -1], [-1, -1, -1], [1, 5, 6], [8, 9, -1], [3, -1, -1]]
    assert packed.targets.tolist() == [10, 11, 12, 1, 8, 1]
    assert ids.tolist() == rows
    assert torch.equal(torch.where(ids < 0, 0.0, logprobs), torch.where(ids < 0, 0.0, -ids.float()))
    assert logprobs.isfinite().all()
    assert pack(batch, [], Packing(one_row=False), device=CPU).centering[0].shape == (0, 1)


def test_logprobs_of_kept_tokens_are_beside_the_ids_of_supports(batch):
    packed = pack(with_fields(batch, listed(False)), [[2], [0]], Packing(one_row=True), device=CPU)
    assert packed.centering[0] is None
    assert packed.centering[1].tolist() == [-token for token in packed.support[0].tolist()]
    assert packed.support[0].tolist() == [10, 2, 11, 1, 5, 6, 8, 9, 9, 3]
    assert pack(batch, [[0]], Packing(one_row=True), device=CPU).centering is None


@pytest.mark.parametrize("is_top_k", [False, True])
def test_a_table_of_samples_has_the_logprobs_of_listed_tokens(batch, is_top_k):
    table = as_tensors(with_fields(batch, listed(is_top_k)))
    torch.testing.assert_close(as_tensors(from_tensors(table)), table, rtol=0, atol=0, equal_nan=True)
    names = {name for name in table if name.startswith("support") or name == "is_top_k"}
    parts = {f"support_{part}.{of}" for part in ("ids", "sizes", "logprobs") for of in ("values", "lengths")}
    assert names == parts | ({"is_top_k"} if is_top_k else set())
    again = from_tensors(table)[2].listed_tokens
    assert (again.ids.tolist(), again.sizes.tolist()) == ([10, 2, 11, 1, 5, 6], [1, 2, 0, 3])
    assert torch.equal(again.logprobs, torch.tensor([-10.0, -2, -11, -1, -5, -6]))
    assert again.is_top_k is is_top_k


def test_a_table_with_ids_and_no_sizes_is_refused(batch):
    table = as_tensors(with_fields(batch, listed(False)))
    with pytest.raises(TypeError, match="sizes"):
        from_tensors({name: tensor for name, tensor in table.items() if "sizes" not in name})


def test_rows_are_as_long_as_the_longest_sequence(batch):
    packed = pack(batch, [[0], [1], [2]], Packing(one_row=False), device=CPU)
    assert packed.input_ids.tolist() == [[2, 3, 8, 9, 1], [7, 10, 11, 12, 1], [4, 5, 6, 1, 0]]
    # Padding continues its row: without a second sequence in any of them, transformers needs no mask.
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 3
    assert packed.targets.tolist() == packed.input_ids.flatten()[packed.predictors + 1].tolist()
    assert packed.targets.tolist() == [8, 9, 1, 1, 10, 11, 12, 1]


def test_a_row_is_shared_by_sequences_that_fit_and_may_share():
    short = batch_of(
        prompt_ids=[[2], [3], [4]],
        completion_ids=[[5], [6, 7, 8, 9], [10]],
        sampling_logprobs=None,
        advantage=torch.zeros(3),
    )
    shared = pack(short, [[0], [1], [2]], Packing(one_row=False), device=CPU)
    assert shared.input_ids.tolist() == [[3, 6, 7, 8, 9], [2, 5, 4, 10, 0]]
    assert shared.position_ids.tolist() == [[0, 1, 2, 3, 4], [0, 1, 0, 1, 2]]
    alone = pack(short, [[0], [1], [2]], Packing(one_row=False, share_rows=False), device=CPU)
    assert sorted(alone.input_ids.tolist()) == [[2, 5, 0, 0, 0], [3, 6, 7, 8, 9], [4, 10, 0, 0, 0]]
    assert shared.targets.tolist() == alone.targets.tolist() == [5, 6, 7, 8, 9, 10]
    assert alone.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 3


@given(LENGTHS)
def test_sequences_share_rows_without_overlapping(lengths):
    starts, num_rows = place(lengths, max(lengths))
    taken = [slot for start, length in zip(starts, lengths, strict=True) for slot in range(start, start + length)]
    assert len(set(taken)) == len(taken)
    assert all(start % max(lengths) + length <= max(lengths) for start, length in zip(starts, lengths, strict=True))
    assert num_rows <= 2 * sum(lengths) / max(lengths) + 1


def test_without_a_budget_micro_batches_cover_the_batch_in_order(batch):
    cut = micro_batches(batch, Packing(one_row=False, sequences=2), device=CPU)
    assert [part.advantages.tolist() for part in cut] == [[1.0, -1.0], [0.5]]
    assert [part.sequence_index.tolist() for part in cut] == [[0, 1], [2]]
    assert torch.cat([part.targets for part in cut]).tolist() == [8, 9, 1, 1, 10, 11, 12, 1]


@pytest.mark.parametrize("one_row", [False, True])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_packed_row_gives_what_each_sequence_gives_alone(batch, make_model, attention, one_row):
    model = make_model(attn_implementation=attention)
    packed = logprobs_packed(model, batch, one_row=one_row)
    alone, exact = logprobs_alone(model, batch), logprobs_alone(model.double(), batch)
    error, allowed = (packed - exact).abs().max(), 2 * (alone - exact).abs().max()
    assert error <= allowed + 32 * torch.finfo(torch.float32).eps * exact.abs().max()
    if attention == "sdpa":  # the other's softmax is of fp32, whatever the model
        torch.testing.assert_close(logprobs_packed(model, batch, one_row=one_row), exact, rtol=0, atol=1e-10)


def logprobs_packed(model, batch: list[Sample], *, one_row: bool) -> torch.Tensor:
    policy = PolicyLoss(model, GRPOLossConfig(), temperature=0.8)
    return policy.measure(pack(batch, [[0], [1], [2]], Packing(one_row=one_row), device=CPU), "logprobs")


def logprobs_alone(model, batch: list[Sample]) -> torch.Tensor:
    alone = []
    for prompt, completion in zip(column(batch, "prompt_ids"), column(batch, "completion_ids"), strict=True):
        logits = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1] / 0.8
        alone.append(logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0])
    return torch.cat(alone).detach()


@given(LENGTHS, integers(1, 100), booleans())
def test_micro_batches_hold_every_sequence_once_and_keep_to_the_budget(lengths, budget, share):
    rows = cut_by_length(lengths, budget, Packing(one_row=False, share_rows=share))
    row = cut_by_tokens(lengths, budget, Packing(one_row=True))
    for cuts in (rows, row):
        assert sorted(index for cut in cuts for index in cut) == list(range(len(lengths)))
    for cut in (cut for cut in rows if len(cut) > 1):
        longest = max(lengths[index] for index in cut)
        assert place([lengths[index] for index in cut], longest, share=share)[1] * longest <= budget
    assert all(len(cut) == 1 or sum(lengths[index] for index in cut) <= budget for cut in row)


@given(lists(integers(1, 30), min_size=2, max_size=8), integers(20, 90))
def test_squares_are_cut_where_the_costliest_micro_batch_costs_least(lengths, budget):
    def cost(cut: list[int]) -> float:
        longest = max(lengths[index] for index in cut)
        places = place([lengths[index] for index in cut], longest)[1] * longest
        return places * (1 + 0.1 * longest) if len(cut) == 1 or places <= budget else float("inf")

    cuts = cut_by_length(lengths, budget, Packing(one_row=False, attention=0.1))
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    ends = combinations(range(1, len(order)), len(cuts) - 1)
    every_way = ([order[a:b] for a, b in pairwise((0, *inner, len(order)))] for inner in ends)
    best = min(max(map(cost, way)) for way in every_way)
    assert max(map(cost, cuts)) <= best * 1.02


def test_sequences_that_go_into_no_row_in_pairs_are_cut_in_few_tries(monkeypatch):
    tries, whole = [], packing.longest_first
    monkeypatch.setattr(packing, "longest_first", lambda *given: tries.append(1) or whole(*given))
    assert len(cut_by_tokens([60] * 500, 100, Packing(one_row=True))) == 500
    assert len(tries) < 25  # one after the other they were 200
    for seed in range(50):  # as few as one after the other gives
        lengths = torch.randint(1, 100, (40,), generator=torch.Generator().manual_seed(seed)).tolist()
        bins = len(cut_by_tokens(lengths, 150, Packing(one_row=True)))
        fewer = whole([float(length) for length in lengths], range(40), bins - 1)
        assert any(len(cut) > 1 and sum(lengths[index] for index in cut) > 150 for cut in fewer)


def test_micro_batches_of_one_row_are_nearly_equal():
    lengths = torch.randint(50, 1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    loads = [sum(lengths[index] for index in cut) for cut in cut_by_tokens(lengths, 4500, Packing(one_row=True))]
    assert len(loads) == -(-sum(lengths) // 4500)
    assert max(loads) <= 1.02 * sum(loads) / len(loads)


def test_similar_lengths_stay_together_where_a_row_costs_its_square():
    lengths = torch.randint(50, 1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    cuts = cut_by_length(lengths, 8000, Packing(one_row=False, attention=1e-3))
    longest = [max(lengths[index] for index in cut) for cut in cuts]
    places = [place([lengths[i] for i in cut], length)[1] * length for cut, length in zip(cuts, longest, strict=True)]
    in_order = 4 * sum(max(lengths[start : start + 4]) ** 2 for start in range(0, 64, 4))
    assert sum(place * length for place, length in zip(places, longest, strict=True)) < 0.8 * in_order
    assert max(places) <= 8000


@pytest.mark.parametrize("options", [{}, {"max_tokens": 100}, {"max_tokens": 100, "one_row": True}])
def test_processes_run_as_many_micro_batches_as_the_one_that_needs_most(batch, options):
    parts = micro_batches(
        batch, Packing(**{"one_row": False, "sequences": 8} | options), device=CPU, agree=lambda count: count + 4
    )
    assert len(parts) == 5
    assert sorted(index for part in parts for index in part.sequence_index.tolist()) == [0, 1, 2]


@pytest.mark.parametrize("loss_type", ["dapo", "grpo"])
def test_a_micro_batch_of_nothing_gives_every_parameter_a_gradient_of_zero(batch, make_model, loss_type):
    policy = PolicyLoss(make_model(), GRPOLossConfig(loss_type=loss_type), temperature=1.0)
    output = policy(pack(batch, [], Packing(one_row=False), device=CPU), num_tokens=8.0, num_sequences=3.0)
    output.loss.backward()
    assert output.loss == 0
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in policy.parameters())


def test_sequences_that_are_not_learned_from_are_left_out(batch):
    for in_loss, expected in (([True, False, True], [[0], [2]]), ([False] * 3, [[]])):
        marked = with_fields(batch, {"in_loss": in_loss})
        parts = micro_batches(marked, Packing(one_row=False), device=CPU)
        assert [part.sequence_index.tolist() for part in parts] == expected
        assert [len(part.targets) for part in parts] == [len(part.sampling_logprobs) for part in parts]


def test_numbers_of_each_token_stay_with_it(batch):
    logprobs = [[0.1, 0.2, 0.3], [0.4], [0.5, 0.6, 0.7, 0.8]]
    changes = {"old_logprobs": [torch.tensor(v) for v in logprobs], "sampling_logprobs": [None] * 3}
    old = with_fields(batch, changes)
    for part in micro_batches(old, Packing(one_row=False, max_tokens=5), device=CPU):
        index = part.sequence_index.tolist()
        assert part.sampling_logprobs is part.ref_logprobs is None
        assert part.old_logprobs.tolist() == pytest.approx([value for i in index for value in logprobs[i]])
        assert part.targets.tolist() == [token for i in index for token in column(batch, "completion_ids")[i]]
        assert part.advantages.tolist() == [column(batch, "advantage")[i] for i in index]


def test_flash_attention_knows_where_sequences_end_without_asking_a_gpu(batch, make_model, monkeypatch):
    lengths: list[tuple[object, list[int]]] = []

    def varlen(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, softmax_scale):
        assert cu_seqlens_q is cu_seqlens_k
        lengths.append((max_seqlen_q, cu_seqlens_q.tolist()))
        assert type(max_seqlen_q) is type(max_seqlen_k) is int
        parts = zip(*(x.transpose(0, 1).split(cu_seqlens_q.diff().tolist(), dim=1) for x in (q, k, v)), strict=True)
        options = {"is_causal": True, "scale": softmax_scale, "enable_gqa": True}
        outputs = [torch.nn.functional.scaled_dot_product_attention(*part, **options) for part in parts]
        return torch.cat(outputs, dim=1).transpose(0, 1)

    def chosen(*, softmax_scale, max_seqlen_q, max_seqlen_k, **_):
        return {"softmax_scale": softmax_scale, "max_seqlen_q": max_seqlen_q, "max_seqlen_k": max_seqlen_k}

    model = make_model(attn_implementation="eager")
    expected = logprobs_packed(model, batch, one_row=True)
    functions = ((None, varlen, None, None, None), (chosen, chosen))
    monkeypatch.setattr(flash, "lazy_import_flash_attention", lambda *_, **__: functions)
    for asks in ("_is_packed_sequence", "prepare_fa_kwargs_from_position_ids"):
        monkeypatch.setattr(flash, asks, lambda *_: pytest.fail("a layer waits for the device"))
    model.config._attn_implementation = "flash_attention_2"
    torch.testing.assert_close(logprobs_packed(model, batch, one_row=True), expected)
    assert lengths == [(5, [0, 5, 9, 14])] * model.config.num_hidden_layers
    assert pack(batch, [], Packing(one_row=True), device=CPU).row_cu_seqlens.tolist() == [0, 1]
    assert pack(batch, [[0]], Packing(one_row=False), device=CPU).row_cu_seqlens is None
