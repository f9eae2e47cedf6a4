"""`GRPOConfig` as the parsers of TRL's scripts read it: every field from text, and from YAML."""

import dataclasses
import json
import pickle
from typing import get_args, get_type_hints

import numpy as np
import pytest
import torch
import yaml
from transformers import HfArgumentParser

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer.config.grpo_config import MAPPINGS, GRPOConfig
from fused_grpo.trainer.config.trl_fields import MISSING, field_docstrings

FIELDS = {entry.name: entry for entry in dataclasses.fields(GRPOConfig)}
# Where a default of None says nothing about the type, and where another value excludes it.
TEXTS = {
    "logprob_mismatch": ("warn", "warn"),
    "resume_from_checkpoint": ("True", True),
    "scale_rewards": ("False", "none"),
    "report_to": ("none", []),
    "bf16": ("False", False),
    "tf32": ("False", False),
    "use_vllm": ("False", False),
    "hub_private_repo": ("True", True),
    "vllm_server_base_url": ("http://127.0.0.1:1", "http://127.0.0.1:1"),
    "optim_target_modules": ("all-linear", "all-linear"),
    "reward_weights": ("0.5", [0.5]),
    "sequence_rejection": ("k3", "k3"),
    "sequence_rejection_max": ("0.5", 0.5),
    **{name: ('{"a": 1}', {"a": 1}) for name in MAPPINGS},
}
# What an option needs beside it.
COMPANIONS = {
    "sequence_rejection": ["--sequence_rejection_max", "0.5"],
    **{f"sequence_rejection_{bound}": ["--sequence_rejection", "k3"] for bound in ("min", "max")},
}


def trl_parser():
    return pytest.importorskip("trl").TrlParser((GRPOConfig,))


def text_of(name: str) -> tuple[str, object]:
    """A text for a field, and the value that it stands for."""
    default = getattr(GRPOConfig(), name)
    if name in TEXTS:
        return TEXTS[name]
    if default is not None and not isinstance(default, list):
        return str(default), default
    kind = get_args(get_type_hints(GRPOConfig)[name])[0]
    return {bool: ("True", True), int: ("7", 7), float: ("1.0", 1.0)}.get(kind, ("text", "text"))


def hf_parse(arguments: list[str]) -> GRPOConfig:
    return HfArgumentParser((GRPOConfig,)).parse_args_into_dataclasses(arguments, look_for_args_file=False)[0]


def test_both_parsers_leave_every_default():
    assert hf_parse(["--output_dir", "x"]) == GRPOConfig("x")
    assert trl_parser().parse_args_and_config(["--output_dir", "x"]) == (GRPOConfig("x"),)


@pytest.mark.parametrize("parser", [lambda: HfArgumentParser((GRPOConfig,)), trl_parser], ids=["transformers", "TRL"])
def test_the_help_of_a_script_says_what_every_field_is(parser, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")  # words are not cut
    texts = {entry.dest: entry.help for entry in parser()._actions}
    assert all(texts[name] for name in FIELDS)
    shown = parser().format_help()
    assert all(text in shown for text in field_docstrings(GRPOConfig).values())


def test_every_field_is_read_from_text():
    parser, wrong = HfArgumentParser((GRPOConfig,)), {}
    for name in FIELDS.keys() - MISSING.keys():
        text, value = text_of(name)
        given = [f"--{name}", text, *COMPANIONS.get(name, [])]
        try:
            args = parser.parse_args_into_dataclasses(given, look_for_args_file=False)[0]
            parsed = getattr(args, name)
        except (SystemExit, Exception) as error:
            parsed = error
        if parsed != value:
            wrong[name] = parsed
    assert not wrong


def test_a_yaml_of_all_options_is_read_as_python_reads_them(tmp_path):
    given = GRPOConfig("x").to_dict() | {name: value for name, (_, value) in TEXTS.items()}
    given |= {"scale_rewards": False, "vllm_engine_kwargs": None}  # with use_vllm=False
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(given | {"dataloader_num_workers": 2}))
    expected = GRPOConfig(**given, dataloader_num_workers=2)
    assert trl_parser().parse_args_and_config(["--config", str(tmp_path / "run.yaml")]) == (expected,)


def test_a_field_without_effect_is_refused_where_it_would_change_the_run(caplog):
    args = hf_parse(["--dataloader_num_workers", "4", "--pad_to_multiple_of", "8", "--use_liger_kernel"])
    assert (args.dataloader_num_workers, args.pad_to_multiple_of, args.use_liger_kernel) == (4, "8", True)
    assert "got dataloader_num_workers=4, which changes nothing here: rows are read" in caplog.text
    with pytest.raises(UnsupportedError, match="got fp16=True"):
        hf_parse(["--fp16", "True"])
    for config in (None, {}, {"dispatch_batches": False, "split_batches": False}):
        assert GRPOConfig(accelerator_config=config).accelerator_config == config
    with pytest.raises(UnsupportedError, match="accelerator_config"):
        GRPOConfig(accelerator_config={"split_batches": True})


def test_python_types_are_accepted_as_before_and_no_others():
    assert GRPOConfig("d") == GRPOConfig(output_dir="d")
    assert [GRPOConfig(scale_rewards=value).scale_rewards for value in (True, False, "batch")] == [
        "group",
        "none",
        "batch",
    ]
    assert GRPOConfig(resume_from_checkpoint=True).resume_from_checkpoint is True
    assert GRPOConfig(vllm_server_base_url=["http://a", "http://b"]).vllm_server_base_url == ["http://a", "http://b"]
    for wrong in ({"resume_from_checkpoint": 1}, {"scale_rewards": 1}, {"vllm_server_base_url": [1]}):
        with pytest.raises(InputError):
            GRPOConfig(**wrong)


def test_a_config_can_be_copied_with_changes_and_pickled():
    args = GRPOConfig("d", learning_rate=1e-3, eval_accumulation_steps=2)
    assert pickle.loads(pickle.dumps(args)) == args
    assert dataclasses.replace(args, seed=3) == GRPOConfig("d", learning_rate=1e-3, eval_accumulation_steps=2, seed=3)
    assert json.dumps(args.to_dict())


def test_options_have_the_values_that_trl_gives_them():
    assert GRPOConfig(max_grad_norm=0, top_k=None, top_p=None, save_total_limit=0).sampling(seed=0).is_plain
    with pytest.warns(FutureWarning, match="vllm_importance_sampling_clip_max"):
        assert GRPOConfig(vllm_importance_sampling_cap=2.0).loss_config().sampling_clip_max == 2.0
    sampling = GRPOConfig(generation_kwargs={"do_sample": True, "top_k": 50, "stop_token_ids": [1]}).sampling(seed=0)
    assert (sampling.top_k, sampling.extra) == (50, {"stop_token_ids": [1]})
    assert GRPOConfig(model_init_kwargs={"trust_remote_code": True}).runs_remote_code


@pytest.mark.parametrize(
    ("said", "extra"),
    [
        ({"max_new_tokens": 64, "max_tokens": 64, "temperature": 0.7}, {}),
        ({"use_cache": True, "num_return_sequences": 1, "pad_token_id": 5, "bos_token_id": 1, "stop": None}, {}),
        ({"max_new_tokens": 32}, {"max_new_tokens": 32}),
        ({"temperature": 0.5, "use_cache": False}, {"temperature": 0.5, "use_cache": False}),
    ],
)
def test_what_generation_kwargs_say_again_is_no_option_of_an_engine(said, extra):
    args = GRPOConfig(temperature=0.7, max_completion_length=64, generation_kwargs=said)
    assert args.sampling(seed=0).extra == extra


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_an_array_in_generation_kwargs_reaches_the_engine(kind):
    ids = kind([5, 6])
    assert GRPOConfig(generation_kwargs={"suppress_tokens": ids}).sampling(seed=0).extra == {"suppress_tokens": ids}


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_the_weights_of_rewards_may_be_any_sequence_that_trl_takes(kind):
    assert GRPOConfig(reward_weights=kind([0.5, 2.0])).reward_weights == [0.5, 2.0]
    with pytest.raises(InputError, match=r"got reward_weights=.*, want list\[float\] or None"):
        GRPOConfig(reward_weights=kind([[0.5], [2.0]]))


def test_delta_is_dropped_where_the_loss_has_no_use_for_it(caplog):
    assert GRPOConfig(delta=4.0).loss_config().delta == 4.0
    assert GRPOConfig(delta=4.5, loss_type="cispo").loss_config().delta is None
    assert "got delta=4.5 with loss_type='cispo', which does not use it" in caplog.text


def test_vespo_needs_a_correction_of_tokens_where_there_is_one():
    options = {"loss_type": "vespo", "vllm_importance_sampling_mode": "sequence_mask"}
    GRPOConfig(**options, use_vllm=False)
    with pytest.raises(ValueError, match="token_truncate"):
        GRPOConfig(**options, use_vllm=True)


@pytest.mark.parametrize(
    ("kind", "text", "fix"),
    [
        (float, "1e-6", "1.0e-06 (YAML"),
        (int, "1e3", "1000"),
        (int, "1000.0", "1000"),
        (list[float], "[1e-3, 2, 0.5]", "[0.001, 2, 0.5]"),
    ],
)
def test_a_number_that_yaml_reads_as_another_kind_has_its_fix(kind, text, fix):
    hints = get_type_hints(GRPOConfig)
    others = {*MISSING, "vllm_importance_sampling_cap"}  # another name of an option
    names = [name for name in FIELDS if hints[name] in (kind, kind | None) and name not in others]
    assert names
    for name in names:
        with pytest.raises(InputError) as raised:
            HfArgumentParser((GRPOConfig,)).parse_dict({name: yaml.safe_load(text)})
        assert f"{name}={yaml.safe_load(text)!r}, want " in str(raised.value)
        assert f"; fix: {fix}" in str(raised.value)
    assert isinstance(yaml.safe_load("1.0e-06"), float)


@pytest.mark.parametrize("value", ["ten", "", None, [], ["a"], {}, "0.5", "inf", object()])
def test_what_is_no_number_has_no_fix(value):
    with pytest.raises(InputError) as raised:
        GRPOConfig(num_generations=value)
    assert "fix" not in str(raised.value)


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e999"])
def test_what_yaml_would_read_as_text_again_is_no_fix(text):
    with pytest.raises(InputError) as raised:
        GRPOConfig(max_grad_norm=text)
    assert "fix" not in str(raised.value)
