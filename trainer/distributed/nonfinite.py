"""Steps whose loss or gradient is NaN or infinite: none of them changes the policy, and the batch of each is kept.

All ranks compare the same two numbers, so they decide alike. The folder `nonfinite-step-<n>` gets two files per rank:
`rank-<r>.safetensors` with the rank's batch (`rollout_buffer.from_tensors` reads it) and the policy's log-probs, and
`rank-<r>.json` with the metrics of the step.

A skipped step (`max_skipped_steps`) counts as made: it uses its part of the rollouts and of `max_steps`, so every run
ends. Neither the optimizer nor the schedule is stepped.
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
from fused_grpo.trainer.common.file_names import NONFINITE_FOLDER
from fused_grpo.trainer.common.redaction import to_json

_log = logging.getLogger(__name__)


class NonFiniteSteps:
    """Decides whether a step may update the policy, and counts those that were skipped.

    Args:
        output_dir, rank: of the run, and of this process.
        limit: how many steps in a row may be skipped. 0: the first one ends the run.
    """

    def __init__(self, output_dir: Path, rank: int, *, limit: int) -> None:
        self.output_dir, self.rank, self.limit = output_dir, rank, limit
        self.in_a_row = self.total = 0

    def may_update(self, metrics: Mapping[str, float], step: int, evidence: Callable[[], Mapping[str, Tensor]]) -> bool:
        """Whether the optimizer may make step `step`. `evidence` returns the tensors to keep of one that it may not.

        Raises:
            NonFiniteError: it may not, and `limit` steps before it were skipped already.
        """
        if math.isfinite(metrics["loss"]) and math.isfinite(metrics["grad_norm"]):
            self.in_a_row = 0
            return True
        folder = self.output_dir / f"{NONFINITE_FOLDER}{step}"
        what = f"got loss {metrics['loss']} and gradient norm {metrics['grad_norm']} in step {step}"
        kept = self._keep(folder, {"step": step, "rank": self.rank, "metrics": dict(metrics)}, evidence)
        if self.in_a_row >= self.limit:
            before = f" and in {self.in_a_row} step(s) before it" if self.in_a_row else ""
            raise NonFiniteError(
                f"{what}{before}, want finite ones; nothing was updated, and its batch is {kept}; fix: a lower "
                "learning_rate, look at that batch, or skip a few such steps with max_skipped_steps"
            )
        self.in_a_row, self.total = self.in_a_row + 1, self.total + 1
        _log.warning("%s: skipped (%d in a row of at most %d), its batch is %s", what, self.in_a_row, self.limit, kept)
        return False

    def metrics(self) -> dict[str, float]:
        """The number of skipped steps, to log; nothing where no step may be skipped."""
        return {"skipped_steps": float(self.total)} if self.limit else {}

    def state(self) -> dict[str, int]:
        """The counters, as JSON."""
        return {"in_a_row": self.in_a_row, "total": self.total}

    def load_state(self, state: Mapping[str, int]) -> None:
        """The inverse of `state`."""
        self.in_a_row, self.total = state["in_a_row"], state["total"]

    def _keep(self, folder: Path, facts: Mapping[str, object], evidence: Callable[[], Mapping[str, Tensor]]) -> str:
        """Write the batch; returns where it is. A full disk must neither hide the error nor make the ranks differ."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: value.contiguous() for name, value in evidence().items()}
            save_file(tensors, folder / f"rank-{self.rank}.safetensors")
            text = json.dumps(to_json(facts), indent=2, allow_nan=False) + "\n"
            (folder / f"rank-{self.rank}.json").write_text(text, encoding="utf-8")
        except Exception as error:  # safetensors has an error class of its own for a full disk
            return f"lost ({error})"
        return f"in {folder}"
