"""Prompts that leave no room for a completion in `vllm_max_model_length`: dropped with a count, or an error.

A dataset with random access is read before the run begins, so that order, epochs and resume are those of the dataset
without its long prompts. Of a stream, the sampler passes over them as it reads. Where no prompt is too long, nothing
changes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from torch.utils.data import Subset

from fused_grpo.errors import DataError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.config.trl_fields import warn_once
from fused_grpo.trainer.data.datasets import is_stream, read_rows
from fused_grpo.trainer.data.prompts import encode_prompts

_ROWS_AT_ONCE = 1000


class PromptLimit:
    """The longest prompt of a run, and what happens to longer ones.

    Args:
        args: `vllm_max_model_length` less `max_completion_length` is the limit; without the first there is none.
        tokenizer: that of the model.
    """

    def __init__(self, args: GRPOConfig, tokenizer: Any) -> None:
        longest = args.vllm_max_model_length
        self.tokens = None if longest is None else longest - args.max_completion_length
        self._drops = args.long_prompts == "drop"
        self._tokenizer, self._template = tokenizer, args.chat_template_kwargs

    def encode(self, rows: Sequence[Mapping[str, Any]], row_numbers: Sequence[int]) -> list[list[int]]:
        """Token ids of the rows' prompts.

        Raises:
            DataError: a prompt that cannot be encoded or is too long; named by the row's number.
        """
        return self._encode(rows, row_numbers, max_tokens=self.tokens)

    def fits(self, row: Mapping[str, Any], number: int) -> bool:
        """Whether the prompt of row `number` of a stream is short enough.

        Raises:
            DataError: a prompt that cannot be encoded; or one that is too long, where such prompts are an error.
        """
        if self._fitting([row], [number]):
            return True
        warn_once(f"got prompts {self._too_long()}, which are left out; prompts/dropped counts them; {self._fix()}")
        return False

    def applied(self, dataset: Any, *, name: str) -> Any:
        """The dataset without prompts that are too long, with a warning that counts them; streams are returned as is.

        Raises:
            DataError: as `fits`; or every prompt is too long.
        """
        if self.tokens is None or is_stream(dataset):
            return dataset
        kept, numbered = list[int](), enumerate(read_rows(dataset, name=name))
        while batch := list(islice(numbered, _ROWS_AT_ONCE)):
            numbers, rows = zip(*batch, strict=True)
            kept += [numbers[place] for place in self._fitting(rows, numbers)]
        if len(kept) == len(dataset):
            return dataset
        got = f"got {len(dataset) - len(kept)} of {len(dataset)} prompts of {name} {self._too_long()}"
        if not kept:
            raise DataError(f"{got}, want at least one that is shorter; {self._fix()}")
        warn_once(f"{got}, which are left out; {self._fix()}")
        # The sampler treats a `datasets.Dataset` in its own way.
        return dataset.select(kept) if _is_arrow(dataset) else Subset(dataset, kept)

    def _fitting(self, rows: Sequence[Mapping[str, Any]], row_numbers: Sequence[int]) -> list[int]:
        """The places in `rows` of those whose prompts are short enough."""
        ids = self._encode(rows, row_numbers, max_tokens=None if self._drops else self.tokens)
        return [place for place, tokens in enumerate(ids) if self.tokens is None or len(tokens) <= self.tokens]

    def _encode(
        self, rows: Sequence[Mapping[str, Any]], row_numbers: Sequence[int], *, max_tokens: int | None
    ) -> list[list[int]]:
        options: Any = {"chat_template_kwargs": self._template, "row_numbers": row_numbers, "max_tokens": max_tokens}
        return encode_prompts(rows, self._tokenizer, **options)

    def _too_long(self) -> str:
        return f"with more than {self.tokens} tokens (vllm_max_model_length less max_completion_length)"

    def _fix(self) -> str:
        return (
            "fix: a larger vllm_max_model_length or a smaller max_completion_length; long_prompts='fail' for an error"
        )


def _is_arrow(dataset: Any) -> bool:
    from datasets import Dataset

    return isinstance(dataset, Dataset)
