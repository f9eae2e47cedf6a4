"""Make the demo's base model, which adds and rarely carries: `python scripts/make_base_model.py`.

It writes trainer/recipes/base_model.safetensors, in about a minute. A transformer with 134 thousand parameters is
trained supervised on the train split: first on right answers, until it carries, then on answers of which four in five
ignore every carry. So the model knows both and usually writes the wrong one: a reward has something to teach, and the
right answers are sampled often enough to be found.

On another CPU other roundings make other weights of the same kind. That is why the file is committed: every machine
starts from the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2ForCausalLM

from fused_grpo.trainer.recipes import arithmetic
from fused_grpo.trainer.recipes.arithmetic import Row

BATCH, ANSWER_TOKENS = 256, 4  # three digits at most, and the end


class Stage(NamedTuple):
    batches: int
    learning_rate: float
    carrying: float  # the share of the sums with a carry; where it is large from the start, nothing is learned for long
    right: float  # the share of right answers; the others are without carries


STAGES = (Stage(600, 4e-3, carrying=0.2, right=1.0), Stage(300, 2e-3, carrying=0.6, right=0.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    seed = parser.parse_args().seed
    torch.set_num_threads(1)
    save(train(arithmetic.build_splits().train, seed=seed), seed, arithmetic.BASE_MODEL)


def train(rows: list[Row], *, seed: int, stages: Sequence[Stage] = STAGES) -> PreTrainedModel:
    """The model of this seed, trained on these rows."""
    tokenizer, generator = arithmetic.build_tokenizer(), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(arithmetic.build_model_config(tokenizer))
    prompts, right = encode(tokenizer, rows)
    _, wrong = encode(tokenizer, [{**row, "answer": without_carries(row)} for row in rows])
    has_carry = (right != wrong).any(1)
    for stage in stages:
        share = torch.where(has_carry, stage.carrying / has_carry.sum(), (1 - stage.carrying) / (~has_carry).sum())
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
        for batch in range(stage.batches):
            # It rises for 20 batches, and falls in the second half.
            factor = min(1.0, (batch + 1) / 20, 2 * (1 - batch / stage.batches))
            optimizer.param_groups[0]["lr"] = stage.learning_rate * factor
            drawn = torch.multinomial(share, BATCH, replacement=True, generator=generator)
            is_right = torch.rand(BATCH, 1, generator=generator) < stage.right
            answers = torch.where(is_right, right[drawn], wrong[drawn])
            logits = model(torch.cat([prompts[drawn], answers], 1), use_cache=False).logits
            predicted = logits[:, prompts.shape[1] - 1 : -1].flatten(0, 1)
            loss = cross_entropy(predicted, answers.flatten(), ignore_index=tokenizer.pad_token_id)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if (batch + 1) % 100 == 0:
                print(f"{stage.right:.0%} right, batch {batch + 1}: loss {loss.item():.3f}", flush=True)
    return model


def without_carries(row: Row) -> str:
    """Each column added alone: "58+67=" -> "51"."""
    first, second = row["prompt"].rstrip("=").split("+")
    return "".join(str((int(a) + int(b)) % 10) for a, b in zip(first[::-1], second[::-1], strict=True))


def encode(tokenizer: PreTrainedTokenizerFast, rows: list[Row]) -> tuple[Tensor, Tensor]:
    """Prompts [n, 6], and answers with the end-of-sequence token, padded to [n, ANSWER_TOKENS]."""
    prompts = tokenizer([row["prompt"] for row in rows])
    ended = [row["answer"] + tokenizer.eos_token for row in rows]
    answers = tokenizer(ended, padding="max_length", max_length=ANSWER_TOKENS)
    return torch.tensor(prompts["input_ids"]), torch.tensor(answers["input_ids"])


def save(model: PreTrainedModel, seed: int, path: Path) -> None:
    """Write the weights in fp16 with their origin as metadata, and print the file's sha256."""
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    save_file(weights, path, metadata={"made_by": f"scripts/make_base_model.py --seed {seed}"})
    print(f"{path}: {path.stat().st_size} bytes, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
