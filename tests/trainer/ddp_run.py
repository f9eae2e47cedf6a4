"""A short run on however many processes it is started on; process 0 saves its parameters. Run by test_ddp.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.rollout import RolloutEngine
from fused_grpo.trainer.types import Rollouts

LETTERS = "0123456789+="


def tokenizer() -> PreTrainedTokenizerFast:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", *LETTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Split(Regex("."), "isolated"), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")


class EngineByPrompt(RolloutEngine):
    """Completions that depend on the prompt alone, so that it does not matter which process asks for them."""

    name, weight_version = "by prompt", 0

    def __init__(self, model) -> None:
        self.model = model

    def generate(self, prompt_ids, sampling) -> Rollouts:
        completions = []
        for ids in prompt_ids:
            generator = torch.Generator().manual_seed(hash(tuple(ids)) % 2**31)
            lengths = torch.randint(1, 9, (sampling.n,), generator=generator).tolist()
            completions += [torch.randint(2, 14, (length,), generator=generator).tolist() for length in lengths]
        pairs = [(list(prompt_ids[i // sampling.n]), ids) for i, ids in enumerate(completions)]
        return Rollouts(
            prompt_ids=[list(ids) for ids in prompt_ids],
            completion_ids=completions,
            sampling_logprobs=[self.logprobs(*pair) for pair in pairs],
            finish_reasons=["length"] * len(completions),
            num_generations=sampling.n,
            weight_version=self.weight_version,
        )

    @torch.no_grad()
    def logprobs(self, prompt, completion) -> list[float]:
        logits = self.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()

    def load_weights(self, named_weights, version) -> None:
        self.weight_version = version

    def close(self) -> None:
        pass


def main(out: Path, batch: int, accumulation: int, options: dict) -> None:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=14, num_key_value_heads=2, tie_word_embeddings=False, **shape))
    defaults = {"max_steps": 3, "num_generations": 4, "learning_rate": 1e-4, "scale_rewards": "batch"}
    args = GRPOConfig(
        str(out / "run"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
        **{**defaults, **options},
    )
    rows = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]
    trainer = GRPOTrainer(model, reward, args, rows, processing_class=tokenizer(), rollout_engine=EngineByPrompt(model))
    result = trainer.train()
    if trainer.accelerator.is_main_process:
        torch.save({"parameters": model.state_dict(), "metrics": result.metrics}, out / "result.pt")
    # Together, and in order: a process that leaves while another still talks to it may abort the other.
    trainer.accelerator.wait_for_everyone()
    trainer.accelerator.end_training()


def reward(prompts: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Differs within groups; with `reward_failure="drop"`, one prompt in nine costs its group."""
    if any(prompt.startswith("4") for prompt in prompts) and columns["trainer_state"].global_step > 0:
        raise ValueError("no fours any more")
    return [float(sum(ids) % 7) for ids in completion_ids]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
