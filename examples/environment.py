"""An environment of several turns: find a number from 1 to 4 in three guesses, each answered by "higher" or "lower".

    python examples/environment.py [seed] [model, such as Qwen/Qwen3-0.6B]

Who heeds the answers and keeps to the middle always wins. Without a model a tiny one is made, which can write a call
and guesses at random. GRPO has only wins and losses. The report with the games is in runs/environment.
"""

import json
import random
import sys

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM, set_seed

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes import arithmetic, calculator

LARGEST, GUESSES, GAMES = 4, 3, 256  # GAMES: that the tiny model has seen
TASK, ANSWERS = f"Find my number, from 1 to {LARGEST}, in {GUESSES} guesses.", ("right", "higher", "lower")
RUN = {"overwrite_output_dir": True, "max_steps": 60, "logging_steps": 5, "save_strategy": "no", "use_vllm": False}
TINY = {"per_device_train_batch_size": 192, "num_generations": 48, "max_completion_length": 16}
TINY |= {"learning_rate": 1e-3, "lr_scheduler_type": "constant"}


class Guess:
    def reset(self, number: int) -> str:
        self.number, self.guesses, self.is_right, self.done = number, 0, False, False
        return TASK

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: Your guess.
        """
        if self.done:
            raise ValueError("the game is over")  # the model reads it
        self.guesses, self.is_right = self.guesses + 1, number == self.number
        self.done = self.is_right or self.guesses == GUESSES
        return "right" if self.is_right else "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return float(self.is_right)


def tiny_model(tool: str = "guess") -> tuple[Qwen2ForCausalLM, PreTrainedTokenizerFast]:
    set_seed(1)
    calls = [{"name": tool, "arguments": {"number": number}} for number in range(1, LARGEST + 1)]
    tokenizer = calculator.build_tokenizer()  # in which a call is going to be one token, and so is an answer
    tokenizer.add_tokens([TASK, *ANSWERS, *(f"<tool_call>{json.dumps(call)}</tool_call>" for call in calls)])
    games = [[{"role": "user", "content": TASK}] for _ in range(GAMES)]
    for game in games * GUESSES:
        call = {"type": "function", "function": random.choice(calls)}
        game.append({"role": "assistant", "content": "", "tool_calls": [call]})
        game.append({"role": "tool", "name": tool, "content": random.choice(ANSWERS)})
    ids = torch.tensor(tokenizer.apply_chat_template(games, return_dict=False))
    config = arithmetic.build_model_config(tokenizer)
    config.initializer_range = 0.1  # with less, it takes long until guesses depend on answers
    model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, tokenizer


def main(seed: str = "0", name: str = "") -> None:
    torch.set_num_threads(1)  # a model this small gains nothing from a second thread
    model, tokenizer = (name, None) if name else tiny_model()
    args = GRPOConfig("runs/environment", seed=int(seed), **RUN, **({} if name else TINY))
    rows = [{"number": number} for number in range(1, LARGEST + 1)]
    trainer = GRPOTrainer(model, None, args, rows, processing_class=tokenizer, environment_factory=Guess)
    trainer.train()
    print("numbers found:", *(f"{entry['reward']:.2f}" for entry in trainer.state.log_history if "reward" in entry))


if __name__ == "__main__":
    main(*sys.argv[1:])
