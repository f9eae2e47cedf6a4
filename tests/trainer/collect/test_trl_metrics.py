"""Every metric of TRL's name is TRL's: both trainers on one model and the same rollouts, without sampling."""

from types import ModuleType

import pytest
import trl_runs
from datasets import Dataset

from fused_grpo.trainer import GRPOConfig, GRPOTrainer

pytest.importorskip("trl", reason="TRL is not installed")
STEPS = 3


def length(completion_ids, **columns) -> list[float | None]:
    """None for one completion in four; another scale than `trl_runs.reward`."""
    return [None if sum(ids) % 4 == 0 else len(ids) / 2 for ids in completion_ids]


def nothing_for_some(completion_ids, **columns) -> list[float | None]:
    return [None if sum(ids) % 3 == 0 else float(sum(ids) % 2) for ids in completion_ids]


CASES = {
    "grpo": {"loss_type": "grpo", "beta": 0.04, "entropy_coef": 0.02},
    "dapo": {"loss_type": "dapo", "beta": 0.04, "scale_rewards": "batch", "delta": 1.3},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.01, "use_adaptive_entropy": True, "entropy_target": 9.0},
    "vespo": {"loss_type": "vespo", "use_adaptive_entropy": True, "entropy_target": 0.1, "entropy_coef": 0.1},
    "of sequences": {"importance_sampling_level": "sequence", "epsilon": 1e-3, "beta": 0.04},
    "sums": {"multi_objective_aggregation": "normalize_then_sum", "top_entropy_quantile": 0.3, "entropy_coef": 0.02},
}
REWARDS = {"cispo": [nothing_for_some], "sums": [trl_runs.reward, length]}


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    """vLLM is hidden from TRL: importing it takes longer than all these tests."""
    from trl import import_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        import trl

        assert trl.GRPOTrainer  # imported when it is asked for
    return trl


def logged(trainer_class, config_class, model, name, tmp_path) -> list[dict[str, float]]:
    args = config_class(
        output_dir=str(tmp_path / config_class.__module__),
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=trl_runs.LONGEST,
        max_steps=STEPS,
        num_iterations=2,
        learning_rate=3e-3,
        adam_epsilon=1e-4,  # gradients that are rounding are not to be steps
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        shuffle_dataset=False,
        bf16=False,
        use_vllm=False,
        report_to=[],
        **CASES[name],
    )
    trainer = trainer_class(
        model,
        REWARDS.get(name, [trl_runs.reward]),
        args,
        Dataset.from_list([{"prompt": prompt} for prompt in trl_runs.PROMPTS]),
        processing_class=trl_runs.tokenizer(),
        rollout_func=trl_runs.completions,
    )
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_every_metric_of_trls_name_is_trls(trl, name, tmp_path):
    # Of the sharp model no entropy is near a threshold.
    model = trl_runs.saved_model(sharpness=20.0 if "top_entropy_quantile" in CASES[name] else 1.0)
    trl_log = logged(trl.GRPOTrainer, trl.GRPOConfig, model, name, tmp_path)
    ours = logged(GRPOTrainer, GRPOConfig, model, name, tmp_path)
    assert len(trl_log) == len(ours) == STEPS
    for step, (expected, actual) in enumerate(zip(trl_log, ours, strict=True)):
        expected = {key: value for key, value in expected.items() if not any(map(key.__contains__, trl_runs.CLOCKED))}
        assert expected.keys() <= actual.keys(), expected.keys() - actual.keys()
        for key, value in expected.items():
            assert actual[key] == pytest.approx(value, rel=1e-4, abs=1e-4), f"{key} of step {step + 1}"
