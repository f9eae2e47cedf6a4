"""`trl/scripts/grpo.py` of the installed TRL, from its parser to its end, with our trainer in the place of TRL's."""

import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import yaml
from transformers import AutoModelForCausalLM, HfArgumentParser

from fused_grpo.trainer import GRPOConfig

pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of TRL's, about versions and what is experimental

ARGUMENTS = {
    "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "dataset_name": "trl-lib/DeepMath-103K",
    "output_dir": "Qwen2.5-0.5B-GRPO",
    "reward_funcs": ["accuracy_reward", "get_soft_overlong_punishment"],
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "learning_rate": 1e-5,
    "use_vllm": False,
    "report_to": "none",
}
LORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "v_proj"]}
EVALUATED = {"eval_strategy": "steps", "eval_steps": 1, "per_device_eval_batch_size": 4}


@pytest.fixture
def script(trl: types.ModuleType, library: types.ModuleType, hub: Path, monkeypatch) -> Callable[[list[str]], Any]:
    """Runs the script with these arguments; returns its trainer."""
    from trl.scripts import grpo

    trainers = []

    class Trainer(library.GRPOTrainer):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            trainers.append(self)

    monkeypatch.setattr(trl, "GRPOConfig", library.GRPOConfig)
    monkeypatch.setattr(trl, "GRPOTrainer", Trainer)

    def run(arguments: list[str]) -> Any:
        parsed = grpo.make_parser().parse_args_and_config(arguments, fail_with_unknown_args=False)
        grpo.main(*parsed)
        return trainers[-1]

    return run


def command_line(**options: Any) -> list[str]:
    words: list[str] = []
    for name, value in {**ARGUMENTS, **options}.items():
        words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


CASES = {
    "plain": {},
    "no test split": {"dataset_name": "trl-lib/ultrafeedback-prompt"},
    "LoRA": LORA,
    "reward model and eval": {"reward_model_name_or_path": "trl-lib/Qwen2-0.5B-Reward", **EVALUATED},
    "a stream": {"dataset_streaming": True},
}
MORE_CASES = {
    "LoRA, a KL term and eval": {**LORA, "beta": 0.04, **EVALUATED},
    "prompts that are text": {"dataset_name": "trl-lib/tldr", "reward_funcs": ["get_soft_overlong_punishment"]},
    "a function by its import path": {"reward_funcs": ["trl.rewards.think_format_reward"]},
    "types, attention, logs": {"dtype": "float32", "attn_implementation": "eager", "log_completions": True},
}


@pytest.mark.parametrize(
    "options",
    [pytest.param(options, id=name) for name, options in CASES.items()]
    + [pytest.param(options, id=name, marks=pytest.mark.full) for name, options in MORE_CASES.items()],
)
def test_the_script_runs_to_its_end(script, hub: Path, capsys, options):
    trainer = script(command_line(**options))
    assert trainer.state.global_step == 2
    assert trainer.state.log_history[-1]["train_loss"] is not None
    shown = capsys.readouterr().out
    assert "Training completed." in shown
    assert f"Model saved to {ARGUMENTS['output_dir']}." in shown
    saved = hub / ARGUMENTS["output_dir"]
    assert (saved / ("adapter_model.safetensors" if "use_peft" in options else "model.safetensors")).is_file()
    assert AutoModelForCausalLM.from_pretrained(saved).config.vocab_size == 98
    evaluated = [entry["step"] for entry in trainer.state.log_history if "eval_reward" in entry]
    assert evaluated == ([1, 2] if "eval_steps" in options else [])


def test_a_yaml_file_gives_the_options_and_the_command_line_replaces_them(script, hub: Path):
    (hub / "grpo.yaml").write_text(yaml.safe_dump({**ARGUMENTS, **LORA, "max_steps": 5}))
    trainer = script(["--config", "grpo.yaml", "--max_steps", "2", "--temperature", "0.9"])
    assert trainer.state.global_step == 2
    assert trainer.args.temperature == 0.9
    assert (hub / ARGUMENTS["output_dir"] / "adapter_config.json").is_file()


def test_the_model_goes_to_the_hub(script, hub: Path, monkeypatch, capsys):
    from huggingface_hub import HfApi

    made, uploaded = Mock(return_value=types.SimpleNamespace(repo_id="me/sums")), Mock()
    monkeypatch.setenv("HF_TOKEN", "of a test")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(HfApi, "create_repo", made)
    monkeypatch.setattr(HfApi, "upload_folder", uploaded)
    trainer = script(command_line(push_to_hub=True, hub_model_id="sums"))
    assert trainer.hub_model_id == "me/sums"
    assert "me/sums" in capsys.readouterr().out
    assert "sums" in (*made.call_args.args, *made.call_args.kwargs.values())
    options = uploaded.call_args.kwargs
    assert options["repo_id"] == "me/sums"
    folder = Path(options["folder_path"])
    assert (folder / "model.safetensors").is_file()
    assert yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])["tags"]


def test_the_parser_of_transformers_reads_every_field(tmp_path: Path):
    """By its name, with the value that it has by default, from the command line and from a file."""
    plain = GRPOConfig(str(tmp_path))
    parser = HfArgumentParser(GRPOConfig)
    (read,) = parser.parse_args_into_dataclasses(["--output_dir", str(tmp_path)])
    assert read == plain
    values = {"scale_rewards": "none", "eval_strategy": "no", "report_to": "none", "vllm_server_base_url": "http://x:1"}
    words = [word for name, value in values.items() for word in (f"--{name}", value)]
    (read,) = parser.parse_args_into_dataclasses(["--output_dir", "x", *words, "--resume_from_checkpoint", "y"])
    assert read.scale_rewards == "none"
    assert read.resume_from_checkpoint == "y"
    assert read.vllm_server_base_url in ("http://x:1", ["http://x:1"])
    (tmp_path / "options.json").write_text(json.dumps({"output_dir": "x", "scale_rewards": "batch", "beta": 0.1}))
    (read,) = parser.parse_json_file(str(tmp_path / "options.json"))
    assert (read.scale_rewards, read.beta) == ("batch", 0.1)
