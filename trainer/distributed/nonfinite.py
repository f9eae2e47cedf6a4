"""Steps whose loss or gradient is NaN or infinite: none of them moves the policy, and each leaves its batch behind.

All processes judge the same two numbers, so they decide alike. The folder `nonfinite-step-<n>` gets two files of each:
`rank-<r>.safetensors` with what the rank learned from (`batch_from_tensors` makes the batch of it again) and the
policy's log-probs, `rank-<r>.json` with the step's metrics.

A step that is passed over (`max_skipped_steps`) counts as made: it uses up its part of the rollouts and of `max_steps`,
so a run ends whatever happens. Neither the optimizer nor the schedule hear of it.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

from fused_grpo.errors import NonFiniteError
from fused_grpo.trainer.config.publishable import to_json

_log = logging.getLogger(__name__)


class NonFiniteSteps:
    """Decides about each step, and counts those that were passed over.

    Args:
        output_dir: of the run.
        rank: of this process.
        limit: steps in a row that may be passed over. 0: the first one ends the run.
    """

    def __init__(self, output_dir: Path, rank: int, *, limit: int) -> None:
        self.output_dir, self.rank, self.limit = output_dir, rank, limit
        self.in_a_row = self.total = 0

    def admits(self, metrics: Mapping[str, float], step: int, evidence: Callable[[], Mapping[str, Tensor]]) -> bool:
        """Whether the optimizer may make step `step`; `evidence` is asked for the tensors of one that it may not make.

        Raises:
            NonFiniteError: it may not, and `limit` steps before it were passed over already.
        """
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            self.in_a_row = 0
            return True
        folder = self.output_dir / f"nonfinite-step-{step}"
        what = f"got loss {metrics['loss']} and gradient norm {metrics['grad_norm']} in step {step}"
        kept = self._keep(folder, {"step": step, "rank": self.rank, "metrics": dict(metrics)}, evidence)
        if self.in_a_row >= self.limit:
            before = f" and in {self.in_a_row} step(s) before it" if self.in_a_row else ""
            raise NonFiniteError(
                f"{what}{before}, want finite ones; nothing was updated, and its batch is {kept}; fix: a lower "
                "learning_rate, look at that batch, or pass over a few such steps with max_skipped_steps"
            )
        self.in_a_row, self.total = self.in_a_row + 1, self.total + 1
        _log.warning(
            "%s: passed over (%d in a row of at most %d), its batch is %s", what, self.in_a_row, self.limit, kept
        )
        return False

    def metrics(self) -> dict[str, float]:
        """What to log of it, where steps may be passed over."""
        return {"skipped_steps": float(self.total)} if self.limit else {}

    def state(self) -> dict[str, int]:
        """As JSON."""
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state(self, state: Mapping[str, int]) -> None:
        """The inverse of `state`."""
        self.in_a_row, self.total = state["in_a_row"], state["total"]

    def _keep(self, folder: Path, facts: Mapping[str, object], evidence: Callable[[], Mapping[str, Tensor]]) -> str:
        """Write them; where they are now. A full disk, or memory, must not hide what happened, nor part the ranks."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: value.contiguous() for name, value in evidence().items()}
            save_file(tensors, folder / f"rank-{self.rank}.safetensors")
            text = json.dumps(to_json(facts), indent=2, allow_nan=False) + "\n"
            (folder / f"rank-{self.rank}.json").write_text(text, encoding="utf-8")
        except Exception as error:  # safetensors has a class of its own for a full disk
            return f"lost ({error})"
        return f"in {folder}"
