"""The environment behind an OpenEnv server: the game of environment.py, played in sessions of a server of this script.

    pip install 'fused-grpo[openenv]'
    python examples/openenv_server.py [model, such as Qwen/Qwen3-0.6B]

The reward is the server's: 1 for the number, otherwise 0. Without a model a tiny one is made, which can write a call
and guesses at random. What is printed is the mean reward of each step. The report with the games is in runs/openenv.
"""

import random
import socket
import sys
import threading

import torch
import uvicorn
from environment import GUESSES, LARGEST, TASK, tiny_model
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from pydantic import Field

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.environments import openenv_environment

RUN = {"overwrite_output_dir": True, "max_steps": 10, "logging_steps": 1, "save_strategy": "no", "use_vllm": False}
TINY = {"per_device_train_batch_size": 64, "num_generations": 16, "max_completion_length": 16, "learning_rate": 1e-3}


class Guess(Action):
    """Guess the number."""

    number: int = Field(description="Your guess.")


class Answer(Observation):
    text: str


class Numbers(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, **columns: object) -> Answer:
        self.number, self.guesses = random.Random(seed).randint(1, LARGEST), 0
        return Answer(text=TASK)

    def step(self, action: Guess, timeout_s: float | None = None, **options: object) -> Answer:
        self.guesses += 1
        if action.number == self.number:
            return Answer(text="right", done=True, reward=1.0)
        text = "higher" if action.number < self.number else "lower"
        return Answer(text=text, done=self.guesses == GUESSES, reward=0.0)


def start_server() -> str:
    """Its address."""
    app = create_fastapi_app(Numbers, Guess, Answer, max_concurrent_envs=128)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    listener = socket.create_server(("127.0.0.1", 0))  # a free port; who connects waits until the server runs
    threading.Thread(target=server.run, args=[[listener]], daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}"


def main(name: str = "") -> None:
    torch.set_num_threads(1)  # a model this small gains nothing from a second thread
    guess = openenv_environment(start_server(), Guess, show=lambda observation: observation["text"])
    model, tokenizer = (name, None) if name else tiny_model(tool="step")
    args = GRPOConfig("runs/openenv", **RUN, **({} if name else TINY))
    trainer = GRPOTrainer(model, None, args, processing_class=tokenizer, environment_factory=guess)
    trainer.train()
    print("reward by step:", *(f"{entry['reward']:.2f}" for entry in trainer.state.log_history if "reward" in entry))


if __name__ == "__main__":
    main(*sys.argv[1:])
