"""TRL's trainers with our ops under them.

TRL 1.16 computes log-probs by `model(..., labels=..., fused_lm_head=True)`: it runs the backbone and passes hidden
states and head to one autograd function, which it looks up at call time. This file replaces that function. Everything
else stays TRL's own code: the call of `model(...)`, so that DDP and FSDP see every gradient, the loss, and all logged
numbers.

`GRPOTrainer` also gets speculative gradients. The loss that it will compute from the log-probs is known before: the
options are on the trainer, the inputs in the batch. So the gradients are computed in the forward pass, while the logits
are in memory: three GEMMs for a trainable head instead of four, and fewer where rows have no gradient
(`speculative.py`). The backward pass compares TRL's gradient with the speculative one. A subclass with another loss
gets the right gradients with five GEMMs.

There are two entry points:

    from fused_grpo.integrations.trl import FusedGRPOTrainer       # a GRPOTrainer; nothing else changes
    with fused_grpo.integrations.trl.patched(): ...                # TRL's own trainers, until the end of the block
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_grpo.config import CLIPPED, GRPOLossConfig
from fused_grpo.errors import InputError
from fused_grpo.head.checks import HeadOptions, LossArguments, check_plan, loss_inputs, outside_graphs
from fused_grpo.head.head import flatten_head
from fused_grpo.integrations._peers import check_version
from fused_grpo.integrations.model_modes import replaced
from fused_grpo.integrations.speculative import speculative_logprobs
from fused_grpo.logprobs import Output, linear_logprobs, linear_logprobs_and_entropy

check_version("trl", "~=1.16.0")

import trl.trainer.utils as trl_utils  # noqa: E402 - only a TRL that was checked
from trl import GRPOTrainer  # noqa: E402

__all__ = ["FusedGRPOTrainer", "patched"]

logger = logging.getLogger("fused_grpo")
_NO_SPECULATION = "log-probs are from fused_grpo, the gradient of the loss is TRL's own (4 GEMMs over the head, not 3)"
# What TRL calls them, and what we do. It takes the logarithm of the first.
_OUTPUTS: dict[str, Output] = {
    "log_sum_sq_probs": "sum_squared_probs",
    "mean_logits": "mean_logit",
    "is_top1": "is_top1",
}
Fields = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]


@contextmanager
def patched(*, chunk_bytes: int | None = None) -> Iterator[None]:
    """Inside, all trainers of TRL use our ops, also existing ones; leaving restores TRL's own op.

    All get log-probs and entropies from `linear_logprobs`, with its `outputs` where they ask for more: SFT, DPO and KTO
    for the token accuracy, mean logits or the sum of squared probabilities. `GRPOTrainer` gets speculative gradients.
    On every device only positions with a label are scored. Overlapping blocks must be left in the reverse order of
    entering.

    Args:
        chunk_bytes: budget for the one chunk or tile of logits, as in `linear_logprobs`; with speculative gradients as
            in `fused_linear_grpo_loss`.
    """
    original = GRPOTrainer._compute_loss

    def compute_loss(trainer: Any, model: Any, inputs: dict[str, Any]) -> Any:
        with _speculating(trainer, inputs):
            return original(trainer, model, inputs)

    with _our_ops(chunk_bytes), replaced(GRPOTrainer, "_compute_loss", compute_loss):
        yield


class FusedGRPOTrainer(GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` with our ops: arguments, options, metrics and checkpoints are TRL's."""

    chunk_bytes: int | None = None
    """Budget for the one chunk or tile of logits, as in `patched`; may be set at any time."""

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        with _our_ops(self.chunk_bytes):
            return super()._get_per_token_logps_and_entropies(*args, **kwargs)

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        with _speculating(self, inputs):
            return super()._compute_loss(model, inputs)


class SpeculatedLoss(NamedTuple):
    """The loss that TRL will compute from the log-probs of a micro-batch."""

    config: GRPOLossConfig
    inputs: dict[str, Any]  # keyword arguments of `loss_inputs`, per token [N] of those with a label


_current_loss: ContextVar[SpeculatedLoss | None] = ContextVar("speculated_loss", default=None)


@contextmanager
def _our_ops(chunk_bytes: int | None = None) -> Iterator[None]:
    """Replaces TRL's autograd function, and TRL's test whether to score only the labelled positions."""
    our_function = replaced(trl_utils, "_ChunkedLogProbFunction", _Ops(chunk_bytes))
    with our_function, replaced(trl_utils, "_use_triton", lambda device: True):
        yield


class _Ops:
    """Replaces TRL's autograd function, with the same call."""

    def __init__(self, chunk_bytes: int | None) -> None:
        self.chunk_bytes, _ = check_plan("auto", chunk_bytes)

    @outside_graphs
    def apply(
        self,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        chunk_size: int,
        final_logit_softcapping: float | None = None,
        logit_scale: float = 1.0,
        outputs: tuple[str, ...] | None = None,
    ) -> Fields:
        """(log-probs, entropy, log_sum_sq_probs, mean_logits, is_top1), None for those that are not in `outputs`."""
        extra = tuple(ours for name, ours in _OUTPUTS.items() if outputs is None or name in outputs)
        options = HeadOptions(bias, temperature, logit_scale, final_logit_softcapping)
        expected, speculates = _current_loss.get(), torch.is_grad_enabled()
        if expected is not None and speculates and not extra and len(targets) == len(expected.inputs["advantages"]):
            head = flatten_head(hidden, weight, targets, options)
            if head.hidden.dtype != torch.float16:
                arguments = LossArguments(**expected.inputs)
                inputs = loss_inputs(arguments, targets.shape, expected.config, dtype=head.dtype, device=hidden.device)
                values = speculative_logprobs(head, inputs, expected.config, chunk_bytes=self.chunk_bytes)
                return *values, None, None, None
            _announce(f"fp16 would lose small gradients before they are scaled: {_NO_SPECULATION}")
        keywords: dict[str, Any] = {**options._asdict(), "chunk_bytes": self.chunk_bytes}
        op = linear_logprobs_and_entropy if outputs is None or "entropy" in outputs else linear_logprobs
        logprobs, entropy, squares, is_top1, mean = op(hidden, weight, targets, outputs=extra, **keywords)
        return logprobs, entropy, None if squares is None else squares.log(), mean, is_top1


@contextmanager
def _speculating(trainer: Any, inputs: dict[str, Any]) -> Iterator[None]:
    """Inside, log-probs get the speculative gradients of the loss that `trainer._compute_loss` computes of `inputs`."""
    token = _current_loss.set(speculated_loss(trainer, inputs) if torch.is_grad_enabled() else None)
    try:
        yield
    finally:
        _current_loss.reset(token)


def speculated_loss(trainer: Any, inputs: dict[str, Any]) -> SpeculatedLoss | None:
    """The loss that `trainer._compute_loss` computes of `inputs`. None, with a log line, if our ops do not have it.

    Normalisers are TRL's: means over a micro-batch, divided by the accumulation steps, or the tokens of a generation
    batch, scaled to one optimizer step of one rank.
    """
    if trainer.top_entropy_quantile < 1.0 and trainer.accelerator.num_processes > 1:
        _announce(f"the threshold of top_entropy_quantile is over all ranks: {_NO_SPECULATION}")
        return None
    try:
        config = _config(trainer)
    except InputError as error:
        _announce(f"{error}: {_NO_SPECULATION}")
        return None
    labelled = inputs["completion_mask"] != 0
    per_token = {
        "mask": inputs.get("tool_mask"),
        "old_logprobs": inputs.get("old_per_token_logps"),
        "ref_logprobs": inputs.get("ref_per_token_logps"),
        "sampling_logprobs": inputs.get("sampling_per_token_logps"),
    }
    advantages = inputs["advantages"]
    advantages = advantages if advantages.dim() == 2 else advantages[:, None]
    if _corrects(trainer) and config.loss_type != "vespo":
        # The policy term of a token is linear in |advantage|, so rho can be a factor of the advantage.
        advantages = advantages * inputs["importance_sampling_ratio"]
    lengths = labelled.sum(1)
    tokens = lengths.sum() if inputs.get("tool_mask") is None else (inputs["tool_mask"] * labelled).sum()
    steps = trainer.current_gradient_accumulation_steps
    counts: dict[str, Any] = {"num_sequences": len(labelled) * steps, "num_tokens": tokens.clamp_min(1) * steps}
    if config.loss_type in ("dapo", "cispo", "vespo"):
        share = steps / trainer.args.steps_per_generation / trainer.accelerator.num_processes
        counts["num_tokens"] = inputs["num_items_in_batch"].clamp_min(1) * share
    at = labelled.reshape(-1).nonzero()[:, 0]
    per_token["advantages"] = advantages.to(torch.promote_types(advantages.dtype, torch.float32))
    per_row = {name: None if x is None else x.expand(labelled.shape).reshape(-1)[at] for name, x in per_token.items()}
    per_row["cu_seqlens"] = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    # This is a mean over the micro-batch, too; over the tokens above the quantile, if there is one.
    counts["num_entropy_tokens"] = tokens.clamp_min(1) if config.top_entropy_quantile == 1.0 else None
    return SpeculatedLoss(config, {**per_row, **counts})


def _config(trainer: Any) -> GRPOLossConfig:
    """The options of the trainer's loss, without its normalisers."""
    args, names = trainer.args, ["sapo_temperature_pos", "sapo_temperature_neg", "use_bias_correction_kl"]
    names += ["vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"]
    corrects_sequences = _corrects(trainer) and trainer.loss_type == "vespo"
    coefficient = trainer.entropy_coef if trainer._entropy_bonus_enabled else 0.0
    if trainer.use_adaptive_entropy and trainer._last_world_entropy > args.entropy_target:
        coefficient = 0.0
    return GRPOLossConfig(
        loss_type=trainer.loss_type,
        epsilon=trainer.epsilon_low,
        epsilon_high=trainer.epsilon_high,
        delta=args.delta if trainer.loss_type in CLIPPED else None,
        beta=trainer.beta,
        importance_sampling_level=trainer.importance_sampling_level,
        sampling_correction=trainer.vllm_importance_sampling_mode if corrects_sequences else None,
        sampling_clip_max=trainer.vllm_importance_sampling_clip_max if corrects_sequences else None,
        sampling_clip_min=trainer.vllm_importance_sampling_clip_min if corrects_sequences else None,
        off_policy_mask_threshold=trainer.off_policy_mask_threshold,
        top_entropy_quantile=trainer.top_entropy_quantile,
        entropy_coef=coefficient / trainer.current_gradient_accumulation_steps,
        max_completion_length=trainer.max_completion_length,
        **{name: getattr(args, name) for name in names},
    )


def _corrects(trainer: Any) -> bool:
    return bool(trainer.use_vllm and trainer.vllm_importance_sampling_correction)


@functools.cache
def _announce(reason: str) -> None:
    logger.info("%s", reason)
