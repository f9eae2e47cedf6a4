"""The teacher of a distillation: loaded, compared with the policy's vocabulary, and recognised when a run resumes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoTokenizer, PreTrainedModel

from fused_grpo.errors import InputError, UnsupportedError, WrongTypeError
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.models.adapters import base_model
from fused_grpo.trainer.models.loading import load_on_rank
from fused_grpo.trainer.models.virtual_tokens import is_prompt_tuned

SELF = "self"  # the reference model
FINGERPRINT_VALUES = 256  # of each parameter

_OF_TOKENIZER = ("trust_remote_code", "revision")  # options of `from_pretrained`


def load_teacher(
    teacher: str | Path | PreTrainedModel | None, args: GRPOConfig, accelerator: Accelerator, tokenizer: Any
) -> Any:
    """The teacher, not trained, as `model_for` loads the policy; "self" and None as they are.

    Raises:
        InputError: an id is another token for the tokenizer that lies beside the teacher than for the policy's.
        WrongTypeError: neither a path, a hub id nor a module.
    """
    if teacher is None or teacher == SELF:
        return teacher
    if not isinstance(teacher, str | Path | nn.Module):
        raise WrongTypeError(f"got a {type(teacher).__name__} as teacher_model, want a path, a hub id or a model")
    options = {"trust_remote_code": args.runs_remote_code, **(args.teacher_model_init_kwargs or {})}
    if not isinstance(teacher, nn.Module):
        _check_tokens(teacher, tokenizer, **{name: options[name] for name in _OF_TOKENIZER if name in options})
    loaded = load_on_rank(teacher, accelerator, given="teacher_model_init_kwargs", **options)
    return loaded.requires_grad_(False).eval()


def _check_tokens(teacher: str | Path, tokenizer: Any, **options: Any) -> None:
    try:
        theirs = AutoTokenizer.from_pretrained(str(teacher), **options).get_vocab()
    except (OSError, ValueError):  # no tokenizer beside the weights; where they are missing too, loading them says so
        return
    token_of = {index: token for token, index in theirs.items()}
    other = [token for token, index in tokenizer.get_vocab().items() if token_of.get(index, token) != token]
    if other:
        index = tokenizer.get_vocab()[other[0]]
        raise InputError(
            f"got the teacher_model {teacher}, in whose tokenizer {len(other)} tokens of the policy's have other ids "
            f"({index} is {token_of[index]!r} and not {other[0]!r}), want the same tokens; fix: a teacher of the "
            "policy's family"
        )


def check_teacher_model(teacher: Any, policy: Any) -> None:
    """Check that the teacher can see the policy's tokens and has a logit for each.

    Raises:
        InputError: a smaller vocabulary, or the policy itself.
        UnsupportedError: virtual tokens, which are in the rows of one of the two.
    """
    for name, model in (("the policy", policy), ("the teacher", teacher)):
        if model != SELF and is_prompt_tuned(model):
            raise UnsupportedError(
                f"got a teacher_model, and {name} has virtual tokens, want rows with the same places for both; fix: "
                "LoRA instead of prompt tuning"
            )
    if teacher == SELF:
        return
    if base_model(teacher) is base_model(policy):
        raise InputError(
            "got the model that is trained as its teacher_model, too, want one that stays; fix: teacher_model='self' "
            "for the model as it is now, or load it a second time"
        )
    ours, theirs = (len(base_model(model).get_output_embeddings().weight) for model in (policy, teacher))
    if ours > theirs:
        raise InputError(
            f"got a teacher_model with a vocabulary of {theirs} and a policy with one of {ours}, want one that has all "
            "of the policy's tokens; fix: a teacher of the policy's family; where only rows of padding differ, pass "
            f"the policy as a loaded model after its resize_token_embeddings({theirs})"
        )


def fingerprint(model: PreTrainedModel) -> str:
    """A sha256 sum of the first values of each parameter: it differs between models and between checkpoints of one."""
    found = hashlib.sha256(type(base_model(model)).__name__.encode())
    for name, parameter in model.named_parameters():
        first = parameter.detach().flatten()[:FINGERPRINT_VALUES].cpu().contiguous()
        found.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        found.update(first.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
