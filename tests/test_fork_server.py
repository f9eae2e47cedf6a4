"""The fork server starts what it says: scripts with their own arguments, environment, output and end."""

import pytest

SCRIPT = """
import atexit, os, sys, time
atexit.register(print, "at last")
print(sys.argv[1:], os.environ["WHO"], "torch" in sys.modules, flush=True)
if sys.argv[1] == "sleep":
    time.sleep(60)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("teardown", [False, True])
def test_a_script_runs_and_ends_as_it_would_alone(fork_server, script, teardown):
    process = fork_server.start(script, 3, env={"WHO": "me"}, teardown=teardown)
    assert process.wait(timeout=30) == 3
    assert process.output == "['3'] me True\nat last\n"


@pytest.mark.parametrize("teardown", [False, True])
def test_a_script_that_raises_says_what(fork_server, script, teardown):
    process = fork_server.start(script, "three", env={"WHO": "me"}, teardown=teardown)
    assert process.wait(timeout=30) == 1
    assert "ValueError: invalid literal for int()" in process.output


@pytest.mark.engine
def test_a_stage_has_imported_what_it_is_named_after(fork_server, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; print(*({'vllm.entrypoints.llm', 'vllm.v1.worker.cpu_worker'} & sys.modules.keys()))"
    )
    assert len(fork_server.run(script, stage="vllm").split()) == 2


def test_a_script_can_be_killed(fork_server, script):
    process = fork_server.start(script, "sleep", env={"WHO": "me"})
    with pytest.raises(TimeoutError, match="goes on"):
        process.wait(timeout=0.5)
    process.kill()
    assert process.wait(timeout=30) == -9


def test_two_at_a_time_are_two_processes(fork_server, script):
    first, second = (fork_server.start(script, 0, env={"WHO": name}) for name in ("one", "two"))
    assert (first.wait(), second.wait()) == (0, 0)
    assert "one" in first.output
    assert "two" in second.output
