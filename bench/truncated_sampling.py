"""The ratios of truncated sampling: `python -m fused_grpo.bench.truncated_sampling`.

It writes bench/results/<machine>/truncated-sampling-<date>.json, whose figures docs/engines.md quotes. A model with
random weights and 1000 tokens makes three steps on policy, in fp32, sampled by transformers and by vLLM in process.
Every ratio of the trainer's log-prob to the sampler's should be 1.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from fused_grpo.bench.raw_file import raw_file, write
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.recipes import arithmetic

VOCABULARY = 1000
SAMPLING: tuple[Mapping[str, Any], ...] = (
    {},
    {"top_p": 0.8},
    {"top_k": 50},
    {"min_p": 0.05},
    {"top_p": 0.8, "top_k": 50, "min_p": 0.05},
)


def main() -> None:
    path, entries = raw_file("truncated-sampling", "python -m fused_grpo.bench.truncated_sampling")
    runs = [
        measured(engine, support, options)
        for options in SAMPLING
        for engine in ("transformers", "vllm")
        for support in ("require", "off")
    ]
    write(path, entries | {"runs": runs})
    print(path)


def measured(engine: str, support: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Ratios of one run."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    ends: dict[str, Any] = {"eos_token_id": 1, "pad_token_id": 0, "initializer_range": 0.15}
    model: Any = Qwen2ForCausalLM(Qwen2Config(vocab_size=VOCABULARY, **shape, **ends))
    tokenizer, ratios = arithmetic.build_tokenizer(), list[Tensor]()
    with tempfile.TemporaryDirectory() as folder:
        sizes: dict[str, Any] = {"per_device_train_batch_size": 64, "max_completion_length": 16, "max_steps": 3}
        engine_options: dict[str, Any] = {"sampling_support": support, "use_vllm": engine == "vllm", "bf16": False}
        args = GRPOConfig(folder, **sizes, **engine_options, **options, learning_rate=1e-3, save_strategy="no")
        rollout_engine = TransformersEngine(model, tokenizer) if engine == "transformers" else None
        rows = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
        trainer = GRPOTrainer(model, _reward, args, rows, processing_class=tokenizer, rollout_engine=rollout_engine)
        _record(trainer, ratios)
        metrics = trainer.train().metrics
    ratio = torch.cat(ratios).double()
    row = {"engine": engine, "sampling_support": support, **options, "tokens": len(ratio), "mean": ratio.mean().item()}
    row |= {"outside [0.9, 1.1]": ((ratio - 1).abs() > 0.1).double().mean().item()}
    row |= {"largest |log ratio|": ratio.log().abs().max().item(), "kept": metrics.get("sampling/kept_tokens/mean")}
    print(row, flush=True)
    return row


def _record(trainer: Any, ratios: list[Tensor]) -> None:
    """Add the ratios of each step to `ratios`."""
    backward = trainer.learner._backward

    def recording(part: Any, options: Any, *, last: bool) -> Any:
        output = backward(part, options, last=last)
        ratios.append((output.logprobs - part.sampling_logprobs).exp())
        return output

    trainer.learner._backward = recording


def _reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


if __name__ == "__main__":
    main()
