"""Numbers of NumPy are taken as Python's own, wherever an option or an op takes a number; as torch does."""

import json
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from small_runs import trainer_in

from fused_grpo import (
    FusedLinearGRPOLoss,
    GRPOLossConfig,
    fused_linear_divergence,
    fused_linear_grpo_loss,
    linear_logprobs,
    linear_logprobs_and_entropy,
)
from fused_grpo.config import has_type, option_types
from fused_grpo.errors import FusedGRPOError, InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.common.formatting import to_json
from fused_grpo.trainer.common.redaction import redacted
from fused_grpo.trainer.config.grpo_config import check_options

V, D, N = 11, 4, 6
HIDDEN, WEIGHT = torch.linspace(-1, 1, N * D).view(N, D), torch.linspace(-2, 1, V * D).view(V, D)
TARGETS = torch.tensor([0, 3, 7, 10, 7, 2])
INTEGERS = (np.int64, np.int32, np.uint8)


class Whole(int):
    """As members of an IntEnum are."""


def loss_of(call: Any, **options: Any) -> torch.Tensor:
    given = {"advantages": torch.ones(1), "cu_seqlens": torch.tensor([0, N])}
    return call(HIDDEN, WEIGHT, TARGETS, **given, **options).loss


OPS = {
    "linear_logprobs": lambda **options: linear_logprobs(HIDDEN, WEIGHT, TARGETS, **options),
    "and entropy": lambda **options: linear_logprobs_and_entropy(HIDDEN, WEIGHT, TARGETS, **options).entropy,
    "kept tokens": lambda **options: linear_logprobs(
        HIDDEN, WEIGHT, TARGETS, support=(torch.arange(V).repeat(N), torch.arange(N + 1) * V), **options
    ),
    "loss": lambda **options: loss_of(fused_linear_grpo_loss, **options),
}
BUDGETS = {
    **OPS,
    "module": lambda **options: loss_of(FusedLinearGRPOLoss(**options)),
    "divergence": lambda **options: fused_linear_divergence(HIDDEN, WEIGHT, HIDDEN * 2, WEIGHT, **options).loss,
}


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("name", BUDGETS)
def test_a_budget_of_numpy_is_one(name, kind):
    assert torch.equal(BUDGETS[name](chunk_bytes=kind(200)), BUDGETS[name](chunk_bytes=200))


@pytest.mark.parametrize("kind", INTEGERS)
@pytest.mark.parametrize("name", OPS)
def test_an_ignored_target_of_numpy_is_one(name, kind):
    assert torch.equal(OPS[name](ignore_index=kind(7)), OPS[name](ignore_index=7))


@pytest.mark.parametrize("value", [np.float32(200.0), np.bool_(True), np.array(200), np.int64(0), 200.0, "200"])
def test_what_is_no_whole_number_above_0_is_refused(value):
    for call in BUDGETS.values():
        with pytest.raises(InputError, match=r"got chunk_bytes=.*, want a whole number of bytes > 0"):
            call(chunk_bytes=value)


def with_value(cls: Any, name: str, kinds: tuple[type, ...]) -> tuple[Any, Any] | None:
    """(a value of that option which goes with the defaults of others, the options with it)."""
    for value in (kind(number) for number in (2, 1, 0, 4, 8) for kind in kinds):
        try:
            return value, cls(**{name: value})
        except FusedGRPOError:
            continue
    return None


@pytest.mark.parametrize("cls", [GRPOConfig, GRPOLossConfig])
@pytest.mark.parametrize(("python", "numpy"), [(int, np.int64), (float, np.float32), (float, np.float64), (int, Whole)])
def test_each_option_that_is_a_number_takes_one_of_numpy(cls, python, numpy):
    names = [name for name, kind in option_types(cls).items() if has_type(python(1), kind) and not has_type("x", kind)]
    walked = 0
    for name in names:
        if has_type(True, option_types(cls)[name]) and not has_type(7, option_types(cls)[name]):
            continue
        if (pair := with_value(cls, name, (python,))) is not None:
            value, expected = pair
            options, walked = cls(**{name: numpy(value)}), walked + 1
            assert options == expected, name
            assert type(getattr(options, name)) is type(getattr(expected, name)), name
    assert walked > (40 if cls is GRPOConfig else 5)


def test_numbers_in_lists_and_numbers_that_are_set_are_those_of_python():
    args = GRPOConfig(reward_weights=[np.float32(0.5), np.int64(2)], generation_kwargs={"top_k": np.int64(5)})
    args.chat_template_kwargs = {"scale": np.float64(0.5), "sizes": [np.int64(2)], "text": "x"}
    args.max_steps = np.int32(7)
    check_options(args)  # as a trainer does
    assert (args.reward_weights, args.top_k, args.max_steps) == ([0.5, 2], 5, 7)
    scale, sizes, _ = args.chat_template_kwargs.values()
    assert [type(one) for one in (*args.reward_weights, args.max_steps, scale, *sizes)] == [float, int, int, float, int]
    assert json.loads(GRPOConfig(seed=np.int64(3)).to_json_string())["seed"] == 3


@pytest.mark.parametrize("value", [np.bool_(True), np.float64(2.5), np.array([4]), np.int64(-3)])
def test_options_that_are_no_such_number_are_refused(value):
    with pytest.raises(InputError, match="got num_generations="):
        GRPOConfig(num_generations=value)


OPTIONS: dict[str, Any] = {
    "plain": {"learning_rate": np.float64(0.1), "temperature": np.float64(0.9), "seed": np.int64(3)},
    "in a list": {"reward_weights": [np.float64(2.0)]},
    "in a mapping": {"generation_kwargs": {"repetition_penalty": np.float64(1.1)}},
    "of a scheduler": {
        "lr_scheduler_type": "cosine_with_min_lr",
        "lr_scheduler_kwargs": {"min_lr": np.float64(1e-3)},
    },
    "members": {"seed": Whole(5), "warmup_steps": Whole(0)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_run_with_such_options_ends_with_its_model(name, tmp_path):
    """Its card shows the options as YAML."""
    trainer_in(tmp_path, max_steps=1, **OPTIONS[name]).train()
    assert (tmp_path / "run" / "final" / "README.md").is_file()


@pytest.mark.parametrize("value", [np.float64(0.5), np.float32(0.5), np.int64(2), Whole(2), np.bool_(True), np.ones(2)])
def test_what_is_written_has_the_types_of_python(value):
    """Also of values that no option has converted: metrics, rows."""
    for given in (value, [value], {"x": (value,)}):
        assert yaml.safe_load(yaml.safe_dump(redacted(given))) == to_json(given)
