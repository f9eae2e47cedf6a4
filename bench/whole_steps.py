"""Whole trainers a step at a time, so that their `train()` can take turns.

Each runs in a thread of its own and stops where it asks its `rollout_func` for completions. A turn lasts from one such
question to the next: rewards, advantages, the training phase and what is logged, all in the trainer's own loop.
"""

from __future__ import annotations

import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fused_grpo.bench.trainer_peers import Problem
from fused_grpo.trainer import GRPOConfig, GRPOTrainer

Make = Callable[..., Any]


class EndOfRun(Exception):
    """No more completions are given."""


class SteppedTrainer:
    """A trainer whose training advances by one step a call."""

    def __init__(self, problem: Problem, make: Make) -> None:
        batch = problem.batch()
        pairs = zip(batch.completion_ids, batch.advantages.tolist(), strict=True)
        self._rewards = {tuple(ids): reward for ids, reward in pairs}
        self._rollouts = {"prompt_ids": batch.prompt_ids, "completion_ids": batch.completion_ids, "logprobs": None}
        self._go, self._waits, self._over = threading.Semaphore(0), threading.Semaphore(0), False
        self._error: Exception | None = None
        self._trainer = make(problem, self._answer, self._reward)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    def step(self) -> None:
        """From the completions that it has asked for until it asks again."""
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


def ours(problem: Problem, rollout_func: Any, reward: Any) -> GRPOTrainer:
    args = GRPOConfig(output_dir=str(Path(tempfile.mkdtemp()) / "run"), log_completions=False, **options_of(problem))
    rows = [{"prompt": "2 3"}] * problem.completions
    tokenizer = problem.tokenizer()
    return GRPOTrainer(problem.model(), reward, args, rows, processing_class=tokenizer, rollout_func=rollout_func)


def trl(problem: Problem, rollout_func: Any, reward: Any) -> Any:
    import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import GRPOConfig, GRPOTrainer

        args = GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **options_of(problem),
        )
        rows = datasets.Dataset.from_list([{"prompt": "2 3"}] * problem.completions)
        tokenizer = problem.tokenizer()
        return GRPOTrainer(problem.model(), reward, args, rows, processing_class=tokenizer, rollout_func=rollout_func)


def options_of(problem: Problem) -> dict[str, Any]:
    return {"per_device_train_batch_size": problem.completions, "learning_rate": 0.0, **problem.options}
