"""What a model does, measured once on a few tokens, before the first step: it is not concluded from its name.

    own     = log_softmax(model(ids).logits)               of two short sequences: joined to one, and the second alone
    policy  = what the loss is computed from               of the first alone, and of both in one row
    states  = what the head is given in training mode, with one seed and with another

- If the first sequence has other log-probs than the model's own, it would be trained on something else: refused. So it
  is if they are its own only without what follows: the model is not causal.
- If the second sequence has others behind the first one, sequences get a row each. Position ids may not reach the mask,
  and a recurrent layer has no mask.
- If states depend on the seed there is dropout, in a layer or in a function, or routers are given noise.

That takes seven forward passes of at most 28 tokens. The state of random generators, gradients and the modes of layers
stay as they are. Under FSDP2 the main process alone has the weights by now, so it alone measures.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from fused_grpo.errors import FusedGRPOError, UnsupportedError
from fused_grpo.integrations.logit_transform import head_transform, mismatch
from fused_grpo.integrations.model_head import probe
from fused_grpo.trainer.models.adapters import base_model
from fused_grpo.trainer.models.loading import as_it_was, has_dropout, takes_any_lengths
from fused_grpo.trainer.models.virtual_tokens import is_prompt_tuned
from fused_grpo.trainer.types import MicroBatch

_log = logging.getLogger(__name__)

# Two short sequences of different tokens.
_FIRST, _SECOND = range(2, 18), range(5, 17)


@dataclass(frozen=True)
class Measured:
    """What a self-check has found."""

    share_rows: bool  # whether position ids keep the sequences of a row apart
    one_row: bool  # whether attention takes sequences of any lengths, without a mask
    is_random: bool  # whether log-probs in training mode differ from the sampler's


@torch.no_grad()
def self_check(policy: Any) -> Measured:
    """Measure a `PolicyLoss`, before it is wrapped or sharded.

    Raises:
        UnsupportedError: a model whose log-probs are not those of the loss, which is not causal, or which fails.
    """
    model = base_model(policy.model)
    name, any_lengths = type(model).__name__, takes_any_lengths(model)
    try:
        # Virtual tokens are no part of the model's own logits.
        plain = policy.model.disable_adapter() if is_prompt_tuned(policy.model) else nullcontext()
        with as_it_was(policy), plain, _attention_of_this_machine(model):
            share_rows = _compare(policy.eval(), model)
        with _attention_of_this_machine(model):
            is_random = has_dropout(policy.model)
    except (FusedGRPOError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"got a {name} whose forward fails on a few tokens ({type(error).__name__}: {str(error)[:500]}), want a "
            "causal LM that runs with input_ids alone; fix: call it on some tokens; if that works, not here"
        ) from error
    if not share_rows:
        _log.warning(
            "%s does not keep the sequences of a packed row apart; every sequence gets a row of its own, padded to the "
            "longest of its micro-batch",
            name,
        )
    return Measured(share_rows, share_rows and any_lengths, is_random)


@contextmanager
def _attention_of_this_machine(model: Any) -> Iterator[None]:
    """On a CPU, eager attention instead of a kernel that needs a GPU."""
    config, attention = model.config.get_text_config(), model.config._attn_implementation
    if takes_any_lengths(model) and model.device.type == "cpu":
        config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = attention


def shared_layout(models: Sequence[Measured]) -> dict[str, bool]:
    """Options of `micro_batches` for models that get the same rows.

    A variable-length kernel takes its sequences in one row; so can all others, with a mask.
    """
    share = all(model.share_rows for model in models)
    return {"one_row": share and any(model.one_row for model in models), "share_rows": share}


def _compare(policy: Any, model: Any) -> bool:
    """Compare the policy's log-probs with the model's own. Returns whether two sequences may share a row."""
    name, first = type(model).__name__, _row(model, [_FIRST])
    states, output = policy.run(first)
    transform = head_transform(model.config)
    found = mismatch(probe(states, len(model.get_output_embeddings().weight)), output.logits, transform)
    if found:
        raise UnsupportedError(
            f"got a {name} that takes {found}: by its config it does {dict(transform)} behind its head, and by its "
            "forward something else, want the same; fix: a config whose options its forward reads"
        )
    joined, second = (_own_logits(model, *sequences) for sequences in ((_FIRST, _SECOND), (_SECOND,)))
    own = joined[: len(_FIRST) - 1]
    apart, allowed = _apart(policy, first, [own])[0]
    if apart > allowed:
        alone, allowed = _apart(policy, first, [_own_logits(model, _FIRST)])[0]
        if alone <= allowed:
            raise UnsupportedError(
                f"got a {name} whose log-probs of a sequence change by {apart:.3g} with what follows it, want a causal "
                "model; fix: is_decoder=True in its config, if it has that"
            )
        raise UnsupportedError(
            f"got a {name} whose own logits give log-probs that differ by {alone:.3g} from those of its head's input "
            "and weight at positions from 0, want the same; fix: a model that counts positions from 0, as generate() "
            "does, and takes logits from its head alone"
        )
    return all(apart <= allowed for apart, allowed in _apart(policy, _row(model, [_FIRST, _SECOND]), [own, second]))


def _row(model: Any, sequences: Sequence[range]) -> MicroBatch:
    """The sequences in one row. All of their tokens but the first are completions."""
    embedding: Any = model.get_input_embeddings().weight
    lengths, device = list(map(len, sequences)), embedding.device

    def row(values: Sequence[range]) -> Tensor:
        return torch.tensor([[value for some in values for value in some]], device=device)

    ids = row(sequences) % len(embedding)
    starts = [0, *accumulate(lengths)]
    predictors = row([range(start, end - 1) for start, end in pairwise(starts)])[0]
    ends = torch.tensor(starts, dtype=torch.int32, device=device)
    return MicroBatch(
        input_ids=ids,
        position_ids=row([range(length) for length in lengths]),
        attention_mask=torch.ones_like(ids),
        predictors=predictors,
        targets=ids[0, predictors + 1],
        cu_seqlens=ends - torch.arange(len(starts), dtype=torch.int32, device=device),
        sequence_index=torch.arange(len(lengths)),
        advantages=torch.zeros(len(lengths), device=device),
        row_cu_seqlens=ends if takes_any_lengths(model) else None,
        longest=max(lengths),
    )


def _own_logits(model: Any, *parts: range) -> Tensor:
    """[T - 1, V]: the model's own for the parts joined to one sequence, of the tokens that predict another."""
    logits: Tensor = model(input_ids=_row(model, parts).input_ids).logits
    return logits[0, :-1].float()


def _apart(policy: Any, row: MicroBatch, own: Sequence[Tensor]) -> list[tuple[float, float]]:
    """For each sequence of a row, how far its log-probs are from those of `own` logits, and how far they may be.

    That is far above rounding and far below the effect of other states: a share of how logits vary.
    """
    eps = max(torch.finfo(dtype).eps for dtype in (policy.model.dtype, torch.float32))
    found = []
    lengths = [len(logits) for logits in own]
    parts = zip(policy.logprobs(row).split(lengths), row.targets.split(lengths), own, strict=True)
    for ours, targets, logits in parts:
        theirs = (logits / policy.temperature).log_softmax(-1).gather(1, targets[:, None].to(logits.device))[:, 0]
        # On a GPU fp32 may be TF32.
        share = max(1e-2 if logits.device.type == "cuda" else 1e-3, eps**0.5)
        allowed = share * logits.std() + 2 * eps * logits.abs().max()
        found.append(((ours.to(theirs) - theirs).abs().max().item(), allowed.item() / policy.temperature + 1e-5))
    return found
