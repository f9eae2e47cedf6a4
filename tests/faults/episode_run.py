"""A short run with a tool and an environment that can be told where to end. Run by test_episode_kills.py.

    python episode_run.py OUTPUT_DIR (fresh|resume) WHERE NUMBER SIGNAL

The process sends itself SIGNAL when WHERE is reached for the NUMBER-th time:

    tool            a tool is being called
    turn            a turn is being sampled
    between turns   an episode has heard its tools
    reward          an environment is being scored
    save            a save is about to change something in the file system
    nowhere         never

At its end it prints how often it came to each. OUTPUT_DIR.calls has a line for every call of a tool: its name, and the
number of the row whose episode made it.
"""

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
sys.path.insert(0, str(Path(__file__).parents[1] / "imported"))
from resume_run import CHANGES, Saves
from talkers import Talker, call, talking_model, talking_tokenizer

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.episodes import play
from fused_grpo.trainer.logging import run_output
from fused_grpo.trainer.types import Rollouts, SamplingParams

OUT, START, WHERE, NUMBER, SIGNAL = *sys.argv[1:4], int(sys.argv[4]), signal.Signals[sys.argv[5]]
COUNTS, LOCK = Counter[str](), threading.Lock()
# A generated batch has two of them, and serves two steps.
ROWS = [{"prompt": [{"role": "user", "content": f"Customer {number}."}], "number": number} for number in range(6)]


def note(event: str) -> None:
    """Count an event; here the process ends, where this is the one."""
    with LOCK:
        COUNTS[event] += 1
        is_due = (event, COUNTS[event]) == (WHERE, NUMBER)
    if is_due:
        os.write(1, f"{SIGNAL.name} in {event} {NUMBER}\n".encode())
        os.kill(os.getpid(), SIGNAL)


def called(tool: str, number: int) -> None:
    with open(f"{OUT}.calls", "a") as file:
        file.write(f"{tool} {number}\n")
    note("tool")


def price(number: int) -> int:
    """Look up the price for a customer.

    Args:
        number: The customer's.
    """
    called("price", number)
    time.sleep(0.002 * (number % 3))
    if number % 4 == 3:
        raise LookupError(f"no price for {number}")
    return number * 7 % 10


class Shop:
    """The customer wants as many things as `reset` draws, and leaves with exactly so many."""

    def reset(self, number: int, **row: Any) -> str:
        self.number, self.sold, self.done, self.wanted = number, 0, False, random.randrange(2, 9)
        return f" They want {self.wanted} things."

    def sell(self, count: int) -> str:
        """Sell things.

        Args:
            count: How many.
        """
        called("sell", self.number)
        self.sold += count
        self.done = self.sold == self.wanted
        return f"sold {self.sold} in all"

    def get_reward(self) -> float:
        note("reward")
        return 1.0 / (1 + abs(self.wanted - self.sold))


class Actor(Talker):
    """Draws what it says by the seed of the call, all that it reads, and the weights: as an engine that samples."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        super().__init__(model, tokenizer, self.draw)

    def generate(self, prompt_ids: Any, sampling: SamplingParams) -> Rollouts:
        self.seed = sampling.seed
        return super().generate(prompt_ids, sampling)

    def draw(self, read: str, place: int) -> str:
        note("turn")
        number = int(re.search(r"Customer (\d+)", read)[1])
        chance = random.Random(f"{self.seed}/{place}/{self.model.lm_head.weight.sum().item()}/{read}")
        sell, look = call("sell", count=chance.randrange(1, 5)), call("price", number=number)
        return chance.choice([sell, sell, look, look + sell, f"Thank you{'!' * chance.randrange(9)}"])


def politeness(completions: list[Any], **columns: Any) -> list[float]:
    return [len(messages[-1]["content"]) / 100 for messages in completions]


def count_between_turns() -> None:
    hear = play._Played.hear

    def heard(episode: Any, answers: Any) -> bool:
        goes_on = hear(episode, answers)
        note("between turns")
        return goes_on

    play._Played.hear = heard


def count_in_saves() -> None:
    """As in resume_run.py: Python says what it is about to ask of the system."""
    saves = Saves(then_wait=False)

    def observe(event: str, arguments: tuple[Any, ...]) -> None:
        if not saves.running:
            return
        changes = event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        # Names without a path are of files in a directory that is open: one that is being removed.
        if changes and (not str(arguments[0]).startswith("/") or OUT in str(arguments[0])):
            note("save")

    sys.addaudithook(observe)


def main() -> None:
    run_output.write_report = lambda folder: folder / "report.html"  # which takes longer than the run
    count_between_turns()
    count_in_saves()
    args = GRPOConfig(
        OUT,
        per_device_train_batch_size=4,
        steps_per_generation=2,
        num_generations=4,
        max_completion_length=500,
        max_tool_calling_iterations=3,
        max_steps=6,
        learning_rate=1e-3,
        warmup_steps=2,
        shuffle_dataset=False,
        logging_steps=1,
        save_steps=1,  # every other one in the middle of a batch
        save_total_limit=2,
        gradient_checkpointing=False,
        resume_from_checkpoint=START == "resume",
        overwrite_output_dir=START == "fresh",
    )
    tokenizer = talking_tokenizer()
    model = talking_model(tokenizer, num_hidden_layers=1)
    episodes = {"tools": [price], "environment_factory": Shop}
    engine = Actor(model, tokenizer)
    trainer = GRPOTrainer(model, politeness, args, ROWS, processing_class=tokenizer, rollout_engine=engine, **episodes)
    trainer.train()
    print("counted", json.dumps(COUNTS), flush=True)


if __name__ == "__main__":
    main()
