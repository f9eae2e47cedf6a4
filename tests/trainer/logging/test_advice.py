"""Warnings with a fix: each exactly once, and none in a healthy run."""

import re

import pytest

from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.logging.run_output import Advice, at_start

DIFFERENCE = "sampling/sampling_logp_difference/mean"
HEALTHY = {
    "completions/clipped_ratio": 0.1,
    "groups_with_equal_rewards": 0.3,
    "tools/call_frequency": 1.2,
    "tools/failure_frequency": 0.4,
    DIFFERENCE: 0.01,
}


def warnings_of(records) -> list[str]:
    advice = Advice(GRPOConfig())
    return [text for record in records for text in advice(record)]


@pytest.mark.parametrize(
    ("name", "values", "text"),
    [
        ("completions/clipped_ratio", [0.9] * 6, "90% of the completions of 3 steps .*max_completion_length=2048"),
        ("groups_with_equal_rewards", [1.0] * 25, "in 10 steps all completions .*dynamic_sampling=2"),
        ("tools/call_frequency", [0.0] * 25, "in 10 steps no completion called a tool.*chat template"),
        ("tools/failure_frequency", [1.0] * 25, "in 10 steps every call of a tool failed.*tool_calls"),
        (DIFFERENCE, [0.01] * 10 + [0.05] * 30, r"\(0.010 in the first steps\).*mask_threshold=0.05"),
        (DIFFERENCE, [0.5] * 12, "differ by 0.500 nats .*mask_threshold=0.05"),
    ],
)
def test_what_a_run_shows_is_warned_of_once(name, values, text):
    (warning,) = warnings_of([{**HEALTHY, name: value} for value in values])
    assert re.search(text, warning)


def test_rollouts_a_little_old_are_no_reason_and_a_mask_is_advised_once():
    assert warnings_of([HEALTHY | {DIFFERENCE: 0.2}] * 30) == []
    advice = Advice(GRPOConfig(off_policy_mask_threshold=0.1))
    (text_of_advice,) = [text for _ in range(30) for text in advice(HEALTHY | {DIFFERENCE: 0.5})]
    assert "fix: a lower learning_rate" in text_of_advice
    advice = Advice(GRPOConfig(generate_ahead=2))
    (text_of_advice,) = [text for _ in range(30) for text in advice(HEALTHY | {DIFFERENCE: 0.5})]
    assert "fix: off_policy_mask_threshold=0.05, generate_ahead_max_kl=0.001, a lower learning_rate" in text_of_advice


def test_groups_with_equal_rewards_learn_from_a_teacher():
    advice = Advice(GRPOConfig(distillation_coef=1.0))
    assert [text for _ in range(25) for text in advice({**HEALTHY, "groups_with_equal_rewards": 1.0})] == []


def test_what_passes_is_not_warned_of():
    one_bad = [HEALTHY | {"completions/clipped_ratio": 1.0}, *[HEALTHY] * 5]
    nine_equal = ([HEALTHY | {"groups_with_equal_rewards": 1.0}] * 9 + [HEALTHY]) * 2
    one_called = ([HEALTHY | {"tools/call_frequency": 0.0, "tools/failure_frequency": 0.0}] * 9 + [HEALTHY]) * 2
    some_right = ([HEALTHY | {"tools/failure_frequency": 1.0}] * 9 + [HEALTHY]) * 2
    rounding = [HEALTHY | {DIFFERENCE: 1e-7 * step} for step in range(40)]
    without_tools = [{"reward": 1.0}] * 20
    assert [warnings_of(run) for run in (one_bad + nine_equal, one_called, some_right, rounding, without_tools)] == [
        []
    ] * 5


def test_options_are_warned_of_at_the_start():
    (one_prompt,) = at_start(GRPOConfig(), processes=1, corrected=True)
    assert "1 prompt, so updates are noisy; fix: gradient_accumulation_steps=32" in one_prompt
    assert at_start(GRPOConfig(), processes=2, corrected=True) == []
    (short,) = at_start(GRPOConfig(), processes=2, corrected=True, thinks=True)
    assert "fix: max_completion_length=2048 or more" in short
    enough = {"max_completion_length": 4096}, {"chat_template_kwargs": {"enable_thinking": False}}
    assert all(at_start(GRPOConfig(**one), processes=2, corrected=True, thinks=True) == [] for one in enough)
    truncated = {"gradient_accumulation_steps": 2, "top_p": 0.9, "generation_kwargs": {"min_p": 0.1}}
    assert at_start(GRPOConfig(**truncated), processes=1, corrected=True) == []
    cut = GRPOConfig(**truncated, sampling_support="off")
    (biased,) = at_start(cut, processes=1, corrected=True)
    assert biased.startswith("with top_p=0.9 and min_p=0.1 the sampler's log-probs")
    assert at_start(cut, processes=1, corrected=False) == []


def test_a_run_shows_each_warning_once_and_a_healthy_one_none(make_trainer, capsys):
    make_trainer(per_device_train_batch_size=8, max_steps=4).train()
    assert "warning:" not in capsys.readouterr().out
    off = {"top_k": 3, "sampling_support": "off"}
    trainer = make_trainer(lambda completions: [0.0] * len(completions), max_steps=12, **off)
    trainer.train()
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.count("warning:") == 3
    for text in ("so updates are noisy", "with top_k=3 the sampler's", "all completions of each prompt got the same"):
        assert shown.count(text) == 1
