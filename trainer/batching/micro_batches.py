"""From the samples of a step to packed micro-batches: what is left out, which rank learns from what, what fits in one.

docs/packing.md has the rules. Ranks get equally many sequences, or equally many whole trees where the slowest rank has
less to do then; a rank may have no sequence at all.

A tree is a prompt with completions of it behind, so that the prompt is computed once; a sequence alone is one, too.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import accumulate, chain, count

import torch
from accelerate.utils import send_to_device
from torch import Tensor

from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.models.attention import tree_cost, tree_sizes
from fused_grpo.trainer.types import ListedTokens, MicroBatch, Sample, with_fields

BISECTIONS = 12
Trees = Sequence[Sequence[int]]  # of indices of a batch
# Fields of a sample that a batch has of all of them, or of none.
_OPTIONAL = ("sampling_logprobs", "old_logprobs", "ref_logprobs", "token_advantages", "listed_tokens", "routed_experts")
Agree = Callable[[int], int]  # the largest number of micro-batches of any rank, from the number that this rank needs


@dataclass(frozen=True, kw_only=True)
class Packing:
    """How samples are packed: what the models take that get the same rows, and what a micro-batch may hold."""

    one_row: bool  # True: attention takes sequences of any lengths
    share_rows: bool = True  # False: a model does not keep the sequences of a row apart, so there is one in each row
    share_prompts: bool = False  # True: attention takes a mask, so that completions of one prompt may share it
    attention: float = 0.0  # the cost of attending to one token, in units of a token's cost in the rest of a layer
    sequences: int = 1  # of a micro-batch, in order, where there is no `max_tokens`
    max_tokens: int | None = None  # places of a micro-batch (R * L), at most; a longer sequence is alone
    replays: bool = False  # True: what is computed once has to go to the same experts


def micro_batches(
    batch: Sequence[Sample], packing: Packing, *, device: torch.device, agree: Agree = int
) -> list[MicroBatch]:
    """Every sequence of the forward pass once, in as many micro-batches as all ranks agree on, at least one."""
    chosen, size = [index for index, sample in enumerate(batch) if sample.in_forward], packing.sequences
    if packing.max_tokens is None:
        cuts = [trees_of(batch, chosen[start : start + size], packing) for start in range(0, len(chosen), size)]
        cuts += [[]] * (agree(max(1, len(cuts))) - len(cuts))
    else:
        trees = trees_of(batch, chosen, packing)
        cut = cut_by_tokens if packing.one_row else cut_by_length
        places = cut([tree_length(batch, tree) for tree in trees], packing.max_tokens, packing, agree)
        cuts = [[trees[place] for place in each] for each in places]
    return [pack(batch, cut, packing, device=device) for cut in cuts]


def trees_of(batch: Sequence[Sample], chosen: Sequence[int], packing: Packing) -> list[list[int]]:
    """The chosen indices, those with the same prompt in the trees that cost least; each alone where none is shared."""
    if not packing.share_prompts:
        return [[index] for index in chosen]
    by_prompt: dict[tuple[tuple[int, ...], bytes], list[int]] = {}
    for index in chosen:
        prompt, experts = batch[index].prompt_ids, batch[index].routed_experts
        routing = experts[: len(prompt)].numpy().tobytes() if packing.replays and experts is not None else b""
        by_prompt.setdefault((tuple(prompt), routing), []).append(index)
    trees, most = [], packing.sequences if packing.max_tokens is None else None
    for (shared, _), members in by_prompt.items():
        if len(members) == 1:  # which shares its prompt with none
            trees.append(members)
            continue
        lengths = [len(batch[index].completion_ids) for index in members]
        sizes = tree_sizes(len(shared), lengths, attention=packing.attention, max_tokens=packing.max_tokens, most=most)
        trees += [members[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]
    return trees


def tree_length(batch: Sequence[Sample], tree: Sequence[int]) -> int:
    """Places of a prompt and of those of its completions."""
    return len(batch[tree[0]].prompt_ids) + sum(len(batch[index].completion_ids) for index in tree)


def cut_by_tokens(lengths: Sequence[int], max_tokens: int, packing: Packing, agree: Agree = int) -> list[list[int]]:
    """Micro-batches of one row each, as few as fit: the costliest sequence first, each to where there is least."""
    costs = [tree_cost(length, 1, packing.attention) for length in lengths]
    least = max(1, -(-sum(lengths) // max_tokens))
    cuts = partial(longest_first, costs, range(len(costs)))

    @cache
    def fits(more: int) -> bool:
        return all(len(cut) < 2 or sum(lengths[index] for index in cut) <= max_tokens for cut in cuts(least + more))

    # Of sequences that go into no row in pairs, nearly twice the least number: not one after the other.
    enough = next(power for power in (2**exponent for exponent in count()) if fits(power - 1))
    return cuts(agree(least + bisect_left(range(enough), True, key=fits)))


def longest_first(costs: Sequence[float], chosen: Iterable[int], bins: int, most: int | None = None) -> list[list[int]]:
    """The chosen indices in so many lists: the costliest first, each to the list of least cost, `most` in each."""
    lists, loads = [list[int]() for _ in range(bins)], [(0.0, number) for number in range(bins)]
    for index in sorted(chosen, key=lambda index: -costs[index]):
        load, number = heapq.heappop(loads)
        lists[number].append(index)
        if len(lists[number]) != most:
            heapq.heappush(loads, (load + costs[index], number))
    return lists


def cut_by_length(lengths: Sequence[int], max_tokens: int, packing: Packing, agree: Agree = int) -> list[list[int]]:
    """Micro-batches of rows as long as their longest sequence, from the longest to the shortest.

    As few as fit, cut where the costliest of them costs least: found by bisection over what one may cost.
    """
    order, longest = sorted(range(len(lengths)), key=lambda index: -lengths[index]), max(lengths, default=0)

    def cut_at(most: float) -> list[list[int]]:
        cuts, rows = [list[int]()], _Rows(longest, share=packing.share_rows)
        for index in order:
            rows.take(lengths[index])
            places = rows.count * rows.length
            if cuts[-1] and (places > max_tokens or places * (1 + packing.attention * rows.length) > most):
                cuts.append([])
                rows = _Rows(lengths[index], share=packing.share_rows)
                rows.take(lengths[index])
            cuts[-1].append(index)
        return cuts

    number = agree(len(cut_at(float("inf"))))
    enough = len(lengths) * longest * (1 + packing.attention * longest)
    too_little = 0.0
    for _ in range(BISECTIONS):
        middle = (too_little + enough) / 2
        too_little, enough = (too_little, middle) if len(cut_at(middle)) <= number else (middle, enough)
    cuts = cut_at(enough)
    return cuts + [[]] * (number - len(cuts))


def pack(batch: Sequence[Sample], trees: Trees, packing: Packing, *, device: torch.device) -> MicroBatch:
    """Trees, each a list of samples with the same prompt, in R rows of L tokens. Completions keep their order.

    Tokens of a completion that are not the model's own are in the rows, where later tokens attend to them, but are not
    predicted: they are in no loss, count or metric. Without sequences it is one place that predicts nothing, so that a
    rank without work takes part in the collectives.
    """
    chosen = list(chain.from_iterable(trees))
    samples = [batch[index] for index in chosen]
    lengths = [tree_length(batch, tree) for tree in trees]
    one_row, share = packing.one_row, packing.share_rows
    row_length = max(1, sum(lengths) if one_row else max(lengths, default=1))
    starts, num_rows = ([0, *accumulate(lengths)][:-1], 1) if one_row else place(lengths, row_length, share=share)
    input_ids, places = torch.zeros(num_rows * row_length, dtype=torch.int64), torch.arange(num_rows * row_length)
    position_ids, attention_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    # Where trees have several completions there is a mask, in which padding sees itself alone. Else padding continues
    # the sequence before it, which never attends to it: rows of one sequence need no mask.
    has_mask = any(len(tree) > 1 for tree in trees)
    if not has_mask:
        begins = torch.zeros_like(places).index_put((torch.tensor(starts, dtype=torch.int64),), places[starts])
        position_ids = places - begins.cummax(0).values
    seen_until, predictors = places % row_length + 1, list[int]()
    for start, length, tree in zip(starts, lengths, trees, strict=True):
        ids, positions, ends, predicting = _tree([batch[index] for index in tree])
        here = slice(start, start + length)
        input_ids[here], position_ids[here], attention_mask[here] = torch.tensor(ids), torch.tensor(positions), 1
        seen_until[here] = torch.tensor(ends) + start % row_length
        predictors += [start + place for place in predicting]
    targets = (sample.own(sample.completion_ids) for sample in samples)
    fields = {name for name in _OPTIONAL if batch and all(getattr(sample, name) is not None for sample in batch)}

    def per_token(name: str) -> Tensor | None:
        """A number for each predicted token, end to end, [N] fp32."""
        if name not in fields:
            return None
        rows = [getattr(sample, name) for sample in samples]
        if name == "sampling_logprobs":  # those of the trainer's models are of the model's own tokens already
            rows = [sample.own(row) for sample, row in zip(samples, rows, strict=True)]
        return torch.cat([torch.zeros(0), *(torch.as_tensor(row, dtype=torch.float32) for row in rows)])

    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    token_advantages = per_token("token_advantages")
    support, centering = _support(batch, chosen) if "listed_tokens" in fields else (None, None)
    has_experts = "routed_experts" in fields
    packed = MicroBatch(
        input_ids=input_ids.view(num_rows, row_length),
        position_ids=position_ids.view(num_rows, row_length),
        attention_mask=attention_mask.view(num_rows, row_length),
        seen_until=seen_until.view(num_rows, row_length) if has_mask else None,
        predictors=torch.tensor(predictors, dtype=torch.int64),
        targets=torch.tensor(list(chain.from_iterable(targets)), dtype=torch.int64),
        cu_seqlens=torch.tensor([0, *accumulate(s.num_own for s in samples)], dtype=torch.int32),
        sequence_index=torch.tensor(chosen, dtype=torch.int64),
        advantages=advantages if token_advantages is None else token_advantages[:, None],
        sampling_logprobs=per_token("sampling_logprobs"),
        old_logprobs=per_token("old_logprobs"),
        ref_logprobs=per_token("ref_logprobs"),
        support=support,
        centering=centering,
        routed_experts=_experts(batch, zip(starts, trees, strict=True), len(input_ids)) if has_experts else None,
        row_cu_seqlens=torch.tensor([0, *accumulate(lengths or [1])], dtype=torch.int32) if one_row else None,
        longest=max(lengths, default=1),
    )
    return replace(packed, **send_to_device(vars(packed), device, skip_keys="sequence_index"))


def _tree(samples: Sequence[Sample]) -> tuple[list[int], list[int], list[int], list[int]]:
    """A prompt and completions of it, end to end from place 0: their ids, positions, `seen_until` and predictors."""
    ids, prompt = list(samples[0].prompt_ids), len(samples[0].prompt_ids)
    positions, predictors = list(range(prompt)), list[int]()
    seen_until = [prompt + sum(len(sample.completion_ids) for sample in samples)] * prompt
    for sample in samples:
        start, count = len(ids), len(sample.completion_ids)
        ids += sample.completion_ids
        positions += range(prompt, prompt + count)
        seen_until += [start + count] * count
        # The hidden state of a token predicts the next one.
        predictors += sample.own([prompt - 1, *range(start, start + count - 1)][:count])
    return ids, positions, seen_until, predictors


def _support(
    batch: Sequence[Sample], chosen: Sequence[int]
) -> tuple[tuple[Tensor, Tensor] | None, tuple[Tensor | None, Tensor] | None]:
    """`support` and `centering` of all predicted tokens of the chosen samples, end to end."""
    tables = [sample.listed_tokens for sample in batch if sample.listed_tokens is not None]  # all have some
    parts = [tables[0].first(0)]  # which says what all samples have, where none is chosen
    for index in chosen:
        mask = batch[index].completion_mask
        parts.append(tables[index] if mask is None else tables[index].select(torch.tensor(mask, dtype=torch.bool)))
    listed = ListedTokens.joined(parts)
    logprobs = listed.logprobs
    if listed.is_top_k:  # in rows of the longest one's length, with -1 behind the end
        assert logprobs is not None
        most = int(listed.sizes.max()) if len(listed.sizes) else 0
        filled = torch.arange(max(1, most)) < listed.sizes[:, None]
        rows, values = torch.full(filled.shape, -1, dtype=torch.int64), torch.zeros(filled.shape)
        rows[filled], values[filled] = listed.ids.long(), logprobs
        return None, (rows, values)
    support = listed.ids, torch.cat([torch.zeros(1, dtype=torch.int32), listed.sizes]).cumsum(0)
    return support, None if logprobs is None else (None, logprobs)


def _experts(batch: Sequence[Sample], placed: Iterable[tuple[int, Sequence[int]]], places: int) -> Tensor | None:
    """`routed_experts` of trees that start at these places."""
    rows, positions = list[Tensor](), list[Tensor]()
    for place, tree in placed:
        for sample in map(batch.__getitem__, tree):
            assert sample.routed_experts is not None
            # Those of the prompt come with its first completion.
            experts = sample.routed_experts[0 if sample is batch[tree[0]] else len(sample.prompt_ids) :]
            rows.append(experts)
            positions.append(torch.arange(place, place + len(experts)))
            place += len(experts) + 1
    if not rows:
        return None
    ids = torch.cat(rows).to(torch.int16)  # which takes no other k, where an assignment of slices would repeat it
    table = ids.new_full((places, *ids.shape[1:]), -1)
    table[torch.cat(positions)] = ids
    return table


def place(lengths: Sequence[int], row_length: int, *, share: bool = True) -> tuple[list[int], int]:
    """Where each sequence starts in rows laid end to end, and how many rows: the longest first, each where it fits."""
    starts, rows = [0] * len(lengths), _Rows(row_length, share=share)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        starts[index] = rows.take(lengths[index])
    return starts, max(1, rows.count)


class _Rows:
    """Rows of one length that sequences are put into, each where it leaves least free."""

    def __init__(self, length: int, *, share: bool) -> None:
        self.length, self.share, self.count = length, share, 0
        self._free: list[tuple[int, int]] = []  # (free places, row), ascending

    def take(self, length: int) -> int:
        """Put a sequence into its row, another one where it fits none; its first place."""
        fitting = bisect_left(self._free, (length, 0))
        if self.share and fitting < len(self._free):
            free, row = self._free.pop(fitting)
        else:
            free, row = self.length, self.count
            self.count += 1
        insort(self._free, (free - length, row))
        return (row + 1) * self.length - free


def balanced(batch: list[Sample], ranks: int, packing: Packing) -> list[list[Sample]]:
    """Each rank's share of the samples of all."""
    packings = dict.fromkeys((replace(packing, share_prompts=False), packing))  # which may be the same
    shares = min((by_trees(batch, ranks, one) for one in packings), key=partial(slowest, batch, packing=packing))
    return [[batch[index] for index in sorted(share)] for share in shares]


def by_trees(batch: Sequence[Sample], ranks: int, packing: Packing) -> list[list[int]]:
    """Indices for each rank: equally many whole trees, at nearly equal cost, then what is not in the forward pass."""
    units = trees_of(batch, [index for index, sample in enumerate(batch) if sample.in_forward], packing)
    others = [[index] for index, sample in enumerate(batch) if not sample.in_forward]
    shares = assignments(_costs(batch, units, packing) + [0.0] * len(others), ranks)
    return [[index for place in share for index in (units + others)[place]] for share in shares]


def slowest(batch: Sequence[Sample], ranks: Sequence[Sequence[int]], packing: Packing) -> float:
    """The cost of the rank that has most to do."""
    learned = ([index for index in sorted(share) if batch[index].in_forward] for share in ranks)
    return max(sum(_costs(batch, trees_of(batch, share, packing), packing)) for share in learned)


def _costs(batch: Sequence[Sample], trees: Trees, packing: Packing) -> list[float]:
    return [tree_cost(tree_length(batch, tree), len(tree), packing.attention) for tree in trees]


def assignments(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices for each rank: equally many (within one), of those that cost something, too, at nearly equal costs."""
    costly = [index for index, cost in enumerate(costs) if cost]
    assigned = longest_first(costs, costly, ranks, -(-len(costly) // ranks))
    for index in (index for index, cost in enumerate(costs) if not cost):
        min(assigned, key=len).append(index)
    return assigned


def can_skip(args: GRPOConfig, *, router_coefficient: float) -> bool:
    """Whether a completion with advantage 0 has no gradient and no effect on others, and may be left out."""
    weights = [args.beta, args.distillation_coef, args.entropy_coef, args.clip_cov_ratio, args.kl_cov_ratio]
    weights += [args.log_ratio_penalty, router_coefficient]
    needs_every_token = args.use_adaptive_entropy or args.top_entropy_quantile < 1.0 or any(weights)
    return args.skip_zero_advantages and not needs_every_token


def skip_zero_advantages(batch: list[Sample]) -> list[Sample]:
    """The batch of all ranks with its completions of advantage 0 `skipped`, all but one where there is no other."""
    skipped = [sample.in_forward and not sample.has_advantage for sample in batch]
    is_learned = any(sample.in_forward and sample.has_advantage for sample in batch)
    if not is_learned and True in skipped:
        skipped[skipped.index(True)] = False
    return with_fields(batch, {"skipped": skipped})
