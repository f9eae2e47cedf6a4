"""A short run that can be told where to die. Run by test_resume.py and test_kills.py, in a process of its own.

    python resume_run.py OUTPUT_DIR ENGINE (fresh|again|resume) WHERE NUMBER

ENGINE is "transformers", "vllm", "curriculum": transformers, with prompts that are drawn by their rewards, or "queue":
one with weights of its own, which samples up to two batches while the trainer learns.
WHERE is "generation", "accumulation", "logging" (half a record is written), "saving" or "renaming": the process kills
itself there, once step NUMBER is reached, with a signal that nothing can catch. Or "operation in a save": before the
NUMBER-th time that a save asks the file system to change something. Or "wait": after its first save, it waits to be
killed. Or "full": from step NUMBER on, the disk takes no file of more than 100 kB while a checkpoint is saved. Or
"nowhere".
"""

import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fused_grpo.bench.generate_ahead import Beside
from fused_grpo.trainer import GRPOConfig, GRPOTrainer, transformers_face
from fused_grpo.trainer.checkpoint import checkpoint
from fused_grpo.trainer.logging import run_log
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate")


def model() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Qwen2Config(
        vocab_size=14,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        attention_dropout=0.1,  # draws from the global generator in every step
        **shape,
    )
    return Qwen2ForCausalLM(config)


def reward(completions: list[str], **columns: Any) -> list[float]:
    """Differs between completions, and takes what one of them logs."""
    columns["log_metric"]("digits", float(sum(text.count("1") for text in completions)))
    return [len(set(text)) + 0.1 * len(text) for text in completions]


def reward_of_some(completions: list[str], prompts: list[str], **columns: Any) -> list[float]:
    """The same for half of the prompts; 0 for the others, so that a curriculum has something to tell apart."""
    rewards = reward(completions, **columns)
    return [value * (prompt < "3") for value, prompt in zip(rewards, prompts, strict=True)]


def die_when(trainer: GRPOTrainer, where: str, step: int) -> None:
    def dying(function: Any, *, on_call: int = 1, after: Any = lambda *_: None) -> Any:
        calls = []

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(None) if trainer.step >= step else None
            if len(calls) == on_call:
                after(*arguments)
                os.write(1, f"killed in {where}\n".encode())
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    match where:
        case "generation":
            trainer.engine.generate = dying(trainer.engine.generate)
        case "logging":
            run_log._append = dying(run_log._append, after=half_a_record)
        case "accumulation":
            trainer.learner._backward = dying(trainer.learner._backward, on_call=2)
        case "saving":
            checkpoint.write_manifest = dying(checkpoint.write_manifest)
        case "renaming":
            checkpoint.refuse_foreign = dying(checkpoint.refuse_foreign)  # just before the renames
        case "full":
            trainer.save_checkpoint = limited(trainer, trainer.save_checkpoint, step)


def half_a_record(path: Path, records: Any) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(b'{"step": 1, "lo')


def limited(trainer: GRPOTrainer, save: Any, step: int) -> Any:
    def call() -> Any:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if trainer.step >= step else hard, hard))
            return save()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))

    return call


class Saves:
    """Says when a save begins and ends."""

    def __init__(self, *, then_wait: bool) -> None:
        self.running, self.then_wait, self.save = False, then_wait, transformers_face.save_checkpoint
        transformers_face.save_checkpoint = self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.running = True
        os.write(1, b"a save begins\n")
        result = self.save(*arguments, **options)
        os.write(1, b"a save is done\n")
        self.running = False
        if self.then_wait:
            time.sleep(60)
        return result


def die_before_operation(number: int, output_dir: str, *, wanted: Any) -> None:
    """Python says what it is about to ask of the system, but for fsync."""
    seen: list[str] = []
    fsync = os.fsync

    def observe(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in CHANGES or (event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        # Names without a path are of files in a directory that is open: one that is being removed.
        if not changes or not wanted() or (str(arguments[0]).startswith("/") and output_dir not in str(arguments[0])):
            return
        seen.append(f"{event} {arguments[0]}")
        if len(seen) == number:
            os.write(1, f"killed before {seen[-1]}\n".encode())
            os.kill(os.getpid(), signal.SIGKILL)

    def observed_fsync(descriptor: int) -> None:
        observe("os.rename", (f"fsync of {descriptor}",))
        fsync(descriptor)

    os.fsync = observed_fsync
    sys.addaudithook(observe)


ROWS = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]
BUFFER = {"steps_per_generation": 4, "num_iterations": 2}  # of four steps: two checkpoints are in the middle of one
QUEUE = {"steps_per_generation": 2, "generate_ahead": 2, "logprob_mismatch": "warn"}


def make_trainer(
    output_dir: str, engine: str = "transformers", start: str = "fresh", rows: list[Any] = ROWS
) -> GRPOTrainer:
    args = GRPOConfig(
        output_dir,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        num_generations=4,
        max_completion_length=6,
        max_steps=10,
        learning_rate=1e-3,
        beta=0.05,
        warmup_steps=3,
        save_steps=3,
        use_vllm=engine == "vllm",
        vllm_max_model_length=64,
        save_total_limit=2,
        resume_from_checkpoint=start == "resume",
        overwrite_output_dir=start == "fresh",
        curriculum="unequal_rewards" if engine == "curriculum" else "off",
        **(QUEUE if engine == "queue" else BUFFER),
    )
    scores, tokenizer = reward_of_some if engine == "curriculum" else reward, build_tokenizer()
    policy = model()
    beside = Beside(policy, tokenizer) if engine == "queue" else None
    options: dict[str, Any] = {"eval_dataset": rows[:4], "processing_class": tokenizer, "rollout_engine": beside}
    return GRPOTrainer(policy, scores, args, rows, **options)


def main(output_dir: str, engine: str, start: str, where: str, number: str) -> None:
    saves = Saves(then_wait=where == "wait")
    if where == "operation in a save":
        die_before_operation(int(number), output_dir, wanted=lambda: saves.running)
    trainer = make_trainer(output_dir, engine, start)
    die_when(trainer, where, int(number))
    trainer.train()
    trainer.save_checkpoint()


if __name__ == "__main__":
    main(*sys.argv[1:])
