"""`WithDataLoaders`: the rows of a run as torch's `DataLoader`s, under transformers' names, for scripts that read them.

A batch is a list of rows, as in TRL: what one process samples completions for at a time, each prompt as often as it has
completions there. The loop does not use these loaders: an engine repeats prompts itself, and the position in the data
is the sampler's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from accelerate import Accelerator
from torch.utils.data import DataLoader, Sampler

from fused_grpo.errors import DataError, UnsupportedError
from fused_grpo.trainer.data.datasets import Row, all_rows, chosen_eval_sets, is_stream
from fused_grpo.trainer.data.prompt_sampler import PromptSampler


class WithDataLoaders:
    """The part of a trainer that shows its rows."""

    args: Any  # a `GRPOConfig`; the options of TRL's that are no fields of it are there all the same
    accelerator: Accelerator
    dataset: Any
    eval_dataset: Any
    sampler: PromptSampler

    def get_train_dataloader(self) -> DataLoader[list[Row]]:
        """The rows of this process in the first pass over the data, in the order in which a new run draws them.

        As in TRL, a batch has `per_device_train_batch_size * steps_per_generation` rows and comes once for each
        micro-batch and iteration that uses its completions, so that the length is that of the pass in micro-batches.
        Prompts that fill no batch are left out. Reading it does not move the run's own position.

        Raises:
            UnsupportedError: a stream, whose position a second reader would move.
        """
        if is_stream(self.dataset):
            raise UnsupportedError(
                "got a stream as train_dataset, whose position a second reader would move; want a dataset with a "
                "length; fix: iterate over your own copy of the stream"
            )
        processes = self.accelerator.num_processes
        times = self.args.micro_batches_per_generation(processes) * self.args.num_iterations
        batches = _RepeatedRows(self.sampler, self.args.group_part(processes), times)
        workers = self.args.dataloader_num_workers
        return DataLoader(self.dataset, batch_sampler=batches, collate_fn=list, num_workers=workers)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[list[Row]]:
        """The rows of an eval set that this process has, `per_device_eval_batch_size` at a time; none is left out.

        Args:
            eval_dataset: a set, or the name of one of the trainer's. None: the trainer's. A stream is read to its end.

        Raises:
            DataError: none, several, or one that cannot be used.
        """
        sets = chosen_eval_sets(eval_dataset, self.eval_dataset)
        if len(sets) > 1:
            raise DataError(f"got the eval sets {list(sets)}, want one; fix: get_eval_dataloader(name)")
        (rows,) = sets.values()
        workers = 0 if is_stream(rows) else self.args.dataloader_num_workers
        if is_stream(rows):
            rows = all_rows(rows, name="eval_dataset")
        size, repeats = self.args.per_device_eval_batch_size, self.args.num_generations_eval or 1
        numbers = [number for number in range(len(rows)) for _ in range(repeats)]
        batches = [numbers[first : first + size] for first in range(0, len(numbers), size)]
        mine = batches[self.accelerator.process_index :: self.accelerator.num_processes]
        return DataLoader(rows, batch_sampler=mine, collate_fn=list, num_workers=workers)


class _RepeatedRows(Sampler[list[int]]):
    """Each batch of a first pass `times` times, with each of its rows `each` times."""

    def __init__(self, sampler: PromptSampler, each: int, times: int) -> None:
        self.sampler, self.each, self.times = sampler, each, times

    def __len__(self) -> int:
        return self.sampler.batches_per_pass * self.times

    def __iter__(self) -> Iterator[list[int]]:
        for numbers in self.sampler.first_pass():
            for _ in range(self.times):
                yield [number for number in numbers for _ in range(self.each)]
