"""A process that lives as long as the soak, and trains all the time: its memory has to stay where it is.

Runs follow each other in it, of one engine after the other. Reward faults are part of every step; besides, most
trainers meet one fault that has to end them, with the right error. The next one goes on from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bars import WARM_UP
from faults import ENDS_WITH, SKIPPED_STEPS, Fault
from processes import held
from rewards import HANG_SECONDS, HANGS, KILLED, REPEATABLE
from runs import damage_newest, make_rewards, make_trainer

from fused_grpo.errors import UnavailableError, WeightSyncError
from fused_grpo.trainer import GRPOTrainer

RUN_STEPS = 60
MOST_WRONG = 5  # errors that nothing explains, after which a process ends
MOST_FRUITLESS = 10  # trainers in a row without a step
# What a server's own faults may end in, at any time.
OF_A_SERVER = (UnavailableError, WeightSyncError)


@dataclasses.dataclass
class Steady:
    """One such process. `fatal`: whether trainers are made to end before their time."""

    folder: Path
    engines: tuple[str, ...]
    deadline: float  # of time.monotonic
    seed: int
    port: int = 0
    fatal: bool = True

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.rewards: list[Any] = make_rewards(rate=0.02, kinds=(*REPEATABLE, HANGS, KILLED))
        self.steps = self.trainers = self.runs = self.fruitless = 0
        self.ordered, self.outcomes = Counter[str](), Counter[str]()
        self.wrong: list[str] = []
        self.held: list[tuple[float, dict[str, int]]] = []

    def __call__(self) -> None:
        torch.set_num_threads(1)
        self.warm = time.monotonic() + WARM_UP * (self.deadline - time.monotonic())
        while not self.held or (time.monotonic() < self.deadline and len(self.wrong) < MOST_WRONG):
            self.run(self.engines[self.runs % len(self.engines)])
            self.held.append((time.monotonic(), self._settled()))
        first = next((found for when, found in self.held if when >= self.warm), self.held[-1][1])
        self._write(first, self.held[-1][1])

    def run(self, engine: str) -> None:
        """One run to its end, over as many trainers as it takes."""
        self.runs += 1
        output_dir = self.folder / f"{engine}-{self.runs}"
        # Without fatal faults there are two: one to get warm, and one for the rest of the time.
        until = self.deadline if self.fatal or self.runs > 1 else self.warm
        while not self._train(output_dir, engine, until):
            if self.random.random() < 0.25 and damage_newest(output_dir):
                self.ordered["the newest checkpoint is truncated"] += 1
        self.wrong += [f"left in the output directory: {path.name}" for path in output_dir.rglob(".*")]
        shutil.rmtree(output_dir, ignore_errors=True)

    def _train(self, output_dir: Path, engine: str, until: float) -> bool:
        """One trainer; whether the run is at its end."""
        self.trainers += 1
        fault: Fault | None = None
        before = self.steps
        try:
            trainer = make_trainer(output_dir, self.rewards, **self._options(engine))
            fault = self._order(trainer) if self.fatal else None
            self._count(trainer)
            with stopped_at(until, trainer):
                trainer.train()
        except Exception as error:
            happened = fault.name if fault is not None and fault.happened else engine
            self.outcomes[f"{happened}: {type(error).__name__}"] += 1
            explained = fault is not None and fault.explains(error)
            self.fruitless = 0 if self.steps > before else self.fruitless + 1
            of_server = engine == "server" and isinstance(error, OF_A_SERVER) and self.fruitless < MOST_FRUITLESS
            if not (explained or of_server):
                self.wrong.append(f"{happened}: {type(error).__name__}: {error}")
            return time.monotonic() >= until or len(self.wrong) >= MOST_WRONG
        if fault is not None and fault.happened:
            self.outcomes[f"{fault.name}: passed over"] += 1
            self.wrong += [] if fault.noticed() else [f"went unnoticed: {fault.name}"]
        return True

    def _count(self, trainer: Any) -> None:
        """Count the steps that it makes."""
        learn = trainer.learner.learn

        def counted(*arguments: Any, **options: Any) -> Any:
            self.steps += 1
            return learn(*arguments, **options)

        trainer.learner.learn = counted

    def _options(self, engine: str) -> dict[str, Any]:
        own = {
            "transformers": {"use_vllm": False},
            "server": {
                "vllm_mode": "server",
                "vllm_server_base_url": f"http://127.0.0.1:{self.port}",
                "vllm_server_timeout": 15.0,
                "vllm_max_model_length": 64,
            },
            "vllm": {"use_vllm": True, "vllm_max_model_length": 64},
        }[engine]
        steps = RUN_STEPS if self.fatal else 10**6
        same = {"save_steps": 10, "reward_timeout": HANG_SECONDS / 2, "max_skipped_steps": SKIPPED_STEPS}
        return {"max_steps": steps, "seed": self.seed, **same, **own}

    def _order(self, trainer: GRPOTrainer) -> Fault | None:
        """Three trainers in four have one fault that ends them, a while after they began."""
        if self.random.random() < 0.25:
            return None
        return Fault(self.random.choice(sorted(ENDS_WITH)), trainer, after=self.random.randrange(2, RUN_STEPS))

    def _settled(self) -> dict[str, int]:
        """What the process holds between two runs, with a worker that is up and no thread of a reward that hangs."""
        time.sleep(HANG_SECONDS / 2 if HANGS in self.rewards[0].seen else 0)
        self.rewards[1](prompts=["1+1="], completions=["2"])
        gc.collect()
        return held()

    def _write(self, first: dict[str, int], last: dict[str, int]) -> None:
        faults = {f"a reward {kind}": count for kind, count in self.rewards[0].seen.items()} | dict(self.ordered)
        found = {
            "engines": self.engines,
            "steps": self.steps,
            "runs": self.runs,
            "trainers": self.trainers,
            "faults": faults,
            "ended_with": dict(self.outcomes),
            "wrong": self.wrong,
            "held_after_warm_up": first,
            "held_at_the_end": last,
        }
        self.folder.with_suffix(".json").write_text(json.dumps(found))


@contextlib.contextmanager
def stopped_at(moment: float, trainer: GRPOTrainer) -> Iterator[None]:
    """From then on, let the trainer's next step be its last one."""

    def stop() -> None:
        trainer.max_steps = trainer.step + 1

    timer = threading.Timer(max(0.0, moment - time.monotonic()), stop)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
