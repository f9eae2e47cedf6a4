"""What a reward function does in a process of its own stays there."""

import gc
import os
import signal
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest

from fused_grpo.errors import InputError, RewardError
from fused_grpo.trainer.common.threads import in_thread
from fused_grpo.trainer.rewards import isolated, isolation
from fused_grpo.trainer.rewards.isolation import IsolatedReward

SOURCE = """
import os, sys

calls = 0

def behaves(completions, answer, log_extra, log_metric):
    global calls
    calls += 1
    print("on stdout", sys.stdin.read())
    log_extra("pid", [os.getpid()])
    log_metric("calls", calls)
    (text,) = completions
    if text == "hang":
        while True:
            pass
    if text == "die":
        os._exit(3)
    if text == "raise":
        raise ValueError("no answer")
    if text == "hoard":
        bytearray(6 << 30)
    return [None if text == "skip" else float(len(text)) + answer[0]]

async def waits(completions):
    return [0.0]
"""


@pytest.fixture
def source(tmp_path) -> str:
    (tmp_path / "judge.py").write_text(SOURCE)
    return f"{tmp_path / 'judge.py'}:"


def test_it_is_the_function_in_another_process(reward, source):
    output = reward(isolated(f"{source}behaves", timeout=30), rows=[{"prompt": "p", "answer": n} for n in (1, 2, 3, 4)])
    assert output.per_function[:, 0].tolist() == [2.0, 3.0, 4.0, 5.0]
    assert len(set(output.extra["pid"])) == 1
    assert os.getpid() not in output.extra["pid"]
    assert output.metrics == {"calls": 2.5}
    assert list(output.seconds) == ["behaves"]


@pytest.mark.parametrize("bad", ["hang", "die", "raise", "hoard"])
def test_one_bad_completion_costs_its_own_reward_and_no_other(source, bad):
    function = isolated(f"{source}behaves", timeout=1.0, memory=1 << 32, on_failure=-1.0)
    texts, pids = ["a", "skip", bad, "abc"], []
    columns = {"completions": texts, "answer": [0] * 4, "log_extra": lambda name, values: pids.extend(values)}
    assert function(**columns) == [1.0, None, -1.0, 3.0]
    assert (pids[0] == pids[1], pids[0] == pids[3]) == (True, bad in ("raise", "hoard"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("hang", "took longer than 0.5 s and was killed; at 'p2'"),
        ("die", "died; at 'p2'"),
        ("raise", "reward function 'behaves' raised ValueError: no answer; at prompt 'p2'"),
    ],
)
def test_by_default_it_is_an_error_that_names_the_prompt(source, bad, message):
    function = isolated(f"{source}behaves", timeout=0.5)
    with pytest.raises(RewardError, match=message):
        function(prompts=["p1", "p2"], completions=["a", bad], answer=[0, 0])
    assert function(prompts=["p1"], completions=["ab"], answer=[0]) == [2.0]


def test_none_stands_for_what_could_not_be_scored(reward, source):
    function = isolated(f"{source}behaves", timeout=30, on_failure=None)
    output = reward(function, rows=[{"prompt": "p", "answer": answer} for answer in (1, "one", 2, 3)])
    assert output.per_function[:, 0].isnan().tolist() == [False, True, False, False]


def test_the_worker_ends_with_its_function(source):
    function, pids = isolated(f"{source}behaves", timeout=30), []
    function(completions=["a"], answer=[0], log_extra=lambda name, values: pids.extend(values))
    assert os.path.exists(f"/proc/{pids[0]}")
    del function
    gc.collect()
    assert not os.path.exists(f"/proc/{pids[0]}")


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # Python 3.12's, for any process with threads
def test_a_fork_of_the_trainer_that_ends_leaves_the_worker(source):
    function = isolated(f"{source}behaves", timeout=30)
    assert function(completions=["a"], answer=[0]) == [1.0]
    if (child := os.fork()) == 0:
        try:
            function._worker.kill()  # as at the end of any process
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert function._worker.process.poll() is None


def test_a_worker_that_does_not_read_is_replaced(source):
    function = isolated(f"{source}behaves", timeout=1.0)
    function(completions=["a"], answer=[0])
    function._worker.process.send_signal(signal.SIGSTOP)
    more_than_the_pipe_holds = "x" * (1 << 20)
    late = in_thread(lambda: function(completions=[more_than_the_pipe_holds, "ab"], answer=[0, 0]))
    assert late.result(30) == [float(1 << 20), 2.0]


def test_no_reply_is_too_long_for_its_prompt(source):
    function, logged = isolated(f"{source}behaves", timeout=30, on_failure=-1.0), []
    columns = {"prompts": ["\U0001f600" * 30_000] * 2, "completions": ["raise", "ab"], "answer": [0, 0]}
    assert function(**columns, log_extra=lambda name, values: logged.extend(values)) == [-1.0, 2.0]
    assert function(**columns, log_metric=lambda name, value: logged.append(value)) == [-1.0, 2.0]
    assert logged == [None, logged[1], 4.0]  # the fourth call of one worker: no error was taken for a broken one


def test_a_call_whose_caller_has_stopped_waiting_ends_by_itself(source):
    function = isolated(f"{source}behaves", timeout=0.2)
    function(completions=["a"], answer=[0])
    worker = function._worker
    worker.socket.sendall(b'0 {"completions": ["hang"], "answer": [0]}\n')
    start = time.perf_counter()
    assert worker.process.wait(20) < 0
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda completions: [0.0], {}, "which a new process cannot import"),
        ("{}waits", {}, "got the async function"),
        ("{}missing", {}, "cannot be loaded"),
        ("{}behaves", {"timeout": 0}, "got timeout=0"),
        ("{}behaves", {"timeout": 1e10}, "want seconds > 0, 100000000 at most"),
        ("{}behaves", {"memory": -1}, "got memory=-1"),
        ("{}behaves", {"on_failure": "ignore"}, "got on_failure='ignore', want 'raise', a number or None"),
    ],
)
def test_what_cannot_be_isolated_is_refused(source, function, options, message):
    function = function.format(source) if isinstance(function, str) else function
    with pytest.raises(InputError, match=message):
        isolated(function, **{"timeout": 1.0, **options})


def test_a_function_of_an_importable_module_is_sent_by_its_name():
    from fused_grpo.trainer.rewards.builtin_rewards import format_reward

    function = isolated(format_reward, timeout=30)
    assert function(completions=["<think>1</think>2", "2"]) == [1.0, 0.0]
    assert function.__name__ == "format_reward"


@pytest.mark.parametrize(
    ("started_as", "reference"),
    [(None, "/x/run.py:scored"), ("__main__", "/x/run.py:scored"), ("package.run", "package.run:scored")],
)
def test_a_function_of_the_program_has_the_name_that_imports_its_module(monkeypatch, started_as, reference):
    """`python run.py`, a debugger around that, and `python -m package.run`, which may have relative imports."""

    def scored(completions) -> list[float]: ...

    scored.__module__, scored.__qualname__ = "__main__", "scored"
    program, spec = ModuleType("__main__"), started_as and ModuleSpec(started_as, None)
    vars(program).update(scored=scored, __file__="/x/run.py", __spec__=spec)
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert isolation.importable(scored, "reward", timeout=1.0, memory=None)[0] == reference


def test_what_a_process_said_before_it_ended_is_read_however_late(monkeypatch):
    started = []

    def popen(*arguments, **options):
        started.append(subprocess.Popen(*arguments, **options))
        return started[0]

    def late(work, name):
        started[0].wait(60)
        return in_thread(work, name=name)

    monkeypatch.setattr(isolation, "subprocess", SimpleNamespace(Popen=popen))
    monkeypatch.setattr(isolation, "in_thread", late)
    with pytest.raises(InputError, match=r"cannot load: .* named 'no'"):
        IsolatedReward("no.such:module", timeout=1.0, memory=None, on_failure=0.0)(completions=["a"])


def test_arguments_that_are_not_json_and_missing_functions_are_named(source):
    with pytest.raises(RewardError, match=r"arguments .* not JSON: Object of type set .*name the arguments"):
        isolated(f"{source}behaves", timeout=30)(completions=["a"], answer=[{1}])
    gone = IsolatedReward("no.such:module", timeout=1.0, memory=None, on_failure=0.0)
    with pytest.raises(InputError, match=r"got no.such:module, which a new process cannot load: .* named 'no'"):
        gone(completions=["a"])
