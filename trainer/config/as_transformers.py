"""`AsTransformers`: what callbacks of transformers read from their `args` beside the fields of `GRPOConfig`."""

from __future__ import annotations

import dataclasses
import json
import os
from typing import Any

from fused_grpo.trainer.config.redaction import redacted
from fused_grpo.trainer.config.trl_fields import MISSING


class AsTransformers:
    """The base of `GRPOConfig`."""

    per_device_train_batch_size: int
    per_device_eval_batch_size: int

    @property
    def world_size(self) -> int:
        """Number of processes, as the launcher sets it."""
        return int(os.environ.get("WORLD_SIZE", "1"))

    @property
    def process_index(self) -> int:
        """Rank of this process."""
        return int(os.environ.get("RANK", "0"))

    @property
    def local_process_index(self) -> int:
        """Rank of this process on its machine."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    @property
    def should_save(self) -> bool:
        """Whether this process writes files."""
        return self.process_index == 0

    @property
    def should_log(self) -> bool:
        """Whether this process logs."""
        return self.process_index == 0

    @property
    def train_batch_size(self) -> int:
        """Sequences of a micro-batch of this process."""
        return self.per_device_train_batch_size

    def to_dict(self) -> dict[str, Any]:
        """The options that have an effect here as JSON, without secrets and home directories."""
        fields = dataclasses.fields(self)  # type: ignore[arg-type]  # of the dataclass that inherits
        values = redacted({field.name: getattr(self, field.name) for field in fields if field.name not in MISSING})
        assert isinstance(values, dict)
        return values

    def to_json_string(self) -> str:
        """`to_dict` as text."""
        return json.dumps(self.to_dict(), indent=2)

    def to_sanitized_dict(self) -> dict[str, Any]:
        """`to_dict` with plain values only, all others as text: for trackers of hyperparameters."""
        return {
            name: value if type(value) in (bool, int, float, str) else str(value)
            for name, value in self.to_dict().items()
        }
