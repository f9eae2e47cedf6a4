"""What the GRPO loss does: names, defaults and meaning are TRL's."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fused_grpo.errors import InputError, UnsupportedError

SUPPORTED_LOSS_TYPES = ("grpo", "dapo")
PLANNED_LOSS_TYPES = ("bnpo", "dr_grpo", "luspo", "cispo", "sapo", "vespo")


@dataclass(frozen=True, kw_only=True)
class GRPOLossConfig:
    """The GRPO loss: which variant, how it clips, and how strongly it holds on to the reference model.

    Raises:
        InputError: a value out of its range.
        UnsupportedError: a variant of the field that this version does not have yet.
    """

    loss_type: str = "dapo"
    """How tokens are averaged. "dapo" (arXiv:2503.14476): over all tokens of the optimizer step. "grpo"
    (arXiv:2402.03300): over the tokens of each sequence, then over sequences."""
    epsilon: float = 0.2
    """Lower clip: a ratio below 1 - epsilon earns nothing more where the advantage is negative. In [0, 1]."""
    epsilon_high: float | None = None
    """Upper clip: a ratio above 1 + epsilon_high earns nothing more where the advantage is positive. None: epsilon."""
    beta: float = 0.0
    """Weight of the KL term (the k3 estimator) against `ref_logprobs`. 0 means that no reference is needed."""
    use_bias_correction_kl: bool = True
    """Multiply the KL term by the differentiable ratio (DeepSeek-V3.2, arXiv:2512.02556), so that it stays unbiased
    off policy."""
    delta: float | None = None
    """Upper bound of the unclipped branch (two-sided clipping). Not in this version."""
    importance_sampling_level: str = "token"
    """"token" or "sequence" (GSPO). This version has "token"."""

    def __post_init__(self) -> None:
        if self.loss_type in PLANNED_LOSS_TYPES:
            raise UnsupportedError(
                f"got loss_type={self.loss_type!r}, which this version does not have yet; "
                f"want one of {SUPPORTED_LOSS_TYPES}; fix: loss_type='dapo'"
            )
        if self.loss_type not in SUPPORTED_LOSS_TYPES:
            raise InputError(f"got loss_type={self.loss_type!r}, want one of {SUPPORTED_LOSS_TYPES}")
        if not 0.0 <= self.epsilon <= 1.0:
            raise InputError(f"got epsilon={self.epsilon}, want 0 <= epsilon <= 1 (the clip starts at 1 - epsilon)")
        if self.epsilon_high is not None and not 0.0 <= self.epsilon_high < math.inf:
            raise InputError(f"got epsilon_high={self.epsilon_high}, want a finite value >= 0, or None for epsilon")
        if not 0.0 <= self.beta < math.inf:
            raise InputError(f"got beta={self.beta}, want a finite value >= 0")
        if self.delta is not None:
            raise UnsupportedError(f"got delta={self.delta}, which this version does not have yet; fix: delta=None")
        if self.importance_sampling_level != "token":
            raise UnsupportedError(
                f"got importance_sampling_level={self.importance_sampling_level!r}, "
                "which this version does not have yet; fix: importance_sampling_level='token'"
            )

    def token_terms(self) -> dict[str, Any]:
        """The part that decides a token's loss, as the row passes take it. The rest decides its weight."""
        return {
            "epsilon_low": self.epsilon,
            "epsilon_high": self.epsilon if self.epsilon_high is None else self.epsilon_high,
            "beta": self.beta,
            "bias_correction_kl": self.use_bias_correction_kl,
        }
