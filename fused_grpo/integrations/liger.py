"""Liger's fused GRPO loss: the class `LigerFusedLinearGRPOLoss` of liger-kernel 0.8.5, over `fused_linear_grpo_loss`.

The constructor, call, loss, metrics and gradients are Liger's; Liger itself is not imported. Some of Liger's arguments
are expressed by other arguments of the op:

**The sampler's ratio** rho multiplies the policy term of a token. Each of these terms is positively homogeneous in the
advantage A (sapo's temperature depends on its sign only), so rho * l(A) is l(rho * A) for rho >= 0.

For "vespo", rho is a factor of the sequence weight phi(w) instead: w is the product of the ratios of its tokens and of
all rho, also those on padding. With old log-probs, the op computes this from sampling log-probs whose sum differs from
the sum of the old ones by log rho. Without old log-probs, w is known beforehand, and phi(w) multiplies A like any rho.

**Without a reference** Liger compares the policy with itself: that KL and its gradient are 0, as with beta = 0.

**"luspo"** is the mean over [B, T] of l times the length of its sequence, without a mask: if l differs between tokens,
padding counts. At the sequence level and without a KL term, l is one number per sequence, which the op computes (the
sampler's ratio of tokens is then averaged over all T). The other cases use a few lines of torch over `linear_logprobs`.

**The metrics** are computed from the log-probs that the op returns. The op's own metrics are TRL's, whose KL does not
contain the ratio, and whose clip ratio is measured after delta.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fused_grpo._maths.factors import vespo_phi
from fused_grpo._maths.formulas import corrected_kl, kl_term, policy_term
from fused_grpo._maths.statistics import compute_dtype
from fused_grpo.config import CLIPPED, LARGEST, LEVELS, TRL_LOSS_TYPES, GRPOLossConfig, Level, LossType
from fused_grpo.errors import InputError
from fused_grpo.fused_loss import fused_linear_grpo_loss
from fused_grpo.head.checks import check_plan, check_tensors, is_number
from fused_grpo.integrations._peers import check_items, token_ids
from fused_grpo.logprobs import linear_logprobs

_BY_NUM_TOKENS = ("dapo", "cispo", "vespo")
_LOWEST, _HIGHEST = math.log(1e-8), 20.0


class _Tokens(NamedTuple):
    """The arguments of a call about its tokens besides their ids, [B, T] each, constants for autograd."""

    mask: Tensor  # bool
    advantages: Tensor  # [B, 1]
    old: Tensor | None
    ref: Tensor | None  # None where there is no KL
    rho: Tensor | None  # the sampler's ratio, [B, 1] or [B, T]

    def lengths(self) -> Tensor:
        """Unmasked tokens of each sequence, [B, 1]."""
        return self.mask.sum(1, keepdim=True)


class LigerFusedLinearGRPOLoss(nn.Module):
    """`liger_kernel.chunked_loss.LigerFusedLinearGRPOLoss`, without that package.

    Args:
        beta, epsilon_low, epsilon_high, loss_type, max_completion_length, importance_sampling_level,
            sapo_temperature_pos, sapo_temperature_neg, temperature, delta, use_bias_correction_kl, vespo_k_pos,
            vespo_lambda_pos, vespo_k_neg, vespo_lambda_neg: as in Liger; GRPOLossConfig documents them.
        use_ref_model: whether a call must have a reference.
        compiled, chunk_size: accepted without effect: nothing is compiled, and a byte budget sets the chunks.

    Raises:
        InputError: a value out of range. As in Liger, the first call finds most wrong combinations.
    """

    def __init__(
        self,
        beta: float = 0.04,
        compiled: bool = True,
        use_ref_model: bool = True,
        chunk_size: int = 1,
        epsilon_low: float = 0.2,
        epsilon_high: float = 0.2,
        loss_type: LossType = "dapo",
        max_completion_length: int | None = None,
        importance_sampling_level: Level = "token",
        sapo_temperature_pos: float = 1.0,
        sapo_temperature_neg: float = 1.05,
        temperature: float = 1.0,
        delta: float | None = None,
        use_bias_correction_kl: bool = False,
        vespo_k_pos: float = 2.0,
        vespo_lambda_pos: float = 3.0,
        vespo_k_neg: float = 3.0,
        vespo_lambda_neg: float = 2.0,
    ) -> None:
        super().__init__()
        if not isinstance(loss_type, str) or loss_type not in TRL_LOSS_TYPES:
            raise InputError(f"got loss_type={loss_type!r}, want one of Liger's: {TRL_LOSS_TYPES}")
        if not isinstance(importance_sampling_level, str) or importance_sampling_level not in LEVELS:
            raise InputError(f"got importance_sampling_level={importance_sampling_level!r}, want one of {LEVELS}")
        check_plan("auto", use_ref_model=use_ref_model, use_bias_correction_kl=use_bias_correction_kl)
        if not is_number(beta, -LARGEST, LARGEST):
            raise InputError(f"got beta={beta!r}, want a finite number")
        bounds = {"sapo_temperature_pos": sapo_temperature_pos, "sapo_temperature_neg": sapo_temperature_neg}
        for name, value in {**bounds, "delta": delta}.items():
            if value is not None and not (is_number(value, 0, LARGEST) and value):
                raise InputError(f"got {name}={value!r}, want a finite number > 0")
        self.beta, self.use_ref_model = beta, use_ref_model
        self.compiled, self.chunk_size = compiled, chunk_size
        self.epsilon_low, self.epsilon_high, self.delta = epsilon_low, epsilon_high, delta
        self.loss_type, self.max_completion_length = loss_type, max_completion_length
        self.importance_sampling_level = importance_sampling_level
        self.sapo_temperature_pos, self.sapo_temperature_neg = sapo_temperature_pos, sapo_temperature_neg
        self.temperature, self.use_bias_correction_kl = temperature, use_bias_correction_kl
        self.vespo_k_pos, self.vespo_lambda_pos = vespo_k_pos, vespo_lambda_pos
        self.vespo_k_neg, self.vespo_lambda_neg = vespo_k_neg, vespo_lambda_neg

    def forward(
        self,
        _input: Tensor,
        lin_weight: Tensor,
        selected_token_ids: Tensor,
        attention_mask: Tensor,
        advantages: Tensor,
        bias: Tensor | None = None,
        ref_per_token_logps: Tensor | None = None,
        old_per_token_logps: Tensor | None = None,
        ref_input: Tensor | None = None,
        ref_weight: Tensor | None = None,
        ref_bias: Tensor | None = None,
        vllm_is_ratio: Tensor | None = None,
        num_items_in_batch: float | Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The loss and its metrics.

        Args:
            _input: hidden states [B, T, D].
            lin_weight, bias: the head, [V, D] and [V]. No gradient is computed for tensors that require none.
            selected_token_ids: [B, T].
            attention_mask: [B, T], zeros and ones. Padding may have any values, except where it counts ("luspo").
            advantages: [B].
            ref_per_token_logps: [B, T], or the reference itself: ref_input [B, T, D'], ref_weight [V, D'], ref_bias.
            old_per_token_logps: [B, T]. None: on policy.
            vllm_is_ratio: the sampler's ratio, >= 0: [B], [B, 1] or [B, T].
            num_items_in_batch: tokens of the whole step over all processes, by which "dapo", "cispo" and "vespo"
                divide. None: of this call, over all processes.

        Returns:
            The loss, 0-d, and detached 0-d metrics: the mean KL (not with beta = 0), the share of clipped tokens.

        Raises:
            InputError: shapes or options that cannot be right, or no reference where one is required.
        """
        head = {"_input": _input, "lin_weight": lin_weight, "selected_token_ids": selected_token_ids}
        optional = {"old_per_token_logps": old_per_token_logps, "ref_per_token_logps": ref_per_token_logps}
        optional |= {"vllm_is_ratio": vllm_is_ratio, "ref_input": ref_input, "ref_weight": ref_weight}
        check_tensors(optional, **head, attention_mask=attention_mask, advantages=advantages)
        self._check_call(selected_token_ids, attention_mask, advantages, vllm_is_ratio)
        _check_per_token(selected_token_ids.shape, old_per_token_logps, ref_per_token_logps)
        mask, has_kl = attention_mask != 0, self.use_ref_model and self.beta != 0.0
        with_padding = self.loss_type == "luspo" and (has_kl or self.importance_sampling_level == "token")
        ids = token_ids("selected_token_ids", selected_token_ids)
        ids = ids if with_padding else ids.masked_fill(~mask, -100)
        ref = self._reference(ids, ref_per_token_logps, (ref_input, ref_weight, ref_bias))
        rho = vllm_is_ratio[:, None] if vllm_is_ratio is not None and vllm_is_ratio.ndim == 1 else vllm_is_ratio
        constants = (advantages[:, None], old_per_token_logps, ref, rho)
        tokens = _Tokens(mask, *(None if x is None else x.detach().to(compute_dtype(_input)) for x in constants))  # type: ignore[arg-type]
        options: dict[str, Any] = {"bias": bias, "temperature": self.temperature}
        config = self._config(tokens)
        if with_padding:
            logprobs = linear_logprobs(_input, lin_weight, ids, **options)
            return self._loss_with_padding(logprobs, tokens, config), self._metrics(logprobs.detach(), tokens)
        inputs = self._loss_inputs(tokens, num_items_in_batch, config)
        output = fused_linear_grpo_loss(_input, lin_weight, ids, **options, **inputs, entropy=False, config=config)
        return output.loss, self._metrics(output.logprobs, tokens)

    def _check_call(self, ids: Tensor, attention_mask: Tensor, advantages: Tensor, rho: Tensor | None) -> None:
        """Check what Liger asserts, and shapes that would broadcast."""
        if self.importance_sampling_level == "sequence" and self.loss_type in ("cispo", "sapo", "vespo"):
            raise InputError(
                f"got importance_sampling_level='sequence' with loss_type={self.loss_type!r}. "
                "Sequence-level importance sampling is not supported for it; fix: 'token'"
            )
        if self.loss_type in (*CLIPPED, "cispo") and not is_number(self.epsilon_high, 0, LARGEST):
            raise InputError(f"got epsilon_high={self.epsilon_high!r}, want a finite number >= 0")
        if attention_mask.shape != ids.shape or ids.ndim != 2:
            raise InputError(
                f"got selected_token_ids {tuple(ids.shape)} and attention_mask {tuple(attention_mask.shape)}, "
                "want [B, T] of both"
            )
        (B, T), shapes = ids.shape, ((len(ids),), (len(ids), 1), tuple(ids.shape))
        if advantages.shape != (B,):
            raise InputError(f"got advantages {tuple(advantages.shape)}, want [B] = ({B},), one per sequence")
        if rho is not None and tuple(rho.shape) not in shapes:
            raise InputError(f"got vllm_is_ratio {tuple(rho.shape)}, want [B], [B, 1] or [B, T] with B={B}, T={T}")

    def _reference(
        self, ids: Tensor, logprobs: Tensor | None, head: tuple[Tensor | None, Tensor | None, Tensor | None]
    ) -> Tensor | None:
        """The reference's log-probs, None where there is no KL."""
        hidden, weight, bias = head
        if not self.use_ref_model:
            return None
        if logprobs is not None and hidden is not None:
            warnings.warn("got ref_per_token_logps and ref_input. Using ref_per_token_logps.", stacklevel=5)
        if logprobs is not None:
            return None if self.beta == 0.0 else logprobs
        if hidden is None or weight is None:
            raise InputError(
                "got use_ref_model=True without a reference; "
                "fix: pass ref_per_token_logps, or ref_input and ref_weight, or use_ref_model=False"
            )
        if self.beta == 0.0:
            return None
        with torch.no_grad():
            return linear_logprobs(hidden, weight, ids, bias=bias, temperature=self.temperature)

    def _config(self, tokens: _Tokens) -> GRPOLossConfig:
        clipped = self.loss_type in CLIPPED
        return GRPOLossConfig(
            loss_type=self.loss_type,
            epsilon=self.epsilon_low if clipped else 0.0,
            epsilon_high=self.epsilon_high,
            delta=self.delta if clipped else None,
            beta=0.0 if tokens.ref is None else self.beta,
            use_bias_correction_kl=self.use_bias_correction_kl,
            importance_sampling_level=self.importance_sampling_level,
            sapo_temperature_pos=self.sapo_temperature_pos,
            sapo_temperature_neg=self.sapo_temperature_neg,
            vespo_k_pos=self.vespo_k_pos,
            vespo_lambda_pos=self.vespo_lambda_pos,
            vespo_k_neg=self.vespo_k_neg,
            vespo_lambda_neg=self.vespo_lambda_neg,
            sampling_correction="token_truncate",
            sampling_clip_max=None,
            max_completion_length=self.max_completion_length,
        )

    def _loss_inputs(self, tokens: _Tokens, num_items: float | Tensor | None, config: GRPOLossConfig) -> dict[str, Any]:
        """The arguments of `fused_linear_grpo_loss` that give Liger's loss."""
        advantages, sampling = self._with_ratio(tokens, config)
        return {
            "advantages": advantages.expand(tokens.mask.shape),
            "mask": tokens.mask,
            "old_logprobs": tokens.old,
            "ref_logprobs": tokens.ref,
            "sampling_logprobs": sampling,
            "num_tokens": _num_tokens(tokens.mask, num_items) if self.loss_type in _BY_NUM_TOKENS else None,
            # The clip ratio counts tokens with rho = 0, but no tokens without an advantage.
            "score": "needed" if tokens.rho is None else "all",
        }

    def _with_ratio(self, tokens: _Tokens, config: GRPOLossConfig) -> tuple[Tensor, Tensor | None]:
        """(advantages, sampling log-probs) with which the op's loss has the sampler's ratio in it.

        For rho = 2, an advantage of 0.5 becomes 1. For "vespo" and rho = 2 and 3 of two tokens, the sampling log-probs
        add up to log 6 less than the old ones.
        """
        advantages, rho = tokens.advantages, tokens.rho
        if rho is None:
            return advantages, None
        if self.loss_type != "vespo":
            return advantages * (rho.mean(1, keepdim=True) if self.loss_type == "luspo" else rho), None
        log_rho = rho.log().clamp(_LOWEST, _HIGHEST).sum(1, keepdim=True)
        if tokens.old is None:  # then log_rho is log w, but for its bounds
            return advantages * vespo_phi(log_rho.clamp(_LOWEST, _HIGHEST), advantages, config), None
        return advantages, tokens.old - _on_few_tokens(log_rho, tokens.mask)

    def _loss_with_padding(self, logprobs: Tensor, tokens: _Tokens, config: GRPOLossConfig) -> Tensor:
        """ "luspo" where padding counts: [B, T] log-probs to the loss."""
        change = self._log_ratio(logprobs, tokens)
        loss, *_ = policy_term(logprobs, change, tokens.advantages, config.token_terms)
        if tokens.rho is not None:
            loss = loss * tokens.rho
        if tokens.ref is not None:
            loss = loss + self.beta * self._kl(logprobs, change, tokens.ref, tokens.old)
        return (loss * tokens.lengths()).mean()

    def _log_ratio(self, logprobs: Tensor, tokens: _Tokens) -> Tensor:
        """log r of tokens [B, T] or of sequences [B, 1]."""
        change = logprobs - (logprobs.detach() if tokens.old is None else tokens.old)
        if self.importance_sampling_level == "sequence":
            change = torch.where(tokens.mask, change, 0.0).sum(1, keepdim=True) / tokens.lengths().clamp_min(1)
        return change

    def _kl(self, logprobs: Tensor, change: Tensor, ref: Tensor, old: Tensor | None) -> Tensor:
        """The estimate, times the ratio exp(change) with the correction."""
        q = ref - logprobs
        if not self.use_bias_correction_kl:
            return kl_term(q, "k3")
        q_old = ref - (logprobs.detach() if old is None else old)
        return corrected_kl(q, change, q + change if self.importance_sampling_level == "sequence" else q_old, "k3")

    def _metrics(self, logprobs: Tensor, tokens: _Tokens) -> tuple[Tensor, ...]:
        """The mean KL with its correction (not with beta = 0) and the share of clipped tokens."""
        count, change = tokens.lengths().sum().clamp_min(1), self._log_ratio(logprobs, tokens)
        ratio = change.exp()
        clipped = torch.zeros_like(tokens.mask)
        if self.loss_type in (*CLIPPED, "cispo"):
            is_cispo = self.loss_type == "cispo"
            low, high = (0.0, self.epsilon_high) if is_cispo else (1 - self.epsilon_low, 1 + self.epsilon_high)
            clipped = torch.where(tokens.advantages < 0, ratio < low, (ratio > high) & (tokens.advantages > 0))
        share = (clipped & tokens.mask).sum() / count
        if self.beta == 0.0:
            return (share,)
        if tokens.ref is None:
            return torch.zeros_like(share), share
        kl = self._kl(logprobs, change, tokens.ref, tokens.old)
        return torch.where(tokens.mask, kl, 0.0).sum() / count, share


def _check_per_token(shape: torch.Size, old: Tensor | None, ref: Tensor | None) -> None:
    for name, tensor in (("old_per_token_logps", old), ("ref_per_token_logps", ref)):
        if tensor is not None and tensor.shape != shape:
            raise InputError(f"got {name} {tuple(tensor.shape)}, want {tuple(shape)}: one per token")


def _on_few_tokens(totals: Tensor, mask: Tensor) -> Tensor:
    """[B, T] with the sums `totals` [B, 1] over the mask, each number within the bounds of "vespo" for a token.

    The first tokens get the largest possible number, the others exactly 0: 25 over four tokens is 20, 5, 0, 0. Equal
    small shares would all round in the same direction.
    """
    before = mask.cumsum(1) - 1
    return (totals - before * _LOWEST).clamp(_LOWEST, 0.0) + (totals - before * _HIGHEST).clamp(0.0, _HIGHEST)


def _num_tokens(mask: Tensor, num_items: float | Tensor | None) -> Tensor:
    """The normaliser of "dapo", "cispo" and "vespo": the tokens of the step per rank, 0-d.

    Liger counts over the ranks again in every chunk, and hangs where ranks have different numbers of chunks.
    """
    group = dist.is_available() and dist.is_initialized()
    if num_items is None:
        total = mask.sum(dtype=torch.float32)
        if group:
            dist.all_reduce(total)
    else:
        check_items(num_items)
        total = torch.as_tensor(num_items, dtype=torch.float32, device=mask.device).reshape(())
    return (total / (dist.get_world_size() if group else 1)).clamp_min(1.0)
