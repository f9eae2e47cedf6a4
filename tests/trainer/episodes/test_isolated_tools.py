"""What a tool does in a process of its own stays there, and the model reads what became of its call."""

import gc
import inspect
import json
import os
import re
import textwrap
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from talkers import call
from transformers.utils.chat_template_utils import get_json_schema

from fused_grpo.errors import InputError
from fused_grpo.trainer.common.threads import in_thread
from fused_grpo.trainer.episodes import isolated_tool
from fused_grpo.trainer.episodes.tools import Answers, check_tools
from fused_grpo.trainer.rewards import load_reward

SOURCE = '''
def run(code: str, times: int = 1) -> str:
    """Run Python.

    Args:
        code: What sets the answer.
        times: How often it runs.
    """
    names = {}
    for _ in range(times):
        exec(code, names)
    return names.get("answer")

async def later(code: str) -> str:
    """Run Python later.

    Args:
        code: What sets the answer.
    """
'''
PID = "import os; answer = os.getpid()"
# Code, and what the model reads of it.
BAD = {
    "raises": ("raise ValueError('bad\\x1b[31m')", r"bad\\x1b[31m"),
    "exits": ("raise SystemExit(3)", "{'error': '3'}"),
    "interrupts": ("raise KeyboardInterrupt", "KeyboardInterrupt"),
    "recurses": ("f = lambda: f(); f()", "maximum recursion depth"),
    "hangs": ("while True: pass", "the process of run took longer than 2.0 s and was killed"),
    "ends": ("import os; os._exit(0)", "the process of run died"),
    "kills itself": ("import os; os.kill(os.getpid(), 9)", "the process of run died"),
    "kills its group": ("import os; os.killpg(0, 9)", "the process of run died"),
    "forks": ("import os, time; [os.fork() for _ in range(5)]; time.sleep(99)", "took longer than 2.0 s"),
    "takes memory": ("bytearray(2 << 30)", "MemoryError"),
    "returns 50 MB": ("answer = 'x' * 50_000_000", "50000000 characters, more than 262144 bytes"),
    "returns an image": ("answer = [{'type': 'image'}]", "the model reads text alone"),
    "raises 50 MB": ("raise OSError('y' * 50_000_000)", "yyyy"),
    "closes its sockets": ("import os; os.closerange(3, 5)", "the process of run died"),
    "answers garbage": (r"import os; os.write(4, b'garbage\n')", "answered with Expecting value"),
    "answers brackets": (r"import os; os.write(4, b'[' * 100_000 + b'\n')", "while decoding a JSON array"),
    "answers a number": (r"""import os; os.write(4, b'{"value": 5}\n')""", "something that is not an answer"),
    "answers without end": ("import os\nwhile True: os.write(4, b' ' * 65536)", "more than 262144 bytes"),
}
RESULTS = {
    "text": ("answer = '12'", "12"),
    "parts": ("answer = [{'type': 'text', 'text': '1'}, {'type': 'text', 'text': '2'}]", "12"),
    "dict": ("answer = {'a': {1}}", "{'a': {1}}"),
    "none": ("answer = None", "None"),
    "surrogate": (r"answer = 'a\ud800'", "a?"),
    "long": ("answer = 'x' * 260_000", "x" * 260_000),
}


@pytest.fixture
def make(tmp_path):
    (tmp_path / "mine.py").write_text(SOURCE)

    def tool(name="run", **options):
        return isolated_tool(f"{tmp_path / 'mine.py'}:{name}", **{"timeout": 20.0, **options})

    return tool


def answered(tool, *codes: str, timeout: float = 60.0) -> list[tuple[bool, str]]:
    """Whether each call of a turn failed, and what the model reads."""
    asked = [{"function": {"name": tool.__name__, "arguments": {"code": code}}} for code in codes]
    return [(made.failed, text) for made, text in Answers([tool], timeout=timeout).start(asked, most=10**6).result()]


def processes(folder: Path) -> list[str]:
    """Those that run with a file from there."""
    names = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            names += [path.parent.name] if str(folder).encode() in path.read_bytes() else []
    return names


def all_end(folder: Path) -> bool:
    """Whether there are none of them after 10 s."""
    end = time.monotonic() + 10
    while processes(folder) and time.monotonic() < end:
        gc.collect()  # the traceback of an error refers to its tool
        time.sleep(0.1)
    return not processes(folder)


@pytest.mark.parametrize("bad", BAD)
def test_a_call_that_goes_wrong_is_an_error_and_the_next_one_works(make, bad, tmp_path):
    (code, text), start = BAD[bad], time.monotonic()
    tool = make(timeout=2.0, memory=1 << 30)
    (failed, read), after = answered(tool, code, "answer = 1 + 1")
    assert failed
    assert read.startswith("{'error': ")
    assert text in read
    assert len(read) < 2200
    assert after == (False, "2")
    assert time.monotonic() - start < 60
    del tool
    assert all_end(tmp_path)


@pytest.mark.parametrize("kind", RESULTS)
def test_results_are_the_text_that_a_plain_tool_gives(make, tmp_path, kind):
    plain = load_reward(f"{tmp_path / 'mine.py'}:run", what="tool")
    code, text = RESULTS[kind]
    assert answered(make(), code) == answered(plain, code) == [(False, text)]


@pytest.mark.parametrize("then", ["", "time.sleep(99)"])
def test_what_a_call_leaves_behind_ends_with_its_process(make, tmp_path, then):
    tool = make(timeout=2.0)
    ((failed, _),) = answered(tool, f"import os, time\nif os.fork() == 0: time.sleep(99)\n{then}")
    assert failed is bool(then)
    if not failed:
        assert len(processes(tmp_path)) == 2
        del tool
    assert all_end(tmp_path)


def test_a_child_that_returns_from_the_tool_answers_no_later_call(make):
    forks = "import os, time\nanswer = os.getpid()\nif os.fork() == 0: time.sleep(0.5)"
    slow = "import os, time\ntime.sleep(1.5)\nanswer = -os.getpid()"
    (_, pid), (_, later), (_, last) = answered(make(workers=1), forks, slow, PID)
    assert later == f"-{pid}"
    assert last == pid  # no worker was replaced


def test_what_a_tool_prints_is_no_answer_and_its_stdin_is_empty(make):
    code = "import os, sys\nprint('garbage')\nos.write(1, b'garbage\\n')\nanswer = repr(sys.stdin.read())"
    assert answered(make(), code) == [(False, "''")]


def test_a_tool_gets_the_secrets_that_are_named_and_no_other(make, monkeypatch):
    for name in ("HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, "planted-secret")
    code = "import os; answer = [name for name, value in os.environ.items() if value == 'planted-secret']"
    assert answered(make(secrets=["OPENAI_API_KEY"]), code) == [(False, "['OPENAI_API_KEY']")]


def test_as_many_calls_run_at_once_as_there_are_workers(make, tmp_path):
    """Each waits for the other three."""
    (tmp_path / "there").mkdir()
    code = f"""
import os, pathlib, time
folder, answer = pathlib.Path({str(tmp_path / "there")!r}), os.getpid()
(folder / str(answer)).touch()
while len(os.listdir(folder)) < 4: time.sleep(0.01)"""
    tool = make(workers=4)
    calls = [in_thread(partial(tool, code)) for _ in range(4)]
    assert len({call.result(60) for call in calls}) == 4


def test_the_wait_for_a_process_is_no_part_of_the_time_of_a_call(make):
    tool, code = make(workers=1, timeout=2.0), "import os, time; time.sleep(0.7); answer = os.getpid()"
    calls = [in_thread(partial(answered, tool, code, timeout=0.3)) for _ in range(4)]
    answers = [call.result(60)[0] for call in calls]
    assert [failed for failed, _ in answers] == [False] * 4
    assert len(set(answers)) == 1  # one process


def test_calls_one_after_the_other_share_a_process(make):
    answers = answered(make(workers=4), PID, PID, PID)
    assert answers == [(False, answers[0][1])] * 3
    assert answers[0][1] != str(os.getpid())


def test_the_model_sees_the_function_that_is_isolated(make, tmp_path):
    tool, plain = make(), load_reward(f"{tmp_path / 'mine.py'}:run", what="tool")
    assert get_json_schema(tool) == get_json_schema(plain)
    assert (tool.__name__, inspect.signature(tool)) == ("run", inspect.signature(plain))
    assert check_tools([tool]) == [tool]
    count = "number = globals().get('number', 0) + 1; answer = number"
    assert (tool(count), tool(count, times=3)) == ("1", "3")
    with pytest.raises(RuntimeError, match="unexpected keyword argument 'x'"):
        tool(x=1)


def test_a_function_is_called_by_its_name(tmp_path):
    assert isolated_tool(textwrap.dedent, timeout=20.0)("  a") == "a"
    named = f"{SOURCE}\nfrom fused_grpo.trainer.episodes import isolated_tool\nrun = isolated_tool(run, timeout=5.0)\n"
    (tmp_path / "named.py").write_text(named)
    tool = load_reward(f"{tmp_path / 'named.py'}:run", what="tool")
    # The name stands for the isolated tool in the new process, too, which does not start a further one.
    assert tool("import os; answer = os.getppid()") == str(os.getpid())


AROUND = """
import functools
from fused_grpo.trainer.episodes import isolated_tool
from fused_grpo.trainer.rewards import isolated

inner = isolated_tool(run, timeout=20.0)
{wraps}
def run(code: str, times: int = 1) -> str:
    return "around " + inner(code, times)

def score(completions, **columns):
    return [1.0] * len(completions)

scored = isolated(score, timeout=20.0)
@functools.wraps(scored)
def score(completions, **columns):
    return [2 * value for value in scored(completions=completions)]
"""


def test_a_function_around_an_isolated_one_may_have_its_name(tmp_path):
    """Its process calls the plain function, and not the one around it, which would start a process, and so on."""
    (tmp_path / "around.py").write_text(SOURCE + AROUND.replace("{wraps}", "@functools.wraps(inner)"))
    tool = load_reward(f"{tmp_path / 'around.py'}:run", what="tool")
    assert answered(tool, "import os; answer = os.getppid()") == [(False, f"around {os.getpid()}")]
    # The limit is not that of the isolated one: what the function around it does may hang.
    ((failed, text),) = answered(tool, "import time; time.sleep(3)", timeout=0.5)
    assert (failed, text) == (True, "{'error': 'run took longer than 0.5 s'}")
    assert load_reward(f"{tmp_path / 'around.py'}:score")(completions=["a", "b"]) == [2.0, 2.0]


def test_a_function_that_calls_itself_in_its_process_starts_no_further_one(tmp_path):
    (tmp_path / "around.py").write_text(SOURCE + AROUND.replace("{wraps}", ""))
    tool = load_reward(f"{tmp_path / 'around.py'}:run", what="tool")
    tool.__doc__ = load_reward(f"{tmp_path / 'around.py'}:later").__doc__
    ((failed, text),) = answered(tool, PID)
    assert failed
    assert "which is called in its own process, where that name means a function around it; fix: give one" in text
    assert len(processes(tmp_path)) == 1


@pytest.mark.parametrize("code", ["import sys; sys.stdout.close()", "import os; os.close(1)"])
def test_a_call_that_closes_standard_output_harms_no_later_one(make, code):
    tool = make(workers=1)
    assert answered(tool, code, "print('x'); answer = 5") == [(False, "None"), (False, "5")]


class Shop:
    def price(self, item: str) -> int:
        return len(item)


@pytest.mark.parametrize(
    ("tool", "options", "text"),
    [
        (lambda code: code, {}, "which a new process cannot import; fix: a function at the top level of a module"),
        (Shop().price, {}, "which a new process cannot import; fix: a function at the top level of a module"),
        ("later", {}, "got the async function .*, want a plain one"),
        ("missing", {}, "got tool .*:missing', which cannot be loaded"),
        ("run", {"timeout": 0}, "got timeout=0, want seconds > 0"),
        ("run", {"memory": 0}, "got memory=0, want bytes > 0"),
        ("run", {"workers": 0}, "got workers=0, want processes >= 1"),
    ],
)
def test_what_cannot_be_isolated_is_refused(make, tool, options, text):
    with pytest.raises(InputError, match=text):
        make(tool, **options) if isinstance(tool, str) else isolated_tool(tool, timeout=1.0)


def test_bad_input_inside_a_plain_tool_is_an_error_that_the_model_reads():
    def strict(code: str) -> str:
        raise InputError(f"got {code}")

    assert answered(strict, "this") == [(True, "{'error': 'got this'}")]


def test_a_tool_that_no_process_can_load_ends_the_run(make_trainer, tmp_path, monkeypatch):
    monkeypatch.setenv("MINE_API_KEY", "12")  # which a new process does not get
    (tmp_path / "needs.py").write_text(f"import os\nkey = os.environ['MINE_API_KEY']\n{SOURCE}")
    tool = isolated_tool(f"{tmp_path / 'needs.py'}:run", timeout=5.0)
    trainer = make_trainer(lambda *_: call("run", code="answer = 1"), tools=[tool], max_steps=1)
    with pytest.raises(InputError, match=r"which a new process cannot load: .*MINE_API_KEY"):
        trainer.train()


@pytest.mark.parametrize("held_as", [lambda tool: tool, staticmethod], ids=["attribute", "staticmethod"])
def test_an_isolated_tool_of_an_environment_is_called_without_it(make, make_trainer, held_as):
    class Shell:
        run = held_as(make())

        def reset(self, **row):
            return "Compute."

    def say(read: str, member: int) -> str:
        answers = re.findall(r"<answer>(.*?)</answer>", read)
        return f"I read {answers[-1]}" if answers else call("run", code=f"answer = {member} * 7")

    # Its limit is its own.
    trainer = make_trainer(say, environment_factory=Shell, rows=None, tool_timeout=0.001, max_steps=1)
    assert [tool.__name__ for tool in trainer.tools] == ["run"]
    trainer.train()
    for member, sample in enumerate(trainer.scored.samples):
        (made,) = sample.episode.calls
        assert (made.arguments, made.failed) == ({"code": f"answer = {member} * 7"}, False)
        assert sample.episode.messages[-1]["content"] == f"I read {7 * member}"


def test_an_episode_goes_on_after_a_call_that_went_wrong(make, make_trainer):
    bad = ["answer = 6 * 7", *(BAD[name][0] for name in ("ends", "hangs", "returns 50 MB"))]
    texts = ["42", *(BAD[name][1] for name in ("ends", "hangs", "returns 50 MB"))]

    def say(read: str, member: int) -> str:
        answers = re.findall(r"<answer>(.*?)</answer>", read)
        return f"I read {answers[-1]}" if answers else call("run", code=bad[member % 4])

    trainer = make_trainer(say, tools=[make(timeout=2.0)], max_steps=1, max_completion_length=900, logging_steps=1)
    trainer.train()
    lines = Path(trainer.args.output_dir, "rollouts.jsonl").read_text().splitlines()
    for line, text in zip(lines, texts, strict=True):
        record = json.loads(line)
        assert (record["ended"], record["tool_calls"][0]["failed"]) == ("stop", text != "42")
        assert text in record["messages"][-1]["content"]
    assert trainer.state.log_history[0]["tools/failure_frequency"] == 0.75
