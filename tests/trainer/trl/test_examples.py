"""The examples of TRL's documentation for GRPO that need no tool, no image and no vLLM, in `examples/`: each runs to
its end with the line changed that imports `GRPOConfig` and `GRPOTrainer`. So do the settings of its index of papers."""

import runpy
import types
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl", reason="TRL is not installed")
pytestmark = [pytest.mark.grid, pytest.mark.filterwarnings("ignore")]  # of TRL's, peft's and torch's

EXAMPLES = sorted(Path(__file__).with_name("examples").glob("*.py"))
IMPORT = "from trl import GRPOConfig, GRPOTrainer"
# By the name of the method or of its paper.
PAPERS: dict[str, dict[str, Any]] = {
    "DeepSeekMath": {"loss_type": "grpo", "beta": 0.04, "num_iterations": 2, "epsilon": 0.2},
    "DeepSeek-R1": {"loss_type": "grpo", "beta": 0.001, "epsilon": 10.0, "temperature": 1.0},
    "DAPO": {"loss_type": "dapo", "epsilon_high": 0.28, "mask_truncated_completions": False},
    "Dr. GRPO": {"loss_type": "dr_grpo", "scale_rewards": False},
    "BNPO": {"loss_type": "bnpo"},
    "GSPO": {
        "loss_type": "grpo",
        "importance_sampling_level": "sequence",
        "epsilon": 3e-4,
        "epsilon_high": 4e-4,
        "steps_per_generation": 4,
        "beta": 0.0,
    },
    "CISPO": {"loss_type": "cispo", "epsilon_high": 5.0, "num_iterations": 2, "scale_rewards": "batch"},
    "SAPO": {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.05, "steps_per_generation": 2},
    "LUSPO": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 2e-3, "epsilon_high": 2.5e-3},
    "VESPO": {"loss_type": "vespo", "vespo_k_pos": 2.0, "vespo_lambda_pos": 3.0, "vespo_k_neg": 3.0},
    "Lite PPO": {"loss_type": "dapo", "scale_rewards": "batch", "beta": 0.0},
    "80/20, high entropy": {"top_entropy_quantile": 0.2, "temperature": 1.0, "epsilon_high": 0.28},
    "INTELLECT-2, two sides": {"delta": 4.0, "epsilon": 0.2, "max_grad_norm": 0.2},
    "MiniMax-M1, the head": {"cast_lm_head_to_fp32": True, "loss_type": "cispo", "epsilon_high": 5.0},
    "DeepSeek-V3.2": {"off_policy_mask_threshold": 0.5, "use_bias_correction_kl": True, "beta": 0.04},
    "Skywork-OR1": {"use_adaptive_entropy": True, "entropy_coef": 0.005, "entropy_target": 0.2},
    "TR-DPO": {"beta": 0.04, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.6},
    "GDPO": {"multi_objective_aggregation": "normalize_then_sum"},
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_of_the_documentation_runs(hub: Path, library: types.ModuleType, example: Path):
    text = example.read_text()
    changed = text.replace(IMPORT, IMPORT.replace("trl", library.__name__))
    different = [line for line, other in zip(changed.splitlines(), text.splitlines(), strict=True) if line != other]
    assert len(different) == (library.__name__ != "trl")
    (hub / "script.py").write_text(changed)
    trainer = runpy.run_path(str(hub / "script.py"))["trainer"]
    assert type(trainer).__module__.startswith(library.__name__)
    assert trainer.state.global_step == 2
    assert any("train_loss" in entry for entry in trainer.state.log_history)


@pytest.mark.parametrize("options", PAPERS.values(), ids=PAPERS)
def test_the_settings_of_a_paper_run(make, options):
    trainer = make(max_steps=2, learning_rate=1e-3, **options)
    assert trainer.train().global_step == 2


def test_there_are_enough_examples():
    assert len(EXAMPLES) >= 16
    assert all(IMPORT in example.read_text() for example in EXAMPLES)
