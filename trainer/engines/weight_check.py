"""Checks at each step that the engine samples from the weights that the trainer trains.

In the first pass over fresh rollouts the policy has not moved since they were sampled, so the trainer's log-probs and
the engine's are two computations of one quantity. They differ by rounding, which depends on the dtype and, in fp32, on
the device. A sync that failed, a stale head or another temperature differ by orders of magnitude more.

    float32 on a CPU     max 1e-3    two engines differ by about 1e-6; a stale head was measured at 0.2 to 0.6
    float32 elsewhere    mean 0.02   attention of vLLM multiplies in TF32, whose mantissa is that of float16
    float16              mean 0.02   single tokens may differ more: only the mean is bounded
    bfloat16             mean 0.1    rounding the logits alone moves a token by 0.02 on average and 0.09 at most

`max_logprob_difference` replaces the bound, not whether it is one of the maximum or of the mean.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from fused_grpo.errors import WeightSyncError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.models.loading import wants_bf16

_log = logging.getLogger(__name__)
_MAX_BOUND = 1e-3
_MEAN_BOUND = {torch.float32: 0.02, torch.float16: 0.02, torch.bfloat16: 0.1}


def check_same_weights(
    mean_difference: float,
    max_difference: float,
    *,
    dtype: torch.dtype,
    engine: str,
    version: int,
    device: str = "cpu",
    bound: float | None = None,
) -> None:
    """Raise where sampling log-probs and the trainer's log-probs cannot come from the same weights.

    Args:
        mean_difference: mean over completion tokens of |sampling log-prob - trainer log-prob|, in nats.
        max_difference: the largest of them.
        dtype: the coarser of the dtypes that the engine and the trainer compute in.
        engine: the engine's name, for the message.
        version: the weight version of the rollouts, for the message.
        device: the type of the trainer's device.
        bound: in place of the one for `dtype` and `device`, in nats.

    Raises:
        WeightSyncError: the difference is above the bound, or is NaN.
    """
    exact = dtype not in _MEAN_BOUND or (dtype == torch.float32 and device == "cpu")
    kind, got = ("max", max_difference) if exact else ("mean", mean_difference)
    bound = bound or (_MAX_BOUND if exact else _MEAN_BOUND[dtype])
    # Written so that NaN fails.
    if not got <= bound:
        raise WeightSyncError(
            f"got a {kind} difference of {got:.3g} between the log-probs of the {engine} engine and the trainer's at "
            f"weight version {version}, want at most {bound:g} in {str(dtype).removeprefix('torch.')}: the engine "
            "does not serve the trainer's weights, one of the two computes at lower precision, or (from version 0 on) "
            "vLLM computes this model differently; fix: load_weights after every optimizer step, give both the same "
            "dtype (float32 without TF32), compare on plain sampling only (no top_p, top_k, min_p, penalty), and "
            "use_vllm=False for a model that vLLM gets wrong; if it is rounding, a larger max_logprob_difference"
        )


class WeightCheck:
    """`check_same_weights` for a run.

    Args:
        args: `logprob_mismatch` "fail" raises, "warn" logs one warning; `max_logprob_difference` is the bound.
        model: the model that is trained, on `device`.
        own_weights: whether the engine has weights of its own, which can be stale, so that None is "fail" and not
            "warn".
    """

    def __init__(self, args: GRPOConfig, model: nn.Module, device: torch.device, *, own_weights: bool = True) -> None:
        dtype = torch.bfloat16 if wants_bf16(args) else next(model.parameters()).dtype
        self._options: Any = {"dtype": dtype, "device": device.type, "bound": args.max_logprob_difference}
        self._warns = (args.logprob_mismatch or ("fail" if own_weights else "warn")) == "warn"
        self._has_warned = False

    def __call__(self, mean_difference: float, max_difference: float, *, engine: str, version: int) -> None:
        """Check the differences of a step; see `check_same_weights`.

        Raises:
            WeightSyncError: as `check_same_weights`, where that is the reaction.
        """
        try:
            check_same_weights(mean_difference, max_difference, engine=engine, version=version, **self._options)
        except WeightSyncError as error:
            if not self._warns:
                raise
            if not self._has_warned:
                _log.warning("%s (the run goes on; this is said once; logprob_mismatch='fail' would end it)", error)
            self._has_warned = True
