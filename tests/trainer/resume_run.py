"""A short run that can be told where to die. Run by test_resume.py, in a process of its own.

    python resume_run.py OUTPUT_DIR ENGINE (fresh|resume) WHERE STEP

WHERE is "accumulation", "saving", "renaming" or "nowhere"; the process kills itself there, once step STEP is reached,
with a signal that nothing can catch.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fused_grpo.trainer import GRPOConfig, GRPOTrainer, checkpoint


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *"0123456789+="])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


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


def die_when(trainer: GRPOTrainer, where: str, step: int) -> None:
    def dying(function: Any, *, on_call: int = 1) -> Any:
        calls = []

        def call(*arguments: Any, **options: Any) -> Any:
            calls.append(None) if trainer.step >= step else None
            if len(calls) == on_call:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    match where:
        case "accumulation":
            trainer.learner._backward = dying(trainer.learner._backward, on_call=2)
        case "saving":
            checkpoint.seal = dying(checkpoint.seal)
        case "renaming":
            checkpoint._swap_in = dying(checkpoint._swap_in)


def main(output_dir: str, engine: str, how: str, where: str, step: str) -> None:
    args = GRPOConfig(
        output_dir,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
        num_iterations=2,
        num_generations=4,
        max_completion_length=6,
        max_steps=10,
        learning_rate=1e-3,
        beta=0.05,
        warmup_steps=3,
        # A buffer of four steps: this checkpoint and the next are in the middle of one.
        save_steps=3,
        use_vllm=engine == "vllm",
        vllm_max_model_length=64,
        resume_from_checkpoint=how == "resume",
    )
    rows = [{"prompt": f"{a}+{b}="} for a in range(6) for b in range(6)]
    trainer = GRPOTrainer(model(), reward, args, rows, eval_dataset=rows[:4], processing_class=tokenizer())
    die_when(trainer, where, int(step))
    trainer.train()
    trainer.save_checkpoint()


if __name__ == "__main__":
    main(*sys.argv[1:])
