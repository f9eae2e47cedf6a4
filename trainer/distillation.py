"""`Teacher`: the model that the policy is distilled from, on micro-batches of the policy's own completions.

    hidden = teacher's backbone(micro-batch)     # [N, D of the teacher]; no gradients, no logits
    loss += coef * sum(weight * divergence)      # in the pass of the loss, with its weights (docs/divergence.md)

A teacher is a model of its own, or "self": the reference model. It gets the rows that the policy gets, so both have to
keep the sequences of a row apart, and it shares the policy's temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from fused_grpo.distillation import Distillation
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.distributed.sharding import reshard
from fused_grpo.trainer.policy import PolicyLoss
from fused_grpo.trainer.types import MicroBatch


class Teacher:
    """Hidden states and head of the teacher for a micro-batch, as `fused_linear_grpo_loss` takes them.

    Args:
        policy: lends the teacher, a `PolicyLoss` that is not trained while it is lent.
        args: kind and weight of the divergence.
        vocab_size: the rows of the policy's head; a teacher may have further ones, for padding, which take no part.
        fingerprint: of the teacher's weights; a resumed run must have the same.
    """

    def __init__(
        self,
        policy: Callable[[], AbstractContextManager[PolicyLoss]],
        args: GRPOConfig,
        *,
        vocab_size: int,
        fingerprint: str,
    ) -> None:
        self.policy, self.vocab_size = policy, vocab_size
        self.options: dict[str, Any] = {
            "coef": args.distillation_coef,
            "kind": args.distillation_kind,
            "beta": args.distillation_beta,
        }
        self.identity = {**self.options, "model": fingerprint}

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Distillation:
        with self.policy() as policy:
            was_training = policy.training
            policy.eval()
            try:
                hidden, weight, of_head = policy(batch, "head_inputs")
            finally:
                policy.train(was_training)
            bias = None if of_head["bias"] is None else of_head["bias"][: self.vocab_size]
            weight = weight[: self.vocab_size]
            if isinstance(policy, FSDPModule):  # the gathered head is freed with the rest
                weight, bias = weight.clone(), None if bias is None else bias.clone()
                reshard(policy)
        transform = {name: of_head[name] for name in ("logit_scale", "softcap")}
        return Distillation(hidden, weight, **self.options, bias=bias, **transform)
