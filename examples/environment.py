"""An environment of several turns: find a number from 1 to 7 in three guesses, each answered by "higher" or "lower".

    python examples/environment.py [seed] [model, such as Qwen/Qwen3-0.6B]

Who halves the range finds every number. Without a model a tiny one is made on the spot: it is shown games until it can
call the tool, and guesses at random. GRPO then has only games that were won or lost: it learns which guess follows
which answer. The report, with the games as conversations, is in runs/environment.
"""

import json
import random
import sys
from typing import Any

import torch
from transformers import Qwen2ForCausalLM, set_seed

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes import arithmetic, calculator

LARGEST, GUESSES = 7, 3
TASK, ANSWERS = f"Find my number, from 1 to {LARGEST}, in {GUESSES} guesses.", ("right", "higher", "lower")
RUN = {"overwrite_output_dir": True, "max_steps": 40, "logging_steps": 5, "save_strategy": "no", "use_vllm": False}
TINY = {"per_device_train_batch_size": 256, "num_generations": 16, "max_completion_length": 20, "learning_rate": 1e-3}


class Guess:
    def reset(self, seed: int, **row: Any) -> str:
        self.number, self.guesses, self.found, self.done = random.Random(seed).randint(1, LARGEST), 0, False, False
        return TASK

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        if self.done:
            raise ValueError("the game is over")  # the model reads it
        self.guesses, self.found = self.guesses + 1, number == self.number
        self.done = self.found or self.guesses == GUESSES
        return "right" if self.found else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return float(self.found)


def tiny_model() -> tuple[Any, Any]:
    """A model that guesses at random, and its tokenizer: a call is one token, and so is an answer."""
    calls = [{"name": "guess", "arguments": {"number": number}} for number in range(1, LARGEST + 1)]
    tokenizer = calculator.build_tokenizer()
    tokenizer.add_tokens([TASK, *ANSWERS, *(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)])
    games = [[{"role": "user", "content": TASK}] for _ in range(256)]
    for game in games * GUESSES:
        call = {"type": "function", "function": random.choice(calls)}
        game.append({"role": "assistant", "content": "", "tool_calls": [call]})
        game.append({"role": "tool", "name": "guess", "content": random.choice(ANSWERS)})
    ids = torch.tensor(tokenizer.apply_chat_template(games, return_dict=False))
    model = Qwen2ForCausalLM(arithmetic.build_model_config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(60):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def main(seed: str = "0", name: str = "") -> None:
    torch.set_num_threads(1)  # a model this small gains nothing from a second thread
    set_seed(int(seed))
    model, tokenizer = (name, None) if name else tiny_model()
    args = GRPOConfig("runs/environment", seed=int(seed), **RUN, **({} if name else TINY))
    trainer = GRPOTrainer(model, args=args, processing_class=tokenizer, environment_factory=Guess)
    trainer.train()
    found = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    print("numbers found, five steps each:", *(f"{share:.2f}" for share in found))


if __name__ == "__main__":
    main(*sys.argv[1:])
