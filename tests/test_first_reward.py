"""docs/first-reward.md: its files and commands, as they stand, one after the other in an empty folder."""

import ast
import re
import shlex
from pathlib import Path

import pytest

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "first-reward.md").read_text()
FILES = re.findall(r"`([\w.]+\.(?:py|yaml))`[^`\n]*:\n\n```\w+\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)).split("\n")


@pytest.fixture(scope="module")
def ran(farm, tmp_path_factory) -> tuple[Path, list[str]]:
    """The folder after all of it, and what the commands have printed."""
    folder, printed = tmp_path_factory.mktemp("first-reward"), []
    for name, text in FILES:
        (folder / name).write_text(text)
    for program, *arguments in (shlex.split(command, comments=True) for command in COMMANDS if command):
        if program == "fused-grpo":
            printed.append(farm.run("-m", "fused_grpo.trainer.cli", *arguments, cwd=folder))
        elif program == "python":
            script = folder / arguments[0]
            if script.name == "-c":
                script.write_text(arguments[1])
            printed.append(farm.run(script, cwd=folder))
    return folder, printed


def test_the_reward_gives_what_the_page_says(ran):
    folder, (_, by_hand, *_) = ran
    logged, scores = by_hand.splitlines()
    assert logged.startswith("exact 0.333")
    assert ast.literal_eval(scores) == pytest.approx([1.0, 2 / 3, 0.0])
    assert (folder / "train.jsonl").read_text().startswith('{"prompt": "10+10=", "answer": "02"}\n')


def test_the_run_ends_in_a_curve_of_ones_own(ran, learned):
    folder, (*_, run, exact) = ran
    held_out = [float(value) for text in (PAGE, run) for value in re.findall(r"held-out reward (\d\.\d+) on 384", text)]
    assert held_out[2] == pytest.approx(held_out[0], abs=0.03)  # greedy, before the first step
    # With 20 seeds 0.700 on average, sd 0.008: bench/results/cpu-2-cores/first-reward-2026-11-26.json.
    learned("docs/first-reward.md", found=held_out[3] - held_out[2], least=0.5)
    assert "<polyline" in (folder / "runs" / "own" / "reward.svg").read_text()
    assert "right_digits" in (folder / "runs" / "own" / "report.html").read_text()
    assert len([value for value in ast.literal_eval(exact) if value is not None]) == 40
