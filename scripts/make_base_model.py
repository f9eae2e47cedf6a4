"""Make the base models of the built-in tasks: `python scripts/make_base_model.py [arithmetic | calculator]`.

It writes a file into trainer/recipes/, in a minute or two. A transformer with 134 thousand parameters is trained
supervised on the train split: first on right answers, until it knows how, then mostly on wrong ones. So the model knows
both and usually writes the wrong one: a reward has something to teach, and what is right is sampled often enough to be
found.

    arithmetic    wrong: a sum whose carries are all ignored
    calculator    wrong: the product of other numbers, without a call of the tool

On another CPU other roundings make other weights of the same kind. That is why the files are committed: every machine
starts from the same weights.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen2ForCausalLM

from fused_grpo.trainer.recipes import arithmetic, calculator
from fused_grpo.trainer.recipes.arithmetic import Row

BATCH, ANSWER_TOKENS = 256, 4  # three digits at most, and the end
IGNORED = -100  # a label
Conversation = tuple[list[int], list[int], list[int], list[int]]


class Stage(NamedTuple):
    batches: int
    learning_rate: float
    right: float  # the share of right answers
    carrying: float = 0.0  # the share of the sums with a carry; where it is large from the start, little is learned


STAGES = (Stage(600, 4e-3, right=1.0, carrying=0.2), Stage(300, 2e-3, right=0.2, carrying=0.6))
CALCULATOR_STAGES = (Stage(500, 4e-3, right=1.0), Stage(200, 1e-3, right=0.15))
Draw = Callable[[Stage, torch.Generator], tuple[Tensor, Tensor]]  # token ids [BATCH, T], and labels


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", nargs="?", choices=("arithmetic", "calculator"), default="arithmetic")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arguments = f"--seed {options.seed}"
    if options.task == "arithmetic":
        save(train(arithmetic.build_splits().train, seed=options.seed), arguments, arithmetic.BASE_MODEL)
    else:
        made = train_calculator(calculator.build_splits()[0], seed=options.seed)
        save(made, f"calculator {arguments}", calculator.BASE_MODEL)


def train(rows: list[Row], *, seed: int, stages: Sequence[Stage] = STAGES) -> PreTrainedModel:
    """The model of this seed that adds, trained on these rows."""
    tokenizer = arithmetic.build_tokenizer()
    prompts, right = encode(tokenizer, rows)
    _, wrong = encode(tokenizer, [{**row, "answer": without_carries(row)} for row in rows])
    has_carry = (right != wrong).any(1)

    def draw(stage: Stage, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        share = torch.where(has_carry, stage.carrying / has_carry.sum(), (1 - stage.carrying) / (~has_carry).sum())
        drawn = torch.multinomial(share, BATCH, replacement=True, generator=generator)
        is_right = torch.rand(BATCH, 1, generator=generator) < stage.right
        ids = torch.cat([prompts[drawn], torch.where(is_right, right[drawn], wrong[drawn])], 1)
        labels = ids.masked_fill(ids == tokenizer.pad_token_id, IGNORED)
        labels[:, : prompts.shape[1]] = IGNORED
        return ids, labels

    return fitted(tokenizer, draw, seed=seed, stages=stages)


def train_calculator(
    rows: list[dict[str, Any]], *, seed: int, stages: Sequence[Stage] = CALCULATOR_STAGES
) -> PreTrainedModel:
    """The model of this seed that calls a calculator, trained on these rows."""
    tokenizer = calculator.build_tokenizer()
    conversations = encode_calls(tokenizer, rows)

    def draw(stage: Stage, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(len(rows), (2, BATCH), generator=generator).tolist()
        is_right = (torch.rand(BATCH, generator=generator) < stage.right).tolist()
        said = [
            labelled(conversations[row], None if right else conversations[other][-1])
            for row, other, right in zip(*drawn, is_right, strict=True)
        ]
        length = max(len(ids) for ids, _ in said)
        ids, labels = (
            torch.tensor([one[part] + [filler] * (length - len(one[part])) for one in said])
            for part, filler in ((0, tokenizer.pad_token_id), (1, IGNORED))
        )
        return ids, labels

    return fitted(tokenizer, draw, seed=seed, stages=stages)


def fitted(tokenizer: PreTrainedTokenizerFast, draw: Draw, *, seed: int, stages: Sequence[Stage]) -> PreTrainedModel:
    """A model of this seed, trained on what `draw` returns."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(arithmetic.build_model_config(tokenizer))
    for stage in stages:
        optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
        for batch in range(stage.batches):
            # It rises for 20 batches, and falls in the second half.
            factor = min(1.0, (batch + 1) / 20, 2 * (1 - batch / stage.batches))
            optimizer.param_groups[0]["lr"] = stage.learning_rate * factor
            ids, labels = draw(stage, generator)
            logits = model(ids, use_cache=False).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
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


def encode_calls(tokenizer: PreTrainedTokenizerFast, rows: list[dict[str, Any]]) -> list[Conversation]:
    """Token ids of (the prompt, a call, what the tool says, the answer) of each row."""
    begin, name, between, end, close = calculator.WORDS
    factors = [row["prompt"][0]["content"].split("*") for row in rows]
    answers = [row["answer"] for row in rows]
    texts = (
        [f"<|user|>{a}*{b}<|end|><|assistant|>" for a, b in factors],
        [f"{begin}{name}{a}{between}{b}{end}{close}<|end|>" for a, b in factors],
        [f"<|tool|>{answer}<|end|><|assistant|>" for answer in answers],
        [f"{answer}<|end|>" for answer in answers],
    )
    return list(zip(*(tokenizer(part)["input_ids"] for part in texts), strict=True))


def labelled(conversation: Conversation, guess: list[int] | None) -> tuple[list[int], list[int]]:
    """The token ids of a conversation, or of its prompt and a guess, and the labels of the model's own turns."""
    prompt, call, heard, answer = conversation
    parts = [(prompt, guess)] if guess is not None else [(prompt, call), (heard, answer)]
    ids = [token for read, said in parts for token in (*read, *said)]
    return ids, [label for read, said in parts for label in (*[IGNORED] * len(read), *said)]


def save(model: PreTrainedModel, options: str, path: Path) -> None:
    """Write the weights in fp16 with their origin as metadata, and print the file's sha256."""
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    save_file(weights, path, metadata={"made_by": f"scripts/make_base_model.py {options}"})
    print(f"{path}: {path.stat().st_size} bytes, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}")


if __name__ == "__main__":
    main()
