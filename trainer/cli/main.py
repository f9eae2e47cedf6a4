"""The command line: `fused-grpo train`, `recipes`, `tasks`, `rewards`, `report`, `plan`, `bench` and `env`."""

from __future__ import annotations

import importlib
import os
import select
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from fused_grpo.errors import FusedGRPOError, InputError, shown
from fused_grpo.trainer import extra_installed

USAGE = """usage: fused-grpo {train,recipes,tasks,rewards,report,plan,bench,env} [options]

  train        train a model with GRPO; without --model, the built-in task
               (--help: all options; --dry-run: options, batch and memory of a
               run that is not started)
  recipes      names for train --config, and configurations for accelerate
  tasks [NAME] names for train --task; of one, its options
  rewards      names for train --reward-funcs
  report DIR   write report.html again from the logs of the run in DIR
  plan         seconds of a step on GPUs that you do not have yet, and how to split
               them between rollouts and training (fused-grpo plan --help)
  bench        time and memory of the ops and the trainer on this machine
               (fused-grpo bench --help)
  env          versions, devices, and which implementations can run here

  fused-grpo train --model Qwen/Qwen2.5-0.5B-Instruct \\
      --dataset questions.jsonl --prompt-column question \\
      --answer-column answer --reward-funcs accuracy
  fused-grpo train --model Qwen/Qwen2.5-0.5B-Instruct \\
      --task reasoning_gym:chain_sum --task-options max_terms=3
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the `fused-grpo` script. Errors of ours end it with their message and status 1."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            with extra_installed():
                run(arguments)
        finally:
            if sys.stdout is not None:  # of a process without one
                sys.stdout.flush()
    except BrokenPipeError:
        output = select.poll()
        output.register(sys.stdout, 0)  # errors alone
        if not output.poll(0):
            raise  # of another pipe, as to a process that has ended
        # `fused-grpo train --help | head` has read what it wants. The interpreter flushes once more at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)  # what a shell reports for a program that SIGPIPE has ended
    except FusedGRPOError as error:
        sys.exit(f"fused-grpo: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        sys.exit("fused-grpo: interrupted")


def run(arguments: Sequence[str]) -> None:
    """Run a command, or raise InputError. Each imports what it needs, so that `env` works in any environment."""
    match arguments:
        case ["train", *options]:
            from fused_grpo.trainer.cli.options import parse_train_options

            parsed = parse_train_options(options)  # --help need not wait for what training imports
            from fused_grpo.trainer.cli.train import train

            train(parsed)
        case ["report", directory] if not directory.startswith("-"):
            from fused_grpo.trainer.logging.report import write_report

            try:
                print(write_report(Path(directory)))
            except OSError as error:
                why = f"which cannot be read ({error.strerror})"
                raise InputError(
                    f"got {shown(directory, 200)}, {why}; want the directory of a run; fix: its path"
                ) from error
        case ["report", *given]:
            raise InputError(f"got report with {given}, want one directory of a run; fix: fused-grpo report runs/demo")
        case ["recipes"]:
            from fused_grpo.trainer.cli.options import RECIPES

            for path in sorted(RECIPES.glob("*.yaml"), key=lambda path: path.stem):
                what = path.read_text().partition("\n")[0].removeprefix("# ")
                print(textwrap.fill(f"{path.stem:16} {what}", 80, subsequent_indent=17 * " "))
            print(*sorted((RECIPES / "accelerate").glob("*.yaml")), sep="\n")
        case ["tasks", *names] if len(names) <= 1:
            from fused_grpo.trainer.tasks.named import task_lines

            print("\n".join(task_lines(*names)))
        case ["rewards"]:
            from fused_grpo.trainer.rewards.builtin_rewards import NAMED, usage_of

            for name, reward in NAMED.items():
                print(f"{usage_of(name):25} {reward.scores}")
                if reward.column:
                    print(f"{'':25} reads the column {reward.column!r} (--answer-column)")
        case ["plan", *options]:
            from fused_grpo.trainer.cli.plan import plan

            print(plan(options))
        case ["bench", *options]:
            # By name, because bench/ is above this floor; it needs pytest.
            sys.exit(importlib.import_module("fused_grpo.bench.__main__").main(options))
        case ["env"]:
            from fused_grpo.env import environment

            for name, value in environment().items():
                print(f"{name:14} {value}")
        case [] | ["-h" | "--help", *_]:
            print(USAGE, end="")
        case ["recipes" | "tasks" | "rewards" | "env" as command, *more]:
            raise InputError(f"got {command} with {' '.join(more)}, want it alone; fix: see fused-grpo --help")
        case [unknown, *_]:
            commands = "train, recipes, tasks, rewards, report, plan, bench or env"
            raise InputError(f"got the command {unknown!r}, want {commands}")
