"""The table of docs/trainer.md has a row for each number that a run logs, and no other; all these names are taken."""

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from datasets import IterableDataset
from mixtures import experts_of, mixture
from talkers import Talker, call, talking_model, talking_tokenizer

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.logging.run_log import TAKEN, free_name, read_metrics

PAGE = Path(__file__).parents[3] / "docs" / "trainer.md"
PLACEHOLDERS = {"<function>": "[^/]+", "<k>": r"\d+"}
# Names of a log, without a number of a run's own: transformers' of the time, and those of evaluations.
OF_TRANSFORMERS = r"(train_|eval[_/](hard_)?)(runtime|samples_per_second|steps_per_second|loss)|total_flos"
OF_EVALUATIONS = r"eval(_hard)?[_/]"
ENTROPY = {"use_adaptive_entropy": True, "entropy_target": 9.0}
DROPS = {"dynamic_sampling": 1, "rollout_failure": "drop", "max_skipped_steps": 1}
EVALUATED = {"eval_dataset": {"hard": [{"prompt": "1+1=", "answer": "2"}]}, "num_generations_eval": 2}
LEVELS = [{"prompt": f"{a}+1=", "answer": "", "difficulty": a} for a in range(8)]
LONG = [{"prompt": prompt, "answer": ""} for prompt in ("1+1=", "1+1+1+1+1+1=", "2+2=")]
STREAM = IterableDataset.from_generator(lambda: iter(LONG))
RUNS: dict[str, dict[str, Any]] = {
    "everything of one batch": {"beta": 0.1, **ENTROPY, **DROPS, **EVALUATED, "variance_report": True},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.1},
    "vespo": {"loss_type": "vespo"},
    "remax": {"advantage_estimator": "remax"},
    "distilled": {"distillation_coef": 0.5, "teacher_model": "self"},
    "a curriculum": {"curriculum": "difficulty", "dataset": LEVELS},
    "a stream": {
        "dataset": IterableDataset.from_generator(lambda: iter(LONG)),
        "vllm_max_model_length": 12,
        "max_steps": 3,
    },
    "truncated": {"score_centering": "kept", "top_k": 3, "engine": TransformersEngine},
}


def rows() -> list[str]:
    """The patterns of all names in the first columns of the page's tables of metrics."""
    (text,) = re.findall(r"^## What is logged\n(.*)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    cells = re.findall(r"^\| (`.*?) \|", text, re.MULTILINE)
    return [name for cell in cells for given in re.findall(r"`([^`]+)`", cell) for name in expanded(given)]


def expanded(given: str) -> list[str]:
    """`a{b,c}` as in a shell, with placeholders as patterns."""
    parts = [part.split(",") for part in re.split(r"[{}]", given)]
    names = map("".join, itertools.product(*parts))
    return ["".join(PLACEHOLDERS.get(part, re.escape(part)) for part in re.split(r"(<\w+>)", name)) for name in names]


def logged_names(trainer: Any) -> set[str]:
    """All names in metrics.jsonl and the history, of evaluations without their prefix."""
    trainer.train()
    entries = [*read_metrics(trainer.output_dir / "metrics.jsonl"), *trainer.state.log_history]
    names = {name for entry in entries for name in entry if not re.fullmatch(OF_TRANSFORMERS, name)}
    return {re.sub(f"^{OF_EVALUATIONS}(hard_)?", "", name) for name in names}


def own_run(model: Any, tokenizer: Any, engine: Any, folder: Path, dataset: Any, **arguments: Any) -> Any:
    args = GRPOConfig(
        **{"output_dir": str(folder), "per_device_train_batch_size": 4, "num_generations": 4, "max_steps": 1},
        **{"max_completion_length": 60, "save_strategy": "no", "bf16": False, "report_to": "none"},
        **{"gradient_checkpointing": False, "log_completions": False, "logprob_mismatch": "warn"},
    )

    def length(completions: Any, **columns: Any) -> list[float]:
        return [float(len(str(one))) for one in completions]

    given = {"processing_class": tokenizer, "rollout_engine": engine(model, tokenizer), **arguments}
    return GRPOTrainer(model, length, args, dataset, **given)


def multiply(a: int) -> str:
    """Seven times a number.

    Args:
        a: The number.
    """
    return str(7 * a)


def run_with_tools(folder: Path) -> Any:
    tokenizer = talking_tokenizer()

    def say(text: str, place: int) -> str:
        return "28" if "<answer>" in text else call("multiply", a=4)

    def engine(model: Any, tokenizer: Any) -> Any:
        return Talker(model, tokenizer, say)

    dataset = [{"prompt": [{"role": "user", "content": "4 * 7?"}]}]
    return own_run(talking_model(tokenizer), tokenizer, engine, folder, dataset, tools=[multiply])


def run_of_a_mixture(folder: Path, scripted: Any, tokenizer: Any) -> Any:
    class Routed(scripted):
        """Says its experts, and what a sync to servers took."""

        sync_metrics = MappingProxyType({"weight_sync/bytes": 8.0, "weight_sync/changed_fraction": 0.5})

        def generate(self, prompt_ids, sampling):
            made = super().generate(prompt_ids, sampling)
            pairs = [(prompt_ids[place // sampling.n], ids) for place, ids in enumerate(made.completion_ids)]
            return replace(made, routed_experts=[experts_of(self.model, *pair) for pair in pairs])

        def load_weights(self, named_weights, version):
            list(named_weights)
            self.weight_version = version

    model = mixture("Qwen3Moe", router_aux_loss_coef=0.01)
    return own_run(model, tokenizer, Routed, folder, [{"prompt": "1+1="}])


def test_each_logged_number_has_a_row_and_each_row_a_number(make_trainer, served_engine, tokenizer, tmp_path):
    names = set[str]()
    for options in RUNS.values():
        names |= logged_names(make_trainer(**{"max_steps": 1} | options))
    names |= logged_names(run_with_tools(tmp_path / "tools"))
    names |= logged_names(run_of_a_mixture(tmp_path / "mixture", served_engine.__mro__[1], tokenizer))
    patterns = [*rows(), r"pass@\d+"]
    assert {name for name in names if not any(re.fullmatch(row, name) for row in patterns)} == set()
    assert {row for row in patterns if not any(re.fullmatch(row, name) for name in names)} == set()
    assert {name for name in names if not TAKEN.fullmatch(name)} == set()


@pytest.mark.parametrize("row", rows())
def test_what_a_function_logs_is_in_the_place_of_no_number_of_the_table(row):
    name = row.replace("[^/]+", "judge").replace(r"\d+", "3").replace("\\", "")
    assert free_name(name) == f"logged/{name}"
