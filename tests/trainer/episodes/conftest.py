"""A trainer whose model says what a script says, and which has tools."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from talkers import Talker, talking_model, talking_tokenizer

from fused_grpo.trainer import GRPOConfig, GRPOTrainer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return talking_tokenizer()


def turns(completions: list[Any], **columns: Any) -> list[float]:
    """Messages of a completion, and the length of the last one."""
    return [len(messages) + len(messages[-1]["content"]) / 100 for messages in completions]


@pytest.fixture
def make_trainer(tokenizer: Any, tmp_path: Path) -> Callable[..., GRPOTrainer]:
    def make(
        say: Callable[[str, int], str],
        *,
        engine: type[Talker] = Talker,
        reward: Any = turns,
        rows: Any = "as they are",
        **options: Any,
    ) -> GRPOTrainer:
        names = ("tools", "environment_factory", "callbacks", "eval_dataset", "peft_config")
        arguments = {name: options.pop(name) for name in names if name in options}
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "overwrite_output_dir": True,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 400,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "gradient_checkpointing": False,
            "log_completions": False,
            "save_strategy": "no",
            "bf16": False,
            "use_cpu": True,
            "report_to": "none",
        }
        model = talking_model(tokenizer)
        prompts = [{"prompt": [{"role": "user", "content": f"{a} * 7?"}], "answer": 7 * a} for a in range(1, 5)]
        return GRPOTrainer(
            model,
            reward,
            GRPOConfig(**{**defaults, **options}),
            prompts if rows == "as they are" else rows,
            processing_class=tokenizer,
            rollout_engine=engine(model, tokenizer, say),
            **arguments,
        )

    return make
