"""From the samples of a step to packed micro-batches: what is left out, which rank learns from what, what fits in one.

Left out of the forward pass are completions whose advantage is 0, as it is where all rewards of a group are equal: the
policy term of every loss is a multiple of it. Such a completion has no gradient, unless something else gives it one or
lets other tokens depend on it:

    beta > 0                      the KL term is of every token
    distillation_coef             the divergence from the teacher, too
    entropy_coef                  the bonus, too
    use_adaptive_entropy          the next coefficient follows from the entropy of every token
    top_entropy_quantile < 1      every token decides which entropies are high
    clip_cov_ratio, kl_cov_ratio  every token is in the means of covariances
    a router loss                 every token has its share in the load of the experts

Whatever else the loss does stays within a sequence, and normalisers count what is left out, so loss and gradients are
the same but for the order of sums. In a step without any advantage, each rank keeps one completion: its log-probs show
whether the engine has the trainer's weights. One without them may well be the reason that all rewards are equal.

Completions differ in length by an order of magnitude, and every rank waits for the slowest in each step. Advantages are
known by then and the loss is normalised over all ranks, so the update does not depend on which rank learns from what.
Each rank gets as many sequences as it had (one more or less where they do not divide evenly) at nearly equal cost, by
the rule "longest processing time first": the costliest goes to the rank with the least work. Or it gets equally many
whole trees (below), where the slowest rank has less to do then; a rank may have no sequence at all. The price is that
token ids and log-probs of the whole batch go to every rank once per generation: 16 bytes a token.

Sequences are packed end to end in rows; attention keeps them apart by their position ids, and only the hidden states
that predict completion tokens reach the head. A variable-length kernel (flash attention) knows where sequences end and
wants one long row without a single padding token. Any other attention computes a square of the row's length, so there a
row is as long as the longest sequence and holds as many others as fit: the square of padded batches, without most of
their padding.

Completions of one prompt share its places, so that a prompt is computed once and not G times. A tree is a prompt with
completions of it behind: positions of each go on from the prompt's end, and a completion sees the prompt and itself.
That needs a mask, and a row as long as the tree: what it saves in tokens it may lose in attention, so a group is cut
into as many trees as cost least. A variable-length kernel takes no mask, so there every sequence has its own prompt.

The cut into micro-batches changes memory and speed and nothing else, because the loss is normalised by the counts of
the whole step. Without a budget it is so many sequences at a time, in order. With a budget of tokens it is as few
micro-batches as fit, of nearly equal cost: for one long row, the costliest sequence goes where there is least; for
squares, sequences of similar lengths stay together, because a short one in a long row pays for the whole row. Every
rank runs as many micro-batches as the one that needs most, since their collectives have to match.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate, chain

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor

from fused_grpo.config import GRPOLossConfig
from fused_grpo.trainer.batching.rollout_buffer import as_tensors, from_tensors
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.distributed.failures import any_rank
from fused_grpo.trainer.models.attention import tree_cost, tree_sizes
from fused_grpo.trainer.types import MicroBatch, Sample, with_fields

BISECTIONS = 12
Trees = Callable[[Sequence[int]], list[list[int]]]  # of indices of a batch, those that share a prompt together


def micro_batches(
    batch: Sequence[Sample],
    sequences: int,
    *,
    one_row: bool,
    device: torch.device,
    share_rows: bool = True,
    share_prompts: bool = False,
    max_tokens: int | None = None,
    attention: float = 0.0,
    agree: Callable[[int], int] = int,
) -> list[MicroBatch]:
    """Every sequence of the forward pass once, in as many micro-batches as all ranks agree on, at least one.

    Args:
        sequences: how many a micro-batch holds, in order, where there is no `max_tokens`.
        one_row: for attention that takes sequences of any lengths.
        share_rows: False for a model that does not keep the sequences of a row apart: one sequence a row.
        share_prompts: True for a model that takes a mask, so that completions of one prompt may share it.
        max_tokens: places of a micro-batch (R * L), at most; a longer sequence is alone.
        attention: the cost of attending to one token, in units of a token's cost in the rest of a layer.
        agree: the largest number of micro-batches of any rank, from the number that this rank needs.
    """
    chosen = [index for index, sample in enumerate(batch) if sample.in_forward]

    def trees(members: Sequence[int]) -> list[list[int]]:
        if not share_prompts:
            return [[index] for index in members]
        return prompt_trees(batch, members, attention=attention, max_tokens=max_tokens)

    if max_tokens is None:
        cuts = [trees(chosen[start : start + sequences]) for start in range(0, len(chosen), sequences)]
        cuts += [[]] * (agree(max(1, len(cuts))) - len(cuts))
    else:
        units = trees(chosen)
        lengths = [tree_length(batch, unit) for unit in units]
        if one_row:
            places = cut_by_tokens(lengths, max_tokens, attention=attention, agree=agree)
        else:
            places = cut_by_length(lengths, max_tokens, attention=attention, agree=agree, share_rows=share_rows)
        cuts = [[units[place] for place in cut] for cut in places]
    return [pack(batch, cut, one_row=one_row, share_rows=share_rows, device=device) for cut in cuts]


def prompt_trees(
    batch: Sequence[Sample],
    chosen: Sequence[int],
    *,
    attention: float,
    max_tokens: int | None = None,
    most: int | None = None,
) -> list[list[int]]:
    """The chosen indices, those with the same prompt together, in the trees that cost least (`tree_sizes`)."""
    same: dict[tuple[int, ...], list[int]] = {}
    for index in chosen:
        same.setdefault(tuple(batch[index].prompt_ids), []).append(index)
    found = []
    for prompt, members in same.items():
        lengths = [len(batch[index].completion_ids) for index in members]
        sizes = tree_sizes(len(prompt), lengths, attention=attention, max_tokens=max_tokens, most=most)
        ends = list(accumulate(sizes))
        found += [members[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    return found


def tree_length(batch: Sequence[Sample], tree: Sequence[int]) -> int:
    """Places of a prompt and of those of its completions."""
    return len(batch[tree[0]].prompt_ids) + sum(len(batch[index].completion_ids) for index in tree)


def cut_by_tokens(
    lengths: Sequence[int], max_tokens: int, *, attention: float = 0.0, agree: Callable[[int], int] = int
) -> list[list[int]]:
    """Micro-batches of one row each, as few as fit: the costliest sequence first, each to where there is least."""
    costs = [tree_cost(length, 1, attention) for length in lengths]

    def fits(cut: list[int]) -> bool:
        return len(cut) <= 1 or sum(lengths[index] for index in cut) <= max_tokens

    fewest = max(1, -(-sum(lengths) // max_tokens))
    while not all(map(fits, longest_first(costs, range(len(costs)), fewest))):
        fewest += 1
    return longest_first(costs, range(len(costs)), agree(fewest))


def longest_first(costs: Sequence[float], chosen: Iterable[int], bins: int, most: int | None = None) -> list[list[int]]:
    """The chosen indices in so many lists: the costliest first, each to the list of least cost, `most` in each."""
    lists, loads = [list[int]() for _ in range(bins)], [(0.0, number) for number in range(bins)]
    for index in sorted(chosen, key=lambda index: -costs[index]):
        load, number = heapq.heappop(loads)
        lists[number].append(index)
        if len(lists[number]) != most:
            heapq.heappush(loads, (load + costs[index], number))
    return lists


def cut_by_length(
    lengths: Sequence[int],
    max_tokens: int,
    *,
    attention: float = 0.0,
    agree: Callable[[int], int] = int,
    share_rows: bool = True,
) -> list[list[int]]:
    """Micro-batches of rows as long as their longest sequence, from the longest to the shortest.

    As few as fit, cut where the costliest of them costs least: found by bisection over what one may cost.
    """
    order = sorted(range(len(lengths)), key=lambda index: -lengths[index])

    def cut_at(most: float) -> list[list[int]]:
        cuts, rows = list[list[int]](), _Rows(0, share=share_rows)
        for index in order:
            places = (rows.count + rows.needs_another(lengths[index])) * rows.length
            if not cuts or places > max_tokens or places * (1 + attention * rows.length) > most:
                cuts.append([])
                rows = _Rows(lengths[index], share=share_rows)
            rows.take(lengths[index])
            cuts[-1].append(index)
        return cuts

    number = agree(max(1, len(cut_at(float("inf")))))
    longest = max(lengths, default=0)
    enough = len(lengths) * longest * (1 + attention * longest)
    too_little = 0.0
    for _ in range(BISECTIONS):
        middle = (too_little + enough) / 2
        too_little, enough = (too_little, middle) if len(cut_at(middle)) <= number else (middle, enough)
    cuts = cut_at(enough)
    return cuts + [[]] * (number - len(cuts))


def pack(
    batch: Sequence[Sample],
    trees: Sequence[Sequence[int]],
    *,
    one_row: bool,
    device: torch.device,
    share_rows: bool = True,
) -> MicroBatch:
    """Trees, each a list of samples with the same prompt, in R rows of L tokens. Completions keep their order.

    Tokens of a completion that are not the model's own are in the rows, where later tokens attend to them, but are not
    predicted: they are in no loss, count or metric. Without sequences it is one place that predicts nothing, so that a
    rank without work takes part in the collectives.
    """
    chosen = list(chain.from_iterable(trees))
    samples = [batch[index] for index in chosen]
    lengths = [tree_length(batch, tree) for tree in trees]
    row_length = max(1, sum(lengths) if one_row else max(lengths, default=1))
    starts, num_rows = ([0, *accumulate(lengths)][:-1], 1) if one_row else place(lengths, row_length, share=share_rows)
    input_ids = torch.zeros(num_rows * row_length, dtype=torch.int64)
    position_ids, attention_mask = torch.zeros_like(input_ids), torch.zeros_like(input_ids)
    # Where trees have several completions there is a mask, in which padding sees itself alone. Else padding continues
    # the sequence before it, which never attends to it: rows of one sequence need no mask.
    has_mask = any(len(tree) > 1 for tree in trees)
    seen_until = torch.arange(1, row_length + 1).repeat(num_rows)
    if not has_mask:
        position_ids = torch.arange(row_length).repeat(num_rows)
    predictors: list[Sequence[int]] = [()] * len(trees)
    for number in sorted(range(len(trees)), key=starts.__getitem__):
        start, stop = starts[number], starts[number] + lengths[number]
        tree, row_start = _Tree([batch[index] for index in trees[number]]), start - start % row_length
        input_ids[start:stop] = torch.tensor(tree.ids)
        attention_mask[start:stop] = 1
        if not has_mask:
            position_ids[start : row_start + row_length] = torch.arange(row_start + row_length - start)
        position_ids[start:stop] = torch.tensor(tree.positions)
        seen_until[start:stop] = torch.tensor(tree.seen_until) + start - row_start
        predictors[number] = [start + place for place in tree.predictors]
    targets = (sample.own(sample.completion_ids) for sample in samples)
    row_cu_seqlens = torch.tensor([0, *accumulate(lengths or [1])], dtype=torch.int32) if one_row else None

    def per_token(name: str) -> Tensor | None:
        """A number for each predicted token, end to end, [N] fp32."""
        if not batch or any(getattr(sample, name) is None for sample in batch):
            return None
        # The log-probs of the trainer's models are those of the model's own tokens already.
        whole = name == "sampling_logprobs"
        rows = (sample.own(getattr(sample, name)) if whole else getattr(sample, name) for sample in samples)
        return torch.cat([torch.zeros(0), *(torch.as_tensor(row, dtype=torch.float32) for row in rows)]).to(device)

    return MicroBatch(
        input_ids=input_ids.view(num_rows, row_length).to(device),
        position_ids=position_ids.view(num_rows, row_length).to(device),
        attention_mask=attention_mask.view(num_rows, row_length).to(device),
        seen_until=seen_until.view(num_rows, row_length).to(device) if has_mask else None,
        predictors=torch.tensor(list(chain.from_iterable(predictors)), dtype=torch.int64, device=device),
        targets=torch.tensor(list(chain.from_iterable(targets)), dtype=torch.int64, device=device),
        cu_seqlens=torch.tensor([0, *accumulate(s.num_own for s in samples)], dtype=torch.int32, device=device),
        sequence_index=torch.tensor(chosen, dtype=torch.int64),
        advantages=torch.tensor([sample.advantage for sample in samples], dtype=torch.float32, device=device),
        sampling_logprobs=per_token("sampling_logprobs"),
        old_logprobs=per_token("old_logprobs"),
        ref_logprobs=per_token("ref_logprobs"),
        support=_support(batch, samples, device),
        row_cu_seqlens=None if row_cu_seqlens is None else row_cu_seqlens.to(device),
        longest=max(lengths, default=1),
    )


class _Tree:
    """A prompt and completions of it, laid end to end from place 0."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        prompt = samples[0].prompt_ids
        total = len(prompt) + sum(len(sample.completion_ids) for sample in samples)
        self.ids, self.positions = list(prompt), list(range(len(prompt)))
        self.seen_until = [total] * len(prompt)
        self.predictors: list[int] = []  # the hidden state of a token predicts the next one
        for sample in samples:
            start, count = len(self.ids), len(sample.completion_ids)
            self.ids += sample.completion_ids
            self.positions += range(len(prompt), len(prompt) + count)
            self.seen_until += [start + count] * count
            self.predictors += sample.own([len(prompt) - 1, *range(start, start + count - 1)][:count])


def _support(batch: Sequence[Sample], samples: Sequence[Sample], device: torch.device) -> tuple[Tensor, Tensor] | None:
    """The supports of all predicted tokens, end to end: token ids [K] int32 and offsets [N+1] int64."""
    if not batch or any(sample.support_ids is None for sample in batch):
        return None
    zero = torch.zeros(1, dtype=torch.int32)
    ids, sizes = [zero[:0]], [zero]
    for sample in samples:
        assert sample.support_ids is not None
        assert sample.support_sizes is not None  # as of the ids
        own = torch.ones(len(sample.completion_ids), dtype=torch.bool)
        if sample.completion_mask is not None:
            own = torch.tensor(sample.completion_mask)
        ids.append(sample.support_ids[own.repeat_interleave(sample.support_sizes)])
        sizes.append(sample.support_sizes[own])
    return torch.cat(ids).to(device), torch.cat(sizes).cumsum(0).to(device)


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

    def needs_another(self, length: int) -> bool:
        """Whether a sequence fits no row that is there."""
        return not self.share or not self._free or self._free[-1][0] < length

    def take(self, length: int) -> int:
        """Put a sequence into its row; its first place."""
        if self.needs_another(length):
            free, row = self.length, self.count
            self.count += 1
        else:
            free, row = self._free.pop(bisect_left(self._free, (length, 0)))
        insort(self._free, (free - length, row))
        return (row + 1) * self.length - free


def balanced(
    batch: list[Sample],
    accelerator: Accelerator,
    *,
    attention: float = 0.0,
    share_prompts: bool = False,
    sequences: int | None = None,
    max_tokens: int | None = None,
) -> list[Sample]:
    """This rank's share of the samples of all ranks. A collective: every rank must call it.

    Args:
        attention: the cost of attending to one token, in units of a token's cost in the rest of a layer.
        share_prompts: whether completions of a prompt share it on a rank, which may be worth keeping them together.
        sequences: of a micro-batch: no more can share a prompt, where there is no `max_tokens`.
        max_tokens: places of a micro-batch.
    """
    ranks = accelerator.num_processes
    if ranks == 1:
        return batch
    whole = list(chain.from_iterable(map(from_tensors, gather_object([as_tensors(batch)]))))
    shares = by_sequence(whole, ranks, attention)
    if share_prompts:
        most = sequences if max_tokens is None else None
        trees = partial(prompt_trees, whole, attention=attention, max_tokens=max_tokens, most=most)
        costs = partial(slowest, whole, attention=attention, trees=trees)
        shares = min(shares, by_prompt(whole, ranks, attention, trees), key=costs)
    return [whole[index] for index in sorted(shares[accelerator.process_index])]


def by_sequence(batch: Sequence[Sample], ranks: int, attention: float) -> list[list[int]]:
    """Indices for each rank: equally many, nearly equal cost."""
    costs = [tree_cost(sample.length, 1, attention) if sample.in_forward else 0.0 for sample in batch]
    return assignments(costs, ranks)


def by_prompt(batch: Sequence[Sample], ranks: int, attention: float, trees: Trees) -> list[list[int]]:
    """Indices for each rank, whole trees of them."""
    units = trees([index for index in range(len(batch)) if batch[index].in_forward])
    costs = [tree_cost(tree_length(batch, tree), len(tree), attention) for tree in units]
    others = [[index] for index in range(len(batch)) if not batch[index].in_forward]
    shares = assignments(costs + [0.0] * len(others), ranks)
    return [[index for place in share for index in (units + others)[place]] for share in shares]


def slowest(batch: Sequence[Sample], ranks: Sequence[Sequence[int]], *, attention: float, trees: Trees) -> float:
    """The cost of the rank that has most to do."""

    def cost(members: Sequence[int]) -> float:
        units = trees(sorted(index for index in members if batch[index].in_forward))
        return sum(tree_cost(tree_length(batch, tree), len(tree), attention) for tree in units)

    return max(map(cost, ranks))


def assignments(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Indices for each rank: equally many of them, and of those that cost something, within one, and nearly equal sums
    of costs."""
    costly = [index for index, cost in enumerate(costs) if cost]
    assigned = longest_first(costs, costly, ranks, -(-len(costly) // ranks))
    for index in (index for index, cost in enumerate(costs) if not cost):
        min(assigned, key=len).append(index)
    return assigned


def can_skip(args: GRPOConfig, *, router_coefficient: float) -> bool:
    """Whether a completion with advantage 0 has no gradient and no effect on others, and may be left out."""
    weights = (args.beta, args.distillation_coef, args.entropy_coef, args.clip_cov_ratio, args.kl_cov_ratio)
    of_every_token = args.use_adaptive_entropy or args.top_entropy_quantile < 1.0 or any((*weights, router_coefficient))
    return args.skip_zero_advantages and not of_every_token


def skip_zero_advantages(batch: list[Sample], accelerator: Accelerator) -> list[Sample]:
    """The batch with its completions of advantage 0 `skipped`, all but one where no rank has another. A collective."""
    skipped = [sample.in_forward and sample.advantage == 0 for sample in batch]
    is_learned = any(sample.in_forward and sample.advantage != 0 for sample in batch)
    if not any_rank(accelerator, is_learned) and True in skipped:
        skipped[skipped.index(True)] = False
    return with_fields(batch, {"skipped": skipped})


def skipped_metrics(batch: Sequence[Sample], config: GRPOLossConfig) -> tuple[dict[str, float], dict[str, float]]:
    """What is known of this rank's skipped completions without their log-probs: none of their tokens is clipped.

    Returns:
        The metrics and the sums of ratios (`ratio_sums`) of a micro-batch of them.
    """
    lengths = [sample.num_own for sample in batch if sample.skipped]
    if not lengths:
        return {}, {}
    tokens, of_sequence = float(sum(lengths)), config.ratio_of_sequence
    unclipped = dict.fromkeys(("low_sum", "low_min", "high_sum", "high_max"), 0.0)
    ratios = {**unclipped, "ratios_sum": float(len(lengths)) if of_sequence else tokens}
    return {"loss_tokens": tokens, "zero_gradient_fraction": 1.0}, ratios
