"""What a model does, measured on a few tokens before the first step, and not concluded from its name (docs/models.md).

    own     = log_softmax(model(ids).logits)               of two short sequences: joined to one, and the second alone
    policy  = what the loss is computed from               of the first alone, and of both in one row

A second sequence may differ because position ids do not reach the mask, or a recurrent layer has none. What is not the
model's own, not causal or not to be replayed is refused. Generators, gradients and modes are left as they are.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import torch
from torch import Tensor

from fused_grpo.errors import FusedGRPOError, InputError, UnsupportedError
from fused_grpo.integrations.model_head import check_transform, head_of
from fused_grpo.integrations.model_modes import as_it_was, has_dropout, replaced
from fused_grpo.trainer.batching.micro_batches import Packing, pack
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.models.adapters import base_model, is_prompt_tuned
from fused_grpo.trainer.models.attention import sees_all, takes_any_lengths
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.types import MicroBatch, Sample

_log = logging.getLogger(__name__)

_FIRST, _SECOND = range(2, 11), range(5, 12)  # tokens of two short sequences


@dataclass(frozen=True)
class Measured:
    name: str  # of the model's class
    share_rows: bool  # whether position ids keep the sequences of a row apart
    one_row: bool  # whether attention takes sequences of any lengths, without a mask
    share_prompts: bool  # whether completions of one prompt may share it, kept apart by a mask
    is_random: bool  # whether log-probs in training mode differ from the sampler's
    has_routers: bool  # whether it returns router logits; a config may have their loss and a model no experts (Doge)


@torch.no_grad()
def self_check(policy: PolicyLoss) -> Measured:
    """Measure a policy, before it is wrapped or sharded. Warns if sequences cannot be packed.

    UnsupportedError for a model whose log-probs are not those of the loss, which is not causal, or which fails.
    """
    wrapped: Any = policy.model
    model: Any = base_model(wrapped)
    name, any_lengths, config = type(model).__name__, takes_any_lengths(model), model.config.get_text_config()
    # Virtual tokens are no part of the model's own logits; an attention kernel may need a GPU.
    plain = wrapped.disable_adapter() if is_prompt_tuned(wrapped) else nullcontext()
    needs_gpu = any_lengths and model.device.type == "cpu"
    eager = replaced(config, "_attn_implementation_internal", "eager") if needs_gpu else nullcontext()
    try:
        with as_it_was(policy), eager:
            with plain:
                share_rows = _compare(policy.eval(), model)
                share_prompts = not any_lengths and _takes_trees(policy, model)
            if (routing := policy.routing) is not None and routing.replaces:
                row = _row(model, [_FIRST])
                routing.check(lambda own: policy.measure(replace(row, routed_experts=own), "logprobs"))
            is_random, has_routers = has_dropout(wrapped), policy.router_aux_loss_coef != 0.0 and _has_routers(model)
    except (FusedGRPOError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UnsupportedError(
            f"got a {name} whose forward fails on a few tokens ({type(error).__name__}: {str(error)[:500]}), want a "
            "causal LM that runs with input_ids alone; fix: call it on some tokens; if that works, not here"
        ) from error
    if not share_rows:
        _log.warning(
            f"{name} does not keep the sequences of a packed row apart; every sequence gets a row of its own, padded "
            "to the longest of its micro-batch"
        )
    return Measured(name, share_rows, share_rows and any_lengths, share_prompts, is_random, has_routers)


def check_options(measured: Measured, policy: PolicyLoss, args: GRPOConfig) -> None:
    """Check the options against what was measured. Where there are no router logits, their loss is left out.

    UnsupportedError for dropout that cannot be disabled, InputError for a coefficient without router logits.
    """
    name, coefficient = type(policy.causal_lm).__name__, args.router_aux_loss_coef
    if args.disable_dropout and measured.is_random:
        raise UnsupportedError(
            f"got disable_dropout=True and a {name} that is random in training mode all the same, want rates as "
            "attributes of its layers; fix: a config whose dropout is 0"
        )
    if coefficient and not measured.has_routers:
        raise InputError(
            f"got router_aux_loss_coef={coefficient} with a {name}, which does not return router logits, want a "
            "mixture-of-experts model that does; fix: leave it out"
        )
    policy.router_aux_loss_coef *= measured.has_routers


def shared_layout(models: Sequence[Measured], *, share_prompts: bool | None = None, may_share: bool = True) -> Packing:
    """How samples are packed for models that get the same rows; the limits of a micro-batch are not in it.

    A variable-length kernel takes its sequences in one row; so can all others, with a mask. Prompts are shared where
    all can and nothing else forbids it, unless `share_prompts` is False. UnsupportedError if it is True and one cannot.
    """
    share, one_row = all(model.share_rows for model in models), any(model.one_row for model in models)
    prompts = may_share and all(model.share_prompts for model in models)
    if share_prompts and not prompts:
        raise UnsupportedError(
            f"got share_prompts=True with {' and '.join(model.name for model in models)}, want eager or sdpa attention "
            "to all tokens before, the same log-probs under a mask, and no loss of routers; fix: leave it out, which "
            "shares where it can"
        )
    shared = prompts and share_prompts is not False
    return Packing(one_row=share and one_row, share_rows=share, share_prompts=shared)


def _compare(policy: PolicyLoss, model: Any) -> bool:
    """Compare the policy's log-probs with the model's own. Returns whether two sequences may share a row."""
    embedding_rows, head_rows = (len(layer.weight) for layer in (model.get_input_embeddings(), head_of(model)))
    if head_rows > embedding_rows:
        raise UnsupportedError(
            f"got a {type(model).__name__} with a head of {head_rows} tokens and an embedding of {embedding_rows}, "
            "want one for each that may be drawn; fix: model.resize_token_embeddings(...)"
        )
    first = _row(model, [_FIRST])
    check_transform(model, *policy.run(first))
    joined, second = _own_logits(model, *_FIRST, *_SECOND), _own_logits(model, *_SECOND)
    own = joined[: len(_FIRST) - 1]
    apart, allowed = _apart(policy, first, [own])[0]
    if math.isnan(apart):
        raise UnsupportedError(
            f"got a {type(model).__name__} whose logits of a few tokens are NaN or infinite, want finite ones; fix: "
            "weights without NaN, or a dtype with the range of what it computes: bfloat16 instead of float16"
        )
    if apart > allowed:
        alone, allowed = _apart(policy, first, [_own_logits(model, *_FIRST)])[0]
        what = f"differ by {alone:.3g} between its own logits and its head's input at positions from 0, want the same; "
        what += "fix: a model that counts positions from 0, as generate() does, and takes logits from its head alone"
        if alone <= allowed:
            what = f"change by {apart:.3g} with later tokens, want a causal model; fix: is_decoder=True in its config"
        raise UnsupportedError(f"got a {type(model).__name__} whose log-probs of a sequence {what}")
    return all(apart <= allowed for apart, allowed in _apart(policy, _row(model, [_FIRST], [_SECOND]), [own, second]))


def _takes_trees(policy: PolicyLoss, model: Any) -> bool:
    """Whether two completions behind one prompt, of one token, have the model's own log-probs."""
    # A window is longer than what is measured here, and the layers that have one take any mask for theirs.
    if not sees_all(model) or is_prompt_tuned(policy.model):
        return False
    sequences = [[_FIRST[0], *tokens[1:]] for tokens in (_FIRST, _SECOND)]
    own = [_own_logits(model, *tokens) for tokens in sequences]
    with suppress(Exception):  # a mask of that shape is not what it takes
        return all(apart <= allowed for apart, allowed in _apart(policy, _row(model, sequences), own))
    return False


def _has_routers(model: Any) -> bool:
    # The backbone: for no router, the loss that a model itself makes of them may fail.
    output = model.base_model(**_inputs(model, _FIRST), output_router_logits=True)
    return bool(getattr(output, "router_logits", None))


def _row(model: Any, *trees: Sequence[Sequence[int]]) -> MicroBatch:
    """The trees in one row: sequences with the same first token. All of their tokens but that are completions."""
    embedding = model.get_input_embeddings().weight
    ids = [[token % len(embedding) for token in sequence] for sequence in chain.from_iterable(trees)]
    facts: Any = {"finish_reason": "stop", "weight_version": 0}
    batch = [Sample(prompt_ids=tokens[:1], completion_ids=tokens[1:], **facts) for tokens in ids]
    numbers = iter(range(len(ids)))
    indices = [list(islice(numbers, len(tree))) for tree in trees]
    row = pack(batch, indices, Packing(one_row=True), device=embedding.device)
    return row if takes_any_lengths(model) else replace(row, row_cu_seqlens=None)


def _own_logits(model: Any, *tokens: int) -> Tensor:
    """[T - 1, V]: the model's own, of the tokens that predict another."""
    logits: Tensor = model(**_inputs(model, tokens)).logits
    return logits[0, :-1].float()


def _inputs(model: Any, tokens: Sequence[int]) -> dict[str, Tensor]:
    embedding = model.get_input_embeddings().weight
    return {"input_ids": torch.tensor([tokens], device=embedding.device) % len(embedding)}


def _apart(policy: PolicyLoss, row: MicroBatch, own: Sequence[Tensor]) -> list[tuple[float, float]]:
    """For each sequence of a row, how far its log-probs are from those of `own` logits, and how far they may be.

    That is far above rounding and far below the effect of other states: a share of how logits vary.
    """
    # A variable-length kernel computes in 16 bits, whatever the model does.
    least: Any = torch.bfloat16 if row.row_cu_seqlens is not None else torch.float32
    eps = max(torch.finfo(dtype).eps for dtype in (policy.model.dtype, least))
    lengths, differences = [len(logits) for logits in own], []
    parts = zip(policy.measure(row, "logprobs").split(lengths), row.targets.split(lengths), own, strict=True)
    for logprobs, targets, logits in parts:
        expected = (logits / policy.temperature).log_softmax(-1).gather(1, targets[:, None].to(logits.device))[:, 0]
        apart = (logprobs.to(expected) - expected).abs().max().item()
        # On a GPU fp32 may be TF32.
        share = max(1e-2 if logits.device.type == "cuda" else 1e-3, eps**0.5)
        allowed = share * logits.std() + 2 * eps * logits.abs().max()
        differences.append((apart, allowed.item() / policy.temperature + 1e-5))
    return differences
