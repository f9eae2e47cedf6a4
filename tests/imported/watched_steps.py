"""Runs whose optimizer steps are watched: their batches, and the policies before them, for independent metrics."""

import copy
from typing import Any

import torch

SOME_EQUAL = {1, 2, 5}  # of 8 remainders
BASE = {
    **{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    **{"num_iterations": 2, "num_generations": 4, "max_steps": 5, "learning_rate": 0.01, "max_grad_norm": 0.0},
    **{"logprob_mismatch": "warn"},
}


def reward(completion_ids, **columns):
    return [float(sum(ids) % 8 in SOME_EQUAL) for ids in completion_ids]


def watched(trainer: Any, *, noise: float = 0.2) -> list[Any]:
    """The steps: their batch, the policy before it, and that of the first step of the generation.

    The sampler's log-probs of sampled tokens get some `noise`, and completions of the greatest length are cut ones.
    """
    generate, buffer, learn = trainer.engine.generate, trainer.collector.buffer, trainer.learner.learn
    steps, first = [], []

    def noisy(prompt_ids, sampling):
        rollouts, generator = generate(prompt_ids, sampling), torch.Generator().manual_seed(sampling.seed)
        for number, row in enumerate(rollouts.sampling_logprobs):
            rollouts.sampling_logprobs[number] = [
                min(0.0, value + noise * torch.randn((), generator=generator).item()) for value in row
            ]
            if len(row) == sampling.max_tokens:
                rollouts.finish_reasons[number] = "length"
        return rollouts

    def watch_buffer(*given):
        first[:] = [copy.deepcopy(trainer.model).double()]
        return buffer(*given)

    def watch_learn(batch, **options):
        steps.append((batch, copy.deepcopy(trainer.model).double(), first[0]))
        return learn(batch, **options)

    trainer.engine.generate, trainer.collector.buffer, trainer.learner.learn = noisy, watch_buffer, watch_learn
    return steps
