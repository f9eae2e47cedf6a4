"""Two steps with an environment on however many processes it is started on.

    python ranks_run.py <out folder> <sequences per process> [<options as JSON>]

Every process leaves its weights, and what it logged, in <out>/rank-<rank>.pt.
"""

import json
import os
import re
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "imported"))
from talkers import Talker, call, talking_model, talking_tokenizer

from fused_grpo.trainer import GRPOConfig, GRPOTrainer

RANK = int(os.environ.get("RANK", "0"))
OUT, SEQUENCES, OPTIONS = Path(sys.argv[1]), int(sys.argv[2]), json.loads(" ".join(sys.argv[3:]) or "{}")


class Counter:
    """Scores how close an episode comes to the number of its task."""

    def reset(self, seed: int, **row) -> str:
        self.wanted, self.count = seed % 5, 0
        return f" To {self.wanted}."

    def add(self, number: int) -> str:
        """Add to the count.

        Args:
            number: How much.
        """
        self.count += number
        return f"{self.count} of {self.wanted}"

    def get_reward(self) -> float:
        return -abs(self.count - self.wanted) / 5


def say(read: str, member: int) -> str:
    """Members of a group of four, which may be on two ranks, call never, once, twice and three times."""
    turns = read.count("<answer>")
    # Of a later turn: the episodes that are left are fewer, and the answers say whose turn it is.
    who = (RANK * SEQUENCES + member) % 4 if not turns else int(re.findall(r"<answer>(\d+) of", read)[0])
    return call("add", number=who) if turns < who else "done"


def main() -> None:
    tokenizer = talking_tokenizer()
    model = talking_model(tokenizer)
    args = GRPOConfig(
        str(OUT / "run"),
        per_device_train_batch_size=SEQUENCES,
        num_generations=4,
        max_completion_length=400,
        max_steps=2,
        learning_rate=1e-3,
        loss_type="dapo",
        save_strategy="no",
        shuffle_dataset=False,
        log_completions=False,
        bf16=False,
        use_cpu=True,
        **OPTIONS,
    )
    rows = [{"prompt": [{"role": "user", "content": f"Count, customer {number}."}]} for number in range(8)]
    engine = Talker(model, tokenizer, say)
    trainer = GRPOTrainer(
        model, None, args, rows, processing_class=tokenizer, rollout_engine=engine, environment_factory=Counter
    )
    result = trainer.train()
    logged = {name: value for name, value in result.metrics.items() if isinstance(value, float) and "time" not in name}
    told = [[one.prompt_ids, one.completion_ids, one.completion_mask] for one in trainer.scored.samples]
    weights = {name: value.detach() for name, value in trainer.model.named_parameters()}
    report = {"weights": weights, "logged": logged, "told": json.dumps(told)}
    torch.save(report, OUT / f"rank-{RANK}.pt")
    trainer.end()


if __name__ == "__main__":
    main()
