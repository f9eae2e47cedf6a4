"""1,600 random configurations: each gives usable options, an error of fused_grpo, or one of the command line."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

from fused_grpo.errors import FusedGRPOError, InputError
from fused_grpo.trainer.cli.options import TrainOptions, as_arguments, parse_train_options, read_yaml
from fused_grpo.trainer.config.grpo_config import GRPOConfig, own_fields

NAMES = [field.name for field in own_fields(TrainOptions)]
SOUND = dataclasses.asdict(TrainOptions())
CONFIG_NAMES = [field.name for field in dataclasses.fields(GRPOConfig)]
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 2**31, 2**63, 2**70, -(2**70), 10**400, 0.5, -0.5, 1e-320, 1e308, 1e400, -1e400),
    *(
        float("nan"),
        1j,
        "",
        "1",
        "0.5",
        "none",
        "None",
        "true",
        "steps",
        "\0",
        "\ud800",
        "é" * 50,
        "../..",
        "~",
        "a\nb",
    ),
    *("--help", "-1", "{}", "[]", '{"a": NaN}', '{"a": 1', "[" * 5000, '{"a":' * 2000, "1" * 5000, "drop", "server"),
    *(b"x", [], [1], ["a", 2], [None], [[]], [float("nan")], (), (1,), {}, {"a": 1}, {1: 2}, {None: object()}, {1, 2}),
    *(object(), int, len, Path("run"), Ellipsis, ["--seed=3"], {"trust_remote_code": True}, [{}], "linear", "dr_grpo"),
]
PAYLOADS = [
    'seed: !!python/object/apply:os.system ["touch owned"]',
    "reward_funcs: !!python/name:os.system",
    "model: !!python/module:os",
    "config: !!python/object/new:subprocess.Popen [[touch, owned]]",
    "generation_kwargs: &a {b: *a}",
    "seed: " + "[" * 100_000,
    "- " * 100_000,
    "seed: " + "9" * 5000,
    "seed: 2001-13-45",
    "chat_template_kwargs: {when: 2001-01-01}",
    "? [a, b]\n: 1",
    "seed: 1\nseed: [",
    "%YAML 9.9\n---\nseed: 1",
    "<<: [1]",
    "\0",
    "seed: \x07",
    "{" * 30,
]


def some_value(rng: random.Random, name: str) -> Any:
    """The default, or anything."""
    return SOUND[name] if rng.random() < 0.6 else rng.choice(VALUES)


def some_yaml(rng: random.Random) -> bytes:
    """A payload or a sound file, sometimes with some bytes changed."""
    sound = json.dumps({name: SOUND[name] for name in rng.sample(NAMES, 3)})
    content = bytearray(sound if rng.random() < 0.5 else rng.choice(PAYLOADS), "utf-8")
    for _ in range(rng.choice([0, 0, 1, 5])):
        place = rng.randrange(len(content) or 1)
        content[place : place + rng.randint(0, 3)] = bytes(rng.choices(b"&*!|>?:-{}[],#%@'\"\n\t\0\xff\xc3 019ae", k=2))
    return bytes(content)


def test_options_given_in_python(hostile):
    def make(rng: random.Random) -> None:
        options = {name: some_value(rng, name) for name in rng.sample(CONFIG_NAMES, 3)}
        config = GRPOConfig(**options)
        config.sampling(seed=config.seed)
        config.prompts_per_process(num_processes=2)

    assert min(hostile(make, 1000)) > 0.05


def test_files(hostile, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "run.yaml"

    def read(rng: random.Random) -> None:
        file.write_bytes(some_yaml(rng))
        assert all(isinstance(argument, str) for argument in as_arguments(read_yaml(file)))

    assert min(hostile(read, 540)) > 0.09
    assert list(tmp_path.iterdir()) == [file]  # no payload has run


def test_command_lines(hostile, tmp_path, capsys):
    file = tmp_path / "run.yaml"

    def parse(rng: random.Random) -> None:
        file.write_bytes(some_yaml(rng))
        given = [(name, str(some_value(rng, name))) for name in rng.sample(NAMES, 2)]
        written = [f"--{name}={text}" if rng.random() < 0.5 else (f"--{name}", text) for name, text in given]
        arguments = [text for part in written for text in ([part] if isinstance(part, str) else part)]
        parse_train_options([*arguments, *(["--config", str(file)] if rng.random() < 0.3 else [])])

    assert min(hostile(parse, 60, documented=(FusedGRPOError, SystemExit))) >= 0.05


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (PAYLOADS[0], "could not determine a constructor for the tag '.*:python/object/apply:os.system'"),
        ("seed: " + "[" * 100_000, "got values 21 levels deep, want at most 20"),
    ],
)
def test_a_file_that_carries_a_payload_is_refused(tmp_path, content, message):
    (tmp_path / "run.yaml").write_text(content)
    with pytest.raises(InputError, match=message):
        read_yaml(tmp_path / "run.yaml")


def test_a_value_is_never_taken_for_an_option(tmp_path):
    (tmp_path / "run.yaml").write_text('model: m\nrun_name: "--overwrite-output-dir"\n')
    options = parse_train_options(["--config", str(tmp_path / "run.yaml")])
    assert (options.run_name, options.overwrite_output_dir) == ("--overwrite-output-dir", False)
