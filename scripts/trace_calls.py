"""How much of the house a call walks through: `python scripts/trace_calls.py [--list]`.

Runs a plain loss forward and backward, on the torch path, and one optimizer step of the trainer with the transformers
engine, from its prompts to its log. Prints of each how many functions of the package ran, in how many files, how many
calls that were, and how often a call went to another file. With --list also the functions of each file. The fewer, the
easier the code is to follow.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any, NamedTuple

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))


class Walk(NamedTuple):
    """The functions that ran, by file, and their calls in order."""

    functions: dict[str, set[str]]
    calls: list[str]  # the file of each

    def __str__(self) -> str:
        changes = sum(one != other for one, other in zip(self.calls, self.calls[1:], strict=False))
        functions = sum(map(len, self.functions.values()))
        return (
            f"{functions} functions in {len(self.functions)} files, {len(self.calls)} calls, {changes} to another file"
        )


class Recorder:
    """Records what of the package runs; generators and comprehensions count as the function that they stand in."""

    def __init__(self) -> None:
        self.functions, self.calls = defaultdict[str, set[str]](set), list[str]()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_qualname
        ours = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] not in ("scripts", "tests", ".venv")
        if event == "call" and ours and not name.endswith(">"):
            file = str(path.resolve().relative_to(ROOT))
            self.functions[file].add(name)
            self.calls.append(file)

    def walk(self) -> Walk:
        """What was recorded."""
        return Walk(dict(self.functions), self.calls)


def plain_loss() -> Walk:
    """Of a loss of two padded sequences, forward and backward."""
    from fused_grpo import fused_linear_grpo_loss

    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=generator, requires_grad=True) for shape in ((2, 9, 16), (99, 16)))
    targets, advantages = torch.randint(99, (2, 9), generator=generator), torch.tensor([1.0, -1.0])

    def call() -> None:
        fused_linear_grpo_loss(hidden, weight, targets, advantages=advantages, mask=torch.ones(2, 9)).loss.backward()

    call()  # once, for what is imported or cached at the first call
    recorder = Recorder()
    # Autograd runs a backward pass in the thread of the caller on a CPU, so that its calls count.
    sys.setprofile(recorder)
    call()
    sys.setprofile(None)
    return recorder.walk()


def optimizer_step() -> Walk:
    """Of the second of three steps of the built-in task, with the transformers engine and the default options."""
    from transformers import TrainerCallback

    from fused_grpo.trainer import GRPOConfig, GRPOTrainer
    from fused_grpo.trainer.recipes import arithmetic

    recorder = Recorder()

    class SecondStep(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            sys.setprofile(recorder if state.global_step == 1 else None)

    with TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        options: Any = {"max_steps": 3, "num_generations": 4, "per_device_train_batch_size": 8, "use_cpu": True}
        args = GRPOConfig(output_dir=f"{folder}/run", max_completion_length=4, use_vllm=False, **options)
        model, tokenizer = arithmetic.load_base_model()
        GRPOTrainer(
            model,
            arithmetic.sum_reward,
            args,
            arithmetic.build_splits().train,
            processing_class=tokenizer,
            callbacks=[SecondStep()],
        ).train()
    return recorder.walk()


def main(arguments: list[str]) -> int:
    for name, walk in (("a plain loss, forward and backward", plain_loss()), ("an optimizer step", optimizer_step())):
        print(f"{name}: {walk}")
        for file, functions in walk.functions.items() if "--list" in arguments else ():
            print(f"  {file}: {', '.join(sorted(functions))}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
