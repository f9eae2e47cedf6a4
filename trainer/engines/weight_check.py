"""Checks at each step that the engine samples from the weights that the trainer trains.

In the first pass over fresh rollouts the policy has not moved since they were sampled, so the trainer's log-probs and
the engine's are two computations of one quantity. They differ by rounding, which depends on the dtype alone. A sync
that failed, a stale head or another temperature differ by orders of magnitude more.

    float32     max 1e-3    two engines differ by about 1e-6; a stale head was measured at 0.2 to 0.6
    float16     mean 0.02   single tokens may differ more: only the mean is bounded
    bfloat16    mean 0.1    rounding the logits alone moves a token by 0.02 on average and 0.09 at most
"""

from __future__ import annotations

import torch

from fused_grpo.errors import WeightSyncError

_MAX_BOUND = 1e-3
_MEAN_BOUND = {torch.float16: 0.02, torch.bfloat16: 0.1}


def check_same_weights(
    mean_difference: float, max_difference: float, *, dtype: torch.dtype, engine: str, version: int
) -> None:
    """Raise where sampling log-probs and the trainer's log-probs cannot come from the same weights.

    Args:
        mean_difference: mean over completion tokens of |sampling log-prob - trainer log-prob|, in nats.
        max_difference: the largest of them.
        dtype: the coarser of the dtypes that the engine and the trainer compute in.
        engine: the engine's name, for the message.
        version: the weight version of the rollouts, for the message.

    Raises:
        WeightSyncError: the difference is above the bound for `dtype`, or is NaN.
    """
    kind, got, bound = "max", max_difference, _MAX_BOUND
    if dtype in _MEAN_BOUND:
        kind, got, bound = "mean", mean_difference, _MEAN_BOUND[dtype]
    # Written so that NaN fails.
    if not got <= bound:
        raise WeightSyncError(
            f"got a {kind} difference of {got:.3g} between the log-probs of the {engine} engine and the trainer's at "
            f"weight version {version}, want at most {bound:g} in {str(dtype).removeprefix('torch.')}: the engine "
            "does not serve the trainer's weights, or one of the two computes at lower precision; fix: load_weights "
            "after every optimizer step, give both the same dtype (float32 without TF32), and compare on plain "
            "sampling only (no top_p, top_k, min_p, penalty)"
        )
