"""Whole trainers that run one step at a time, so that the steps of two `train()` calls can be interleaved.

Each trainer runs in a thread of its own and waits whenever it calls its `rollout_func` for completions. A step lasts
from one such call to the next: rewards, advantages, the training phase and logging, all in the trainer's own loop.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from typing import Any

from fused_grpo.bench.trainers.training_step import Problem


class EndOfRun(Exception):
    """Raised inside `rollout_func` to end a training run."""


class SteppedTrainer:
    """A trainer whose training advances by one step for each call of `step`."""

    def __init__(self, problem: Problem, make: Callable[..., Any]) -> None:
        batch = problem.batch()
        self._rewards = {tuple(sample.completion_ids): sample.advantage for sample in batch}
        self._rollouts = {
            "prompt_ids": [sample.prompt_ids for sample in batch],
            "completion_ids": [sample.completion_ids for sample in batch],
            "logprobs": None,
        }
        self._go, self._waits, self._over = threading.Semaphore(0), threading.Semaphore(0), False
        self._error: Exception | None = None
        self._trainer = make(problem, self._reward, rollout_func=self._answer)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    def step(self) -> None:
        """Return the completions, and wait until the trainer calls for the next ones."""
        self._go.release()
        self._wait()

    def stop(self) -> None:
        self._over = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._trainer.train()
        except EndOfRun:
            pass
        except Exception as error:
            self._error = error
        finally:
            self._waits.release()

    def _wait(self) -> None:
        self._waits.acquire()
        if self._error is not None:
            raise self._error

    def _answer(self, prompts: list[Any], trainer: Any) -> dict[str, Any]:
        self._waits.release()
        self._go.acquire()
        if self._over:
            raise EndOfRun
        return dict(self._rollouts)

    def _reward(self, completion_ids: list[list[int]], **columns: Any) -> list[float]:
        return [self._rewards[tuple(ids)] for ids in completion_ids]
