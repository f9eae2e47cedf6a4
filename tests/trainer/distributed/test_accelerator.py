"""The options that reach Accelerate, PyTorch and the loggers when a run's `Accelerator` is made."""

import logging
from types import SimpleNamespace

import pytest
import torch
import transformers

from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.distributed import sharding
from fused_grpo.trainer.engines.engine_choice import engine_name
from fused_grpo.trainer.models.loading import wants_bf16


@pytest.fixture
def made(monkeypatch):
    """The arguments of `Accelerator` for some options."""

    def make(**options):
        arguments = {}
        fake = SimpleNamespace(is_main_process=options.pop("is_main_process", True))
        monkeypatch.setattr(sharding, "Accelerator", lambda **given: arguments.update(given) or fake)
        sharding.make_accelerator(GRPOConfig(**options))
        return arguments

    return make


def test_options_of_ddp_and_its_process_group_are_passed_on(made):
    given = {"ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 7, "ddp_backend": "gloo", "ddp_timeout": 9}
    group, ddp = made(**given)["kwargs_handlers"]
    assert (group.backend, group.timeout.total_seconds()) == ("gloo", 9)
    assert (ddp.find_unused_parameters, ddp.bucket_cap_mb, ddp.static_graph) == (True, 7, False)


def test_a_run_on_the_cpu_uses_no_gpu(made, monkeypatch):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (made()["cpu"], made()["mixed_precision"]) == (False, "bf16")
    assert (made(use_cpu=True)["cpu"], made(use_cpu=True)["mixed_precision"]) == (True, "no")
    args = GRPOConfig(use_cpu=True)
    assert engine_name(args) == "transformers"
    assert not wants_bf16(args)


def test_a_second_trainer_of_a_process_may_have_another_precision(make_trainer):
    for bf16 in (False, True, False):
        trainer = make_trainer(bf16=bf16, max_steps=1)
        trainer.train()
        assert trainer.accelerator.mixed_precision == ("bf16" if bf16 else "no")


def test_precision_and_determinism_are_set_for_the_process(made, monkeypatch):
    seen = []
    monkeypatch.setattr(sharding, "enable_full_determinism", seen.append)
    monkeypatch.setattr(sharding, "enable_tf32", seen.append)
    made()
    assert seen == []
    made(full_determinism=True, tf32=False, seed=5)
    assert seen == [5, False]


@pytest.mark.parametrize(
    ("options", "level"),
    [
        ({}, logging.NOTSET),
        ({"log_level": "info"}, logging.INFO),
        ({"log_level": "info", "is_main_process": False}, logging.NOTSET),
        ({"log_level_replica": "error", "is_main_process": False}, logging.ERROR),
    ],
)
def test_levels_of_messages_are_those_of_the_process(made, options, level):
    ours, before = logging.getLogger("fused_grpo"), transformers.logging.get_verbosity()
    try:
        made(**options)
        assert ours.level == level
        assert transformers.logging.get_verbosity() == (level or before)
    finally:
        ours.setLevel(logging.NOTSET)
        transformers.logging.set_verbosity(before)
