"""What a hostile completion can do to the trainer through a function that runs it: cost its own reward."""

import json
import math
import resource
import time
from pathlib import Path

import pytest

from fused_grpo.trainer.common.redaction import without_secrets
from fused_grpo.trainer.rewards import builtin_rewards, isolated
from fused_grpo.trainer.rewards.isolation import checked_reply

SOURCE = """
import json, os, resource, sys

def runs(completions, log_extra):
    {}
    return [1.0]
"""
BAD = {
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


def still_there(folder: Path) -> list[Path]:
    """Processes that were started from there and are still alive after 10 s."""
    for _ in range(100):
        processes = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(folder).encode() in read(path)]
        if not processes:
            break
        time.sleep(0.1)
    return processes


@pytest.mark.parametrize("bad", BAD)
def test_a_hostile_completion_costs_its_reward(judge, bad, tmp_path):
    body = f"if completions == ['bad']: {BAD[bad]}"
    start = time.monotonic()
    assert judge(body)(completions=["bad", "good"]) == [-1.0, 1.0]
    assert time.monotonic() - start < 60
    assert not list(tmp_path.glob("core*"))
    assert still_there(tmp_path) == []
    assert all(path.stat().st_blocks < 100 for path in tmp_path.iterdir())


@pytest.mark.parametrize(
    "then", ["while True: pass", "time.sleep(0.2); os.write(4, answer); return [7.0]", "time.sleep(0.2); os._exit(0)"]
)
def test_a_forged_answer_costs_no_later_completion_its_own(judge, then):
    answer = b'{"value": 5.0, "extra": {}, "metrics": {}}\n'
    body = f"""
    if completions == ["bad"]:
        import time
        answer = {answer!r}
        os.write(4, answer)
        {then}"""
    assert judge(body)(completions=["bad", "good", "good"]) == [5.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "line",
    [
        *('{"ready": true}', "[]", "1", '"value"', "{", '{"value": 1.0}', '{"error": 5}', '{"error": "\\ud800"}'),
        *(
            json.dumps({"value": 1.0, "extra": {}, "metrics": {}} | change)
            for change in [
                *({"value": value} for value in ("x", math.inf, -math.inf, math.nan, True, [1.0], 1e39)),
                *({"extra": extra} for extra in (5, {"a": 1}, {"a": []}, {"a": [1, 2]}, {"\ud800": [1]})),
                *({"metrics": metrics} for metrics in ([], {"a": 1.0}, {"a": ["x"]}, {"a": [None]})),
            ]
        ),
    ],
)
def test_a_reply_that_the_trainer_could_not_use_is_none(line):
    with pytest.raises(ValueError, match=r"answer|reward|columns|utf-8|Expecting"):
        checked_reply(line.encode())


def test_infinite_metrics_do_not_end_the_run(judge):
    logged = []
    body = """
    os.write(4, b'{"value": null, "extra": {}, "metrics": {"m": [Infinity, -Infinity, 1e308, 2.0]}}\\n')
    __import__("time").sleep(9)"""
    judge(body)(completions=["bad"], log_metric=lambda name, value: logged.append(value))
    assert [value for value in logged if not math.isnan(value)] == [2.0]


def test_the_worker_has_no_secret_no_open_file_and_no_core_dump(judge, monkeypatch, tmp_path):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "planted-secret")
    facts = []
    with open(tmp_path / "open", "w"):
        judge(FACTS, timeout=30, secrets=["OPENAI_API_KEY"])(
            completions=["good"], log_extra=lambda name, values: facts.extend(values)
        )
    (worker,) = facts
    assert [name for name, value in worker["env"].items() if value == "planted-secret"] == ["OPENAI_API_KEY"]
    assert worker["limits"] == [[0, 0], [1 << 30, 1 << 30]]
    assert len(worker["files"]) == 6  # three streams, the two pipes, and the folder that is being listed
    assert worker["alone"]
    assert resource.getrlimit(resource.RLIMIT_FSIZE) != (1 << 30, 1 << 30)


def test_names_of_secrets_are_told_from_others():
    secret = ["HF_TOKEN", "MY_PASSWORD", "GITHUB_PAT", "GOOGLE_APPLICATION_CREDENTIALS", "api_key", "PGPASSWORD"]
    secret += ["MYSQL_PWD", "OPENAI_APIKEY", "DB_PASS", "AWS_ACCESS_KEY_ID", "API_KEY2", "SSH_AUTH_SOCK"]
    secret += ["REDISCLI_AUTH", "DJANGO_SECRET_KEY", "SLACK_TOKEN_PROD"]
    plain = ["TOKENIZERS_PARALLELISM", "PATH", "KEYBOARD", "HF_HOME", "HF_HUB_OFFLINE", "PWD", "OLDPWD", "AUTHOR"]
    plain += ["XAUTHORITY", "PYTHONPATH", "LD_LIBRARY_PATH"]
    assert list(without_secrets(dict.fromkeys([*secret, *plain], "x"))) == plain


def test_values_of_secrets_are_told_from_others():
    secret = ["http://me:pw@proxy:3128", "postgres://u:p@db/x", "redis://:pw@h", "https://ghp@g.com"]
    secret += ["AccountName=a;AccountKey=b==", "host=db password=pw"]
    plain = ["http://proxy:3128", "me@example.org", "https://x.org/@me", "/usr/bin:/bin", "a=b"]
    variables = {f"SETTING{number}": value for number, value in enumerate([*secret, *plain])}
    assert list(without_secrets(variables).values()) == plain
    assert without_secrets(variables, keep=variables) == variables


@pytest.fixture
def quick_grader(limited):
    limited(builtin_rewards.GRADER, 2.0)


def test_a_pathological_expression_neither_hangs_nor_kills_the_trainer(quick_grader):
    bad = [r"\boxed{9^{9^{9^{9^{9}}}}}", "\\boxed{" + "(" * 20_000 + "1" + ")" * 20_000 + "}"]
    assert builtin_rewards.accuracy_reward([*bad, r"\boxed{4}"], solution=[r"\boxed{4}"] * 3) == [0.0, 0.0, 1.0]
