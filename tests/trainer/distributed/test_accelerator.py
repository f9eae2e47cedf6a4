"""The options that reach Accelerate, PyTorch and the loggers when a run's `Accelerator` is made."""

import logging
from types import SimpleNamespace

import pytest
import torch
import transformers

from fused_grpo.errors import InputError, UnavailableError, UnsupportedError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.distributed import sharding
from fused_grpo.trainer.engines.engine_choice import engine_name
from fused_grpo.trainer.models.loading import wants_bf16


@pytest.fixture
def made(monkeypatch):
    """The arguments of `Accelerator` for some options."""

    def make(**options):
        arguments = {}
        fake = SimpleNamespace(is_main_process=options.pop("is_main_process", True), num_processes=1)
        monkeypatch.setattr(sharding, "Accelerator", lambda **given: arguments.update(given) or fake)
        sharding.make_accelerator(GRPOConfig(**options))
        return arguments

    return make


def test_options_of_ddp_and_its_process_group_are_passed_on(made, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    given = {"ddp_find_unused_parameters": True, "ddp_bucket_cap_mb": 7, "ddp_backend": "gloo", "ddp_timeout": 9}
    group, ddp = made(**given)["kwargs_handlers"]
    assert (group.backend, group.timeout.total_seconds()) == ("gloo", 9)
    assert (ddp.find_unused_parameters, ddp.bucket_cap_mb, ddp.static_graph) == (True, 7, False)


@pytest.mark.parametrize("name", ["nccl", "xccl", "no_such_backend"])
def test_a_backend_that_the_device_does_not_have_is_refused(made, monkeypatch, name):
    made(use_cpu=True, ddp_backend=name)  # of one process, which has no group
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sharding, "_last_connection", lambda args, error: None)
    with pytest.raises(InputError, match=rf"got ddp_backend='{name}' on a CPU, want gloo.*fix: ddp_backend=None"):
        made(use_cpu=True, ddp_backend=name)
    for backend in (None, "gloo"):
        made(use_cpu=True, ddp_backend=backend)


def test_one_process_may_have_a_backend(monkeypatch):
    for name in sharding.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    sharding.AcceleratorState._reset_state(reset_partial_state=True)
    for backend in ("gloo", "nccl"):
        assert sharding.make_accelerator(GRPOConfig(use_cpu=True, ddp_backend=backend)).num_processes == 1


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


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GRADIENT_ACCUMULATION_STEPS", "4"),
        ("MIXED_PRECISION", "fp16"),
        ("MIXED_PRECISION", "junk"),
        ("DYNAMO_BACKEND", "no"),
        ("FP8_BACKEND", "NO"),
        ("DEBUG_MODE", "true"),
        ("CPU_AFFINITY", "true"),
        ("USE_IPEX", "true"),
        ("CONFIG_FILE", "/no/such.yaml"),
    ],
)
def test_variables_of_accelerate_launch_change_no_step(make_trainer, monkeypatch, name, value):
    steps = []
    for given in (None, value):
        if given is not None:
            monkeypatch.setenv(f"ACCELERATE_{name}", given)
        sharding.AcceleratorState._reset_state(reset_partial_state=True)
        trainer = make_trainer(max_steps=1, max_grad_norm=0.01, logging_steps=1)
        trainer.train()
        logged = [(record["grad_norm"], record["loss"]) for record in trainer.state.log_history if "loss" in record]
        steps.append((logged, [float(weight.detach().double().sum()) for weight in trainer.model.parameters()]))
    assert len(steps[0][0]) == 1
    assert steps[0] == steps[1]


@pytest.mark.parametrize("name", ["ACCELERATE_DYNAMO_BACKEND", "ACCELERATE_FP8_BACKEND"])
def test_a_policy_whose_layers_accelerate_would_replace_is_refused(monkeypatch, name):
    monkeypatch.setenv(name, "TE")
    with pytest.raises(UnsupportedError, match=f"got {name}='TE'.*fix: unset {name}"):
        sharding.make_accelerator(GRPOConfig())
    monkeypatch.delenv(name)
    assert sharding.make_accelerator(GRPOConfig()).num_processes == 1  # in the next cell


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


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"WORLD_SIZE": "2", "RANK": "0"}, r"with WORLD_SIZE='2' RANK='0', want all variables of a launcher or none"),
        ({"LOCAL_RANK": "0"}, "with LOCAL_RANK='0', want all variables"),
        ({"LOCAL_RANK": "first"}, "with LOCAL_RANK='first', want all variables"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "with OMPI_COMM_WORLD_SIZE='2', want all variables"),
    ],
)
def test_half_of_a_launchers_variables_are_an_error_that_names_them(monkeypatch, variables, message):
    for name in sharding.LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    sharding.AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.raises(UnavailableError, match=f"from Accelerate .*{message}"):
        sharding.make_accelerator(GRPOConfig())
    for name in variables:
        monkeypatch.delenv(name)
    assert sharding.make_accelerator(GRPOConfig()).num_processes == 1  # in the next cell


def test_a_process_that_waits_for_others_says_so(made, monkeypatch, capsys):
    monkeypatch.setattr("fused_grpo.trainer.logging.console.SLOW", 0.0)
    made()
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("WORLD_SIZE", "4")  # left by another job
    monkeypatch.setenv("MASTER_ADDR", "node7")
    made()
    assert "waiting for the 4 processes of WORLD_SIZE at node7" in capsys.readouterr().out


@pytest.mark.parametrize("value", ["", "two", "-1", "1.0"])
def test_a_number_of_a_launcher_that_is_none_is_named(monkeypatch, value):
    for name, option in (
        ("WORLD_SIZE", "world_size"),
        ("RANK", "process_index"),
        ("LOCAL_RANK", "local_process_index"),
    ):
        monkeypatch.setenv(name, value)
        with pytest.raises(InputError, match=f"got the variable {name}='{value}', want a number.*fix: unset {name}"):
            getattr(GRPOConfig(), option)
