"""TRL's `GRPOTrainer._compute_loss` on tensors of our choice, the configs and batches to try, and a head for both.

This file does not import TRL: the caller passes the trainer's class. Its method runs unchanged, on a stand-in for the
trainer with the attributes that it reads, and with a head on hidden states as the model, so both sides have the leaves
`hidden` [B, T, D] and `weight` [V, D].
"""

from __future__ import annotations

from collections import defaultdict
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear

from fused_grpo import GRPOLossConfig
from fused_grpo.config import CLIPPED

B, T, D, V = 4, 7, 6, 11
LENGTHS = [7, 5, 4, 6]
PROMPT_LENGTH = 2
SEED = 153  # of those whose numbers cross every bound and do not nearly cancel

# Bounds so near to 1 that every one of them is crossed, and constants that fp32 holds exactly: TRL puts the
# temperatures into an fp32 tensor, whatever the dtype of the rest.
BASE = {"epsilon": 0.1, "epsilon_high": 0.12, "sampling_correction": None, "max_completion_length": 9}
BASE |= {"sapo_temperature_pos": 0.75, "sapo_temperature_neg": 1.25}
RHO = {"sampling_clip_min": 0.6, "sampling_clip_max": 1.5}
# The option, the config's changes, what else is in the batch.
OPTIONS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing": ({}, set()),
    "one epsilon": ({"epsilon": 0.15, "epsilon_high": None}, set()),
    "delta": ({"delta": 1.2}, set()),
    "kl": ({"beta": 0.3}, set()),
    "kl without bias correction": ({"beta": 0.3, "use_bias_correction_kl": False}, set()),
    "token_truncate": ({"sampling_correction": "token_truncate", **RHO}, {"sampling"}),
    "token_mask": ({"sampling_correction": "token_mask", **RHO}, {"sampling"}),
    "sequence_truncate": ({"sampling_correction": "sequence_truncate", **RHO}, {"sampling"}),
    "sequence_mask": ({"sampling_correction": "sequence_mask", **RHO}, {"sampling"}),
    "token_truncate from above": ({"sampling_correction": "token_truncate", "sampling_clip_max": 1.2}, {"sampling"}),
    "tools": ({}, {"tools"}),
    "off-policy mask": ({"off_policy_mask_threshold": 0.1}, set()),
    "off-policy mask by the sampler": ({"off_policy_mask_threshold": 0.2}, {"sampling"}),
    "high entropy": ({"top_entropy_quantile": 0.63}, set()),
    "entropy bonus": ({"entropy_coef": 0.1}, set()),
    "high entropy, entropy bonus": ({"top_entropy_quantile": 0.63, "entropy_coef": 0.1}, set()),
    "truncated": ({}, {"truncated"}),
    "advantages of tokens": ({}, {"advantages of tokens"}),
    "on policy": ({}, {"on policy"}),
    "on policy, token_truncate": ({"sampling_correction": "token_truncate", **RHO}, {"on policy", "sampling"}),
    "all for tokens": (
        {"beta": 0.3, "off_policy_mask_threshold": 0.2, "top_entropy_quantile": 0.63, "entropy_coef": 0.1}
        | {"sampling_correction": "token_mask", **RHO},
        {"sampling", "tools", "truncated", "advantages of tokens"},
    ),
    "all for sequences": (
        {"beta": 0.3, "off_policy_mask_threshold": 0.2, "top_entropy_quantile": 0.63, "entropy_coef": 0.1}
        | {"sampling_correction": "sequence_truncate", **RHO},
        {"sampling", "tools", "truncated"},
    ),
}


def goes_with(loss_type: str, option: str) -> bool:
    changes = OPTIONS[option][0]
    is_per_sequence = str(changes.get("sampling_correction")).startswith("sequence")
    if loss_type in ("sapo", "vespo"):
        return not ({"epsilon", "delta"} & changes.keys() or (is_per_sequence and loss_type == "vespo"))
    return loss_type in CLIPPED or "delta" not in changes


def config_of(loss_type: str, level: str, option: str) -> GRPOLossConfig:
    values = {**BASE, "loss_type": loss_type, "importance_sampling_level": level}
    if loss_type == "cispo":  # it caps the ratio itself
        values["epsilon_high"] = 1.1
    changes = OPTIONS[option][0]
    return GRPOLossConfig(**{**values, **changes, "epsilon_high": changes.get("epsilon_high", values["epsilon_high"])})


class Batch(NamedTuple):
    """What both sides are given. `completion_mask` and `tool_mask` are apart, as TRL has them."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    completion_mask: Tensor
    tool_mask: Tensor | None
    advantages: Tensor
    old: Tensor | None
    ref: Tensor
    sampling: Tensor | None

    @property
    def mask(self) -> Tensor:
        return self.completion_mask if self.tool_mask is None else self.completion_mask * self.tool_mask

    def part(self, rows: slice) -> Batch:
        """Some of the sequences, with leaves of their own."""
        parts = {name: None if x is None else x.detach()[rows] for name, x in self._asdict().items()}
        parts |= {"hidden": parts["hidden"].clone().requires_grad_(), "weight": self.weight}
        return Batch(**parts)


def make_batch(option: str = "nothing", dtype: torch.dtype = torch.float64) -> Batch:
    """Sequences 0 and 2 have become likelier since they were sampled, 1 and 3 less likely; 1 and 2 were bad."""
    names, generator = OPTIONS[option][1], torch.Generator().manual_seed(SEED)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def near(values: Tensor, by_sequence: list[float]) -> Tensor:
        return values + torch.tensor(by_sequence, dtype=torch.float64)[:, None] + 0.25 * normal(B, T)

    hidden, weight, targets = normal(B, T, D), normal(V, D), torch.randint(0, V, (B, T), generator=generator)
    current = head(hidden, weight, targets)[0]
    old = near(current, [-0.2, 0.25, -0.3, 0.2])
    ref, sampling = near(old, [0.0] * B), near(old, [-0.15, -0.2, 0.7, 0.0])
    sampling[0, 3] = torch.nan  # no log-prob of the sampler
    mask = (torch.arange(T) < torch.tensor(LENGTHS)[:, None]).long()
    if "truncated" in names:
        mask[3] = 0
    tools = torch.ones_like(mask)
    tools[0, 2:4], tools[1, 1:] = 0, 0  # one token is left of sequence 1
    advantages = torch.tensor([1.5, -0.6, -0.3, 1.1], dtype=torch.float64)
    if "advantages of tokens" in names:
        advantages = advantages[:, None] + normal(B, T)
        advantages[:, 4] = 0.0
    old, sampling = None if "on policy" in names else old, sampling if "sampling" in names else None
    values = [None if x is None else x.to(dtype) for x in (hidden, weight, advantages, old, ref, sampling)]
    hidden, weight, *rest = values
    tool_mask = tools if "tools" in names else None
    return Batch(hidden.requires_grad_(), weight.requires_grad_(), targets, mask, tool_mask, *rest)


def head(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(log-probs, entropies), [B, T] each."""
    every = linear(hidden, weight).log_softmax(-1)
    return every.gather(-1, targets[..., None])[..., 0], -(every.exp() * every).sum(-1)


class Result(NamedTuple):
    loss: Tensor
    hidden: Tensor
    weight: Tensor
    metrics: dict[str, float]


def differentiated(loss: Tensor, batch: Batch, metrics: dict[str, Any]) -> Result:
    gradients = torch.autograd.grad(loss, (batch.hidden, batch.weight))
    return Result(loss.detach(), *gradients, {name: float(value) for name, value in metrics.items()})


def stand_in(trainer_class: type, config: GRPOLossConfig, accumulation_steps: int) -> SimpleNamespace:
    """All that `_compute_loss` reads of its trainer. The parts of the loss that are methods are TRL's."""
    args = {name: getattr(config, name) for name in vars(config) if name.startswith(("sapo", "vespo"))}
    args |= {"delta": config.delta, "use_bias_correction_kl": config.use_bias_correction_kl}
    names = ("beta", "loss_type", "importance_sampling_level", "top_entropy_quantile", "off_policy_mask_threshold")
    trainer = SimpleNamespace(
        **{name: getattr(config, name) for name in (*names, "entropy_coef", "max_completion_length")},
        args=SimpleNamespace(**args, steps_per_generation=accumulation_steps),
        epsilon_low=config.epsilon,
        epsilon_high=config.epsilon if config.epsilon_high is None else config.epsilon_high,
        use_vllm=config.sampling_correction is not None,
        vllm_importance_sampling_correction=True,
        _entropy_bonus_enabled=config.entropy_coef != 0,
        use_adaptive_entropy=False,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=accumulation_steps,
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(
            num_processes=1,
            sync_gradients=True,
            gather=lambda x: x,
            reduce=lambda x, reduction: x,
            pad_across_processes=lambda x, dim, pad_index: x,
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=run_head,
        get_off_policy_mask=trainer_class.get_off_policy_mask,
        get_gamma_weights=trainer_class.get_gamma_weights,
    )
    trainer.get_high_entropy_mask = MethodType(trainer_class.get_high_entropy_mask, trainer)
    return trainer


def run_head(model: Any, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: int, **_: Any) -> tuple:
    assert attention_mask.shape == input_ids.shape == (len(model[0]), PROMPT_LENGTH + T)
    return *head(*model, input_ids[:, -logits_to_keep:]), None


def of_trl(
    trainer_class: type,
    batch: Batch,
    config: GRPOLossConfig,
    *,
    accumulation_steps: int = 1,
    num_tokens: int | None = None,
) -> Result:
    """Loss, gradients and metrics by TRL. `num_tokens` is of the whole step."""
    trainer = stand_in(trainer_class, config, accumulation_steps)
    prompt = torch.ones(len(batch.hidden), PROMPT_LENGTH, dtype=torch.int64)
    inputs = {"prompt_ids": prompt, "prompt_mask": prompt, "completion_ids": batch.targets}
    inputs |= {"completion_mask": batch.completion_mask, "advantages": batch.advantages}
    inputs |= {"ref_per_token_logps": batch.ref}
    inputs["num_items_in_batch"] = batch.mask.sum() if num_tokens is None else torch.tensor(num_tokens)
    if batch.tool_mask is not None:
        inputs["tool_mask"] = batch.tool_mask
    if batch.old is not None:
        inputs["old_per_token_logps"] = batch.old
    if batch.sampling is not None:
        inputs["sampling_per_token_logps"] = batch.sampling
    if config.sampling_correction is not None:
        inputs["importance_sampling_ratio"] = sampling_ratio(batch, config)
    loss = trainer_class._compute_loss(trainer, (batch.hidden, batch.weight), inputs)
    metrics = {name: value for name, (value,) in trainer._metrics["train"].items()}
    return differentiated(loss, batch, metrics)


def sampling_ratio(batch: Batch, config: GRPOLossConfig) -> Tensor:
    """(B, T) or (B, 1), as TRL's `_generate_and_score_completions` computes it where it generates."""
    old = head(batch.hidden, batch.weight, batch.targets)[0].detach() if batch.old is None else batch.old
    difference = torch.nan_to_num((old - batch.sampling) * batch.mask, nan=0.0)
    if config.sampling_correction.startswith("sequence"):
        difference = difference.sum(-1, keepdim=True)
    ratio = difference.exp()
    if config.sampling_correction.endswith("truncate"):
        return ratio.clamp(config.sampling_clip_min, config.sampling_clip_max)
    return ratio.masked_fill((ratio < config.sampling_clip_min) | (ratio > config.sampling_clip_max), 0.0)
