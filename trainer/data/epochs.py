"""`Epochs`: how many passes over the prompts the optimizer steps of a run are.

A step is the share `prompts_per_step / num_prompts` of an epoch. A generated batch of P prompts that K steps use counts
as P / K prompts for each of them. No row is dropped: an epoch that ends inside a batch ends with the step that uses its
last row. Of a stream, whose length is unknown, the whole run is one epoch, as in transformers.
"""

from __future__ import annotations

import math
import sys
from fractions import Fraction

from fused_grpo.errors import InputError
from fused_grpo.trainer.config.grpo_config import GRPOConfig


class Epochs:
    """The epochs of a run of `max_steps` optimizer steps.

    Args:
        num_prompts: rows of the dataset; None for a stream.
        prompts_per_step: rows that one optimizer step uses, over all processes.
        max_steps: of the run.
    """

    def __init__(self, num_prompts: int | None, prompts_per_step: Fraction, max_steps: int) -> None:
        self.per_step = Fraction(1, max_steps) if num_prompts is None else prompts_per_step / num_prompts
        # A stream may be longer than any number of steps.
        self.total = sys.maxsize if num_prompts is None else math.ceil(max_steps * self.per_step)
        self.skipped = Fraction(0)

    def at(self, step: int) -> Fraction:
        """Epochs after `step` optimizer steps."""
        return step * self.per_step + self.skipped

    def ends_with(self, step: int) -> bool:
        """Whether the last row of an epoch is used in that step."""
        return math.floor(self.at(step)) > math.floor(self.at(step - 1))

    def skip(self, step: int) -> None:
        """Leave the rest of the epoch out: the next step is the first of the next one."""
        self.skipped += math.ceil(self.at(step)) - self.at(step)

    def resume(self, step: int, epoch: float) -> None:
        """Continue after `step`, which ended at `epoch`: what was skipped before follows from the two."""
        parts = self.per_step.denominator
        self.skipped = Fraction(round((epoch - float(step * self.per_step)) * parts), parts)


def planned_steps(args: GRPOConfig, num_prompts: int | None, num_processes: int) -> tuple[int, Epochs]:
    """The optimizer steps of a run over a dataset of `num_prompts` rows, and how many epochs they are.

    Raises:
        InputError: neither the length of the dataset nor `max_steps` says it.
    """
    if num_prompts is None and args.max_steps <= 0:
        raise InputError("got a train_dataset without a length and max_steps=-1; fix: set max_steps")
    batch = args.prompts_per_generation(num_processes)
    steps = args.optimizer_steps_per_generation(num_processes) * args.num_iterations
    generations = math.ceil((num_prompts or 0) * args.num_train_epochs / batch)
    max_steps = args.max_steps if args.max_steps > 0 else generations * steps
    return max_steps, Epochs(num_prompts, Fraction(batch, steps), max_steps)
