"""What a hostile completion can do to the trainer through a function that runs it: cost its own reward."""

from __future__ import annotations

import resource
import time
from pathlib import Path

import pytest

from fused_grpo.trainer.rewards import isolated, library
from fused_grpo.trainer.rewards.isolation import without_secrets

SOURCE = """
import json, os, resource, sys

def runs(completions, log_extra):
    {}
    return [1.0]
"""
BAD = {
    "hoards memory": "[bytearray(1 << 28) for _ in range(99)]",
    "writes without end": "file = open(__file__ + '.out', 'wb'); [file.seek(1 << 40), file.write(b'x'), file.flush()]",
    "forks without end": "[os.fork() for _ in range(9)]; __import__('time').sleep(99)",
    "dies of a signal": "os.abort()",
    "answers for the function": "os.write(4, b'[]\\n'); __import__('time').sleep(9)",
    "answers without end": "[os.write(4, b' ' * (1 << 20)) for _ in range(20)]",
    "answers brackets": "os.write(4, b'[' * 100_000 + b'\\n')",
    "exits": "sys.exit()",
    "recurses": "f = lambda: f(); f()",
}
FACTS = """
    limits = [resource.getrlimit(name) for name in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE)]
    log_extra("facts", [{"env": dict(os.environ), "limits": limits, "files": os.listdir("/proc/self/fd"),
                         "alone": os.getsid(0) == os.getpid()}])"""


@pytest.fixture
def judge(tmp_path):
    def make(body: str, **options):
        (tmp_path / "judge.py").write_text(SOURCE.replace("{}", body, 1))
        return isolated(
            f"{tmp_path / 'judge.py'}:runs", **{"timeout": 1.0, "memory": 1 << 33, "on_failure": -1.0, **options}
        )

    return make


def read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.parametrize("bad", BAD)
def test_a_hostile_completion_costs_its_reward(judge, bad, tmp_path):
    body = f"if completions == ['bad']: {BAD[bad]}"
    start = time.monotonic()
    assert judge(body)(completions=["bad", "good"]) == [-1.0, 1.0]
    assert time.monotonic() - start < 60
    assert not list(tmp_path.glob("core*"))
    assert not [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(tmp_path).encode() in read(path)]
    assert all(path.stat().st_blocks < 100 for path in tmp_path.iterdir())


def test_the_worker_has_no_secret_no_open_file_and_no_core_dump(judge, monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "planted-secret")
    facts = []
    with open(tmp_path / "open", "w"):
        judge(FACTS, timeout=30, secrets=["OPENAI_API_KEY"])(
            completions=["good"], log_extra=lambda name, values: facts.extend(values)
        )
    (found,) = facts
    assert [name for name, value in found["env"].items() if value == "planted-secret"] == ["OPENAI_API_KEY"]
    assert found["limits"] == [[0, 0], [1 << 30, 1 << 30]]
    assert len(found["files"]) == 6  # three streams, the two pipes, and the folder that is being listed
    assert found["alone"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE) != (1 << 30, 1 << 30)


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        *((name, 0) for name in ("HF_TOKEN", "MY_PASSWORD", "GITHUB_PAT", "GOOGLE_APPLICATION_CREDENTIALS", "api_key")),
        *((name, 1) for name in ("TOKENIZERS_PARALLELISM", "PATH", "KEYBOARD", "HF_HOME", "HF_HUB_OFFLINE")),
    ],
)
def test_names_of_secrets_are_told_from_others(name, stays):
    assert len(without_secrets({name: "x"})) == stays


@pytest.fixture
def quick_grader(monkeypatch):
    monkeypatch.setattr(library, "MATH_TIMEOUT", 2.0)
    library._grader.cache_clear()
    yield
    library._grader.cache_clear()


def test_a_pathological_expression_neither_hangs_nor_kills_the_trainer(quick_grader):
    bad = [r"\boxed{9^{9^{9^{9^{9}}}}}", "\\boxed{" + "(" * 20_000 + "1" + ")" * 20_000 + "}"]
    assert library.accuracy_reward([*bad, r"\boxed{4}"], solution=[r"\boxed{4}"] * 3) == [0.0, 0.0, 1.0]
