"""`BatchArithmetic`: sequences, prompts and micro-batches of a generated batch, from the options of a run."""

from __future__ import annotations

import math

from fused_grpo.errors import InputError


class BatchArithmetic:
    """A base of `GRPOConfig`."""

    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    num_iterations: int
    num_generations: int
    steps_per_generation: int | None
    generation_batch_size: int | None
    dynamic_sampling: int

    def micro_batches_per_generation(self, num_processes: int) -> int:
        """`steps_per_generation`, from `generation_batch_size` where that is given.

        At least `gradient_accumulation_steps`: until the weights change, one generation samples what several would.

        Raises:
            InputError: micro-batches of a generation that neither fill optimizer steps nor, used once, part of one.
        """
        step, given = self.gradient_accumulation_steps, f"steps_per_generation={self.steps_per_generation}"
        count, rest = self.steps_per_generation or step, 0
        if self.generation_batch_size is not None:
            given = f"generation_batch_size={self.generation_batch_size}"
            count, rest = divmod(self.generation_batch_size, self.per_device_train_batch_size * num_processes)
        part_of_a_step = count and not step % count and self.num_iterations == 1
        if rest or not count or (count % step and not part_of_a_step):
            batch = f"{self.per_device_train_batch_size} sequences on each of {num_processes} process(es)"
            raise InputError(
                f"got {given} with gradient_accumulation_steps={step} and num_iterations={self.num_iterations}, want "
                f"{step} micro-batches ({batch}) times a whole number, or for num_iterations=1 a divisor of {step}: an "
                "optimizer step uses one generated batch; fix: leave it out, or change one of the others"
            )
        return max(count, step)

    def optimizer_steps_per_generation(self, num_processes: int) -> int:
        """Optimizer steps of one pass over a generated batch; there are `num_iterations` passes."""
        return self.micro_batches_per_generation(num_processes) // self.gradient_accumulation_steps

    def prompts_per_generation(self, num_processes: int) -> int:
        """Prompts of one generated batch, over all processes.

        Raises:
            InputError: the sequences of a generated batch do not divide into whole groups.
        """
        steps = self.optimizer_steps_per_generation(num_processes)
        step = self.per_device_train_batch_size * self.gradient_accumulation_steps * num_processes
        sequences = step * steps
        if sequences % self.num_generations:
            lower = sequences // self.num_generations * self.num_generations
            options = " or ".join(str(size) for size in (lower, lower + self.num_generations) if size)
            raise InputError(
                f"got an effective batch of {self.per_device_train_batch_size} (per_device_train_batch_size) * "
                f"{self.gradient_accumulation_steps} (gradient_accumulation_steps) * {num_processes} process(es) = "
                f"{step} sequences with {steps} optimizer step(s) per generation, want a multiple of "
                f"num_generations={self.num_generations}; fix: make the product {options}"
            )
        return sequences // self.num_generations

    def group_part(self, num_processes: int) -> int:
        """Completions of a prompt that one process samples: a group, or the part of it that fits into its share."""
        self.prompts_per_generation(num_processes)
        share = self.per_device_train_batch_size * self.micro_batches_per_generation(num_processes)
        part = math.gcd(share, self.num_generations)
        if self.dynamic_sampling and part < self.num_generations:
            raise InputError(
                f"got dynamic_sampling={self.dynamic_sampling} with {share} sequences on each of {num_processes} "
                f"process(es), want whole groups of num_generations={self.num_generations} on each, which it replaces; "
                "fix: a larger per_device_train_batch_size or gradient_accumulation_steps, or dynamic_sampling=0"
            )
        return part

    def prompts_per_process(self, num_processes: int) -> int:
        """Prompts that each process completes `group_part` times in one generated batch.

        Raises:
            InputError: as `prompts_per_generation`; or `dynamic_sampling` with groups over several processes.
        """
        part = self.group_part(num_processes)
        return self.prompts_per_generation(num_processes) * self.num_generations // part // num_processes
