"""The loss and the run declare the options they share once; the loss' own config cannot be changed."""

import copy
import dataclasses
import pickle

import pytest

from fused_grpo import GRPOLossConfig
from fused_grpo.config import LossOptions
from fused_grpo.errors import FusedGRPOError, InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.config.grpo_config import CORRECTION

LOSS, RUN = GRPOLossConfig(epsilon=0.3, sampling_correction="icepop"), GRPOConfig("x", epsilon=0.3)


@pytest.mark.parametrize("config", [LOSS, RUN], ids=["loss", "run"])
def test_a_config_is_copied_pickled_and_replaced(config):
    for other in (copy.copy(config), copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config
        assert other is not config
    changed = dataclasses.replace(config, beta=0.5)
    assert (changed.beta, changed.epsilon) == (0.5, 0.3)
    assert changed != config
    assert type(config)(**dataclasses.asdict(config)) == config
    assert "epsilon=0.3" in repr(config)
    with pytest.raises(InputError, match="epsilon=-1"):
        dataclasses.replace(config, epsilon=-1)


def test_the_config_of_a_loss_is_hashable_and_cannot_be_changed():
    assert len({LOSS, copy.copy(LOSS), GRPOLossConfig()}) == 2
    for name in ("epsilon", "sampling_clip_max", "no_such_option"):
        with pytest.raises(dataclasses.FrozenInstanceError, match=name):
            setattr(LOSS, name, 1.0)
    with pytest.raises(dataclasses.FrozenInstanceError, match="beta"):
        del LOSS.beta
    assert GRPOLossConfig(epsilon=0.3, sampling_correction="icepop") == LOSS


def test_the_options_of_a_run_can_be_changed_and_reach_the_loss():
    args = GRPOConfig("x")
    values = {"epsilon": 0.1, "beta": 0.2, "sequence_rejection": "k3", "sequence_rejection_max": 1.0}
    for name, value in values.items():
        setattr(args, name, value)
    config = args.loss_config()
    assert {name: getattr(config, name) for name in values} == values
    assert {entry.name for entry in dataclasses.fields(LossOptions)} <= dataclasses.asdict(config).keys()
    with pytest.raises(TypeError, match="unhashable"):
        hash(args)


WRONG = [
    {"vllm_importance_sampling_mode": "tokn"},
    {"vllm_importance_sampling_mode": None},
    {"vllm_importance_sampling_clip_max": -1.0},
    {"vllm_importance_sampling_clip_min": float("nan")},
    {"vllm_importance_sampling_clip_min": 2.0, "vllm_importance_sampling_clip_max": 1.0},
    {"vllm_importance_sampling_mode": "sequence_mask", "loss_type": "vespo"},
]


@pytest.mark.parametrize("options", WRONG, ids=str)
def test_errors_of_the_loss_name_the_options_of_the_run(options):
    with pytest.raises(FusedGRPOError, match="got ") as raised:
        GRPOConfig("x", **options)
    assert next(iter(options)) in str(raised.value)
    assert not any(f"{name}=" in str(raised.value).replace(CORRECTION[name], "") for name in CORRECTION)
