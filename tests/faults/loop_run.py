"""A short run in which something goes wrong in the second step, on one process. Run by the tests beside it.

loop_run.py <folder> <fault> <rank> <options as JSON>
"""

import errno
import json
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from scale_out_run import EngineByPrompt

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer, loop, transformers_face
from fused_grpo.trainer.logging import run_output
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer
from fused_grpo.trainer.types import Sample

OUT, FAULT, RANK = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])


def main() -> None:
    import faulthandler

    faulthandler.enable()
    run_output.write_report = lambda folder: folder / "report.html"  # which takes longer than the run
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=14, num_key_value_heads=2, tie_word_embeddings=False, **shape))
    options = {"max_steps": 3, "num_generations": 4, "per_device_train_batch_size": 8, "learning_rate": 1e-3}
    args = GRPOConfig(str(OUT / "run"), **{**options, **json.loads(sys.argv[4])})
    rows = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
    if FAULT == "row":
        rows[3] = {"prompt": "1+1=" * 5}
    engine = None if FAULT == "start" else EngineByPrompt(model)
    loop.choose_engine = lambda *_, **__: no_engine() if is_here() else EngineByPrompt(model)
    given = {"processing_class": build_tokenizer(), "rollout_engine": engine, "callbacks": [Fails]}
    trainer = GRPOTrainer(model, reward, args, rows, **given)
    break_it(trainer)
    if FAULT == "close" and is_here():
        trainer.engine.close = refuse
    try:
        trainer.train()
    finally:
        keep(trainer, "after")
    trainer.end()


class Fails(TrainerCallback):
    """In the event that has the name of the fault."""

    def on_init_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if FAULT == "on_init_end" and is_here():
            note()
            no_fours()


def reward(completion_ids: list[list[int]], trainer_state: Any, **columns: Any) -> list[float | None]:
    # Signals in the first step, which may be one of several that a generation serves; all else in the second.
    if FAULT in IN_A_REWARD and is_here() and trainer_state.global_step == (FAULT not in ("term", "hup", "usr1")):
        note()
        IN_A_REWARD[FAULT]()
    return [float(sum(ids) % 7) for ids in completion_ids]


def break_it(trainer: GRPOTrainer) -> None:
    """Replace the method that is to fail by one that does so in the second step; "nans": from then on."""
    learner = trainer.learner
    owners: dict[str, tuple[Any, str, Callable[..., Any]]] = {
        "backward": (learner, "_backward", out_of_memory),
        "freeze": (learner, "_backward", partial(frozen, trainer.model.lm_head)),
        "sync": (trainer.engine, "load_weights", refuse),
        "disk": (transformers_face, "save_checkpoint", disk_full),
        "metrics": (run_output.RunLog, "log_metrics", disk_full),
        "nan": (learner, "learn", without_numbers),
        "nans": (learner, "learn", without_numbers),
    }
    if FAULT not in owners:
        return
    owner, name, failing = owners[FAULT]
    working = getattr(owner, name)

    def replaced(*args: Any, **options: Any) -> Any:
        if trainer.step == 1:
            keep(trainer, "before")
        happens = trainer.step == 1 or (FAULT == "nans" and trainer.step > 1)
        if not (happens and is_here()):
            return working(*args, **options)
        note()
        return failing(working, *args, **options)

    setattr(owner, name, replaced)


def is_here() -> bool:
    return int(os.environ.get("RANK", "0")) == RANK


def note() -> None:
    """When it happened, for the test's clock."""
    (OUT / "happened").write_text(str(time.monotonic()))


def no_engine() -> None:
    note()
    raise UnavailableError("no memory for vLLM")


def no_fours() -> None:
    raise ValueError("no fours any more")


def keep(trainer: GRPOTrainer, name: str) -> None:
    """What a step that must not happen would have moved."""
    learner = trainer.learner
    moved = {
        "parameters": dict(trainer.model.state_dict()),
        "optimizer": learner.optimizer.optimizer.state_dict()["state"],
        "schedule": learner.scheduler.state_dict()["last_epoch"],
    }
    torch.save(moved, OUT / f"{name}-{trainer.accelerator.process_index}.pt")


def out_of_memory(*_: Any, **__: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def frozen(layer: torch.nn.Module, working: Callable[..., Any], *args: Any, **options: Any) -> Any:
    layer.requires_grad_(False)
    return working(*args, **options)


def refuse(*_: Any, **__: Any) -> None:
    note()
    raise ConnectionRefusedError("the engine is gone")


def disk_full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def without_numbers(learn: Callable[..., Any], batch: list[Sample], **options: Any) -> Any:
    return learn([replace(sample, advantage=math.nan) for sample in batch], **options)


IN_A_REWARD: dict[str, Callable[[], Any]] = {
    "reward": no_fours,
    "exit": lambda: sys.exit(0),
    "hang": lambda: time.sleep(600),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "hup": lambda: os.kill(os.getpid(), signal.SIGHUP),
    "usr1": lambda: os.kill(os.getpid(), signal.SIGUSR1),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
}

if __name__ == "__main__":
    main()
