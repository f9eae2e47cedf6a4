"""An environment of several turns: find a number from 1 to 7 in three guesses, answered by "higher than 3", say.

    python examples/environment.py [seed] [model, such as Qwen/Qwen3-0.6B]

Who halves the range finds every number. Without a model a tiny one is made on the spot, from games in which half of the
guesses heed the answer before them and the others are at random. GRPO then has only games that were won or lost. The
report, with the games as conversations, is in runs/environment.
"""

import json
import random
import sys
from typing import Any

import torch
from transformers import Qwen2ForCausalLM, set_seed

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes import arithmetic, calculator

NUMBERS, GUESSES = range(1, 8), 3
TASK = f"Find my number, from 1 to {NUMBERS[-1]}, in {GUESSES} guesses."
RUN = {"overwrite_output_dir": True, "max_steps": 40, "logging_steps": 5, "save_strategy": "no", "use_vllm": False}
TINY = {"per_device_train_batch_size": 512, "num_generations": 16, "max_completion_length": 20, "learning_rate": 3e-3}


class Guess:
    def reset(self, seed: int, **row: Any) -> str:
        self.number, self.guesses, self.found, self.done = random.Random(seed).choice(NUMBERS), 0, False, False
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
        return answer_to(number, self.number)

    def get_reward(self) -> float:
        return float(self.found)


def answer_to(guess: int, number: int) -> str:
    return "right" if guess == number else f"{'higher' if number > guess else 'lower'} than {guess}"


def tiny_model() -> tuple[Any, Any]:
    """A model that heeds every second answer, and its tokenizer: a call is one token, and so is an answer."""
    calls = {number: {"name": "guess", "arguments": {"number": number}} for number in NUMBERS}
    answers = {answer_to(guess, number) for guess in NUMBERS for number in NUMBERS}
    tokenizer = calculator.build_tokenizer()
    written = [f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls.values()]
    tokenizer.add_tokens([TASK, *sorted(answers), *written])
    ids = torch.tensor(tokenizer.apply_chat_template([game(calls) for _ in range(2048)], return_dict=False))
    model = Qwen2ForCausalLM(arithmetic.build_model_config(tokenizer))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(160):
        part = ids[step % 16 :: 16]
        model(part, labels=part).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def game(calls: dict[int, Any]) -> list[dict[str, Any]]:
    """A conversation of GUESSES guesses that does not end where the number is found."""
    number, messages, left = random.choice(NUMBERS), [{"role": "user", "content": TASK}], list(NUMBERS)
    for _ in range(GUESSES):
        guess = random.choice(left if left and random.random() < 0.5 else NUMBERS)
        answer = answer_to(guess, number)
        left = [n for n in NUMBERS if answer_to(guess, n) == answer]
        call = {"type": "function", "function": calls[guess]}
        messages.append({"role": "assistant", "content": "", "tool_calls": [call]})
        messages.append({"role": "tool", "name": "guess", "content": answer})
    return messages


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
