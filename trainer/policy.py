"""`PolicyLoss`, the module that Accelerate wraps so that loss and gradients go through `model(...)`, and its `Teacher`.

The loss runs *inside* the wrapped module: its forward takes a micro-batch, gets hidden states from the backbone and
calls the fused loss with the head's weight. So DDP sees every gradient and FSDP gathers the head once; a loss computed
on the unwrapped model would never be reduced over the ranks. Log-probs and entropies without gradients go the same way,
because that is where FSDP gathers the weights for them.

A teacher (docs/divergence.md) gets the policy's rows, so both have to keep the sequences of a row apart. Like the
reference, it has routers of its own.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from transformers import PreTrainedModel

from fused_grpo._maths.moments import score_norms
from fused_grpo._maths.statistics import compute_dtype
from fused_grpo.config import GRPOLossConfig
from fused_grpo.divergence import Distillation
from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.fused_loss import fused_linear_grpo_loss
from fused_grpo.integrations.logit_transform import head_transform
from fused_grpo.integrations.model_head import head_of, to_head, weight_of
from fused_grpo.logprobs import linear_logprobs, linear_logprobs_and_entropy
from fused_grpo.loss import GRPOLossOutput
from fused_grpo.trainer.common.contexts import contextmanager
from fused_grpo.trainer.config.grpo_config import GRPOConfig
from fused_grpo.trainer.models.adapters import base_model, is_adapted, model_inputs
from fused_grpo.trainer.models.router_replay import RouterReplay
from fused_grpo.trainer.types import MicroBatch

Output = Literal["loss", "logprobs", "scores", "entropies", "head_inputs"]


class PolicyLoss(nn.Module):
    """A causal LM of transformers with the fused GRPO loss for a head.

    Args:
        model: any `AutoModelForCausalLM` whose logits are a linear head over the backbone's last hidden state, or a
            PeftModel around one.
        temperature: what completions were sampled with.
        router_aux_loss_coef: weight of the auxiliary loss of a mixture-of-experts model; 0: there is none.
        routing: what becomes of the experts of micro-batches that have some; None: nothing.

    UnsupportedError for a model without a head, or with one that is not one matrix.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        loss_config: GRPOLossConfig,
        *,
        temperature: float,
        chunk_bytes: int | None = None,
        router_aux_loss_coef: float = 0.0,
        routing: RouterReplay | None = None,
    ) -> None:
        super().__init__()
        causal_lm = base_model(model)
        head_of(causal_lm)  # raises before anything runs
        self.model, self.loss_config = model, loss_config
        self.temperature, self.chunk_bytes = temperature, chunk_bytes
        self.router_aux_loss_coef, self.routing = router_aux_loss_coef, routing
        self.is_adapted, self._transform = is_adapted(model), head_transform(causal_lm.config)
        # Where Accelerate looks for the layers that FSDP is to gather one at a time.
        self._no_split_modules = getattr(model, "_no_split_modules", None)

    @property
    def causal_lm(self) -> Any:
        """The model of transformers itself, with the adapter in its layers."""
        return base_model(self.model) if self.is_adapted else self.model

    def tie_weights(self) -> None:
        """Tie again what the model ties, where Accelerate has replaced its parameters."""
        self.model.tie_weights()

    def forward(self, batch: MicroBatch, output: Output = "loss", **step: Any) -> Any:
        """What `measure` returns, or `_head_inputs`: all that runs the model comes through here, where FSDP gathers it.

        With gradients. `step` has the further arguments of a loss.
        """
        if output == "loss":
            return self._loss(batch, **step)
        hidden, weight, options = self._head_inputs(batch)
        if output == "head_inputs":
            if isinstance(self, FSDPModule):  # which frees the gathered head behind this call
                bias = options["bias"]
                weight, options["bias"] = weight.clone(), None if bias is None else bias.clone()
            return hidden, weight, options
        if output == "entropies":
            return linear_logprobs_and_entropy(hidden, weight, batch.targets, **options).entropy
        if output == "logprobs":
            return linear_logprobs(hidden, weight, batch.targets, **options)
        out = linear_logprobs(hidden, weight, batch.targets, outputs=("sum_squared_probs",), **options)
        assert out.sum_squared_probs is not None
        return out.logprobs, score_norms(out.logprobs, out.sum_squared_probs)

    def _loss(
        self,
        batch: MicroBatch,
        *,
        num_tokens: float | Tensor,
        num_sequences: float | Tensor,
        num_micro_batches: float | Tensor = 1.0,
        config: GRPOLossConfig | None = None,
        entropy_threshold: Tensor | None = None,
        num_entropy_tokens: float | None = None,
        squares: bool = False,
        teacher: Callable[[MicroBatch], Distillation] | None = None,
    ) -> GRPOLossOutput:
        """The loss of a micro-batch, normalised by the counts of the whole optimizer step.

        The routers' auxiliary loss is the mean over the micro-batches that have sequences, of all tokens but padding.
        `config` takes the place of the module's own; the threshold is that of `top_entropy_quantile` over the step.
        With `squares`, metrics have [N] "squared_gradients", too; with experts of the sampler, sums of its routing.
        """
        distillation = None if teacher is None else teacher(batch)  # first, before the policy keeps activations
        # A micro-batch without sequences has no tokens for its routers either.
        balanced = self.router_aux_loss_coef != 0.0 and len(batch.sequence_index) > 0
        states, output = self.run(batch, **({"output_router_logits": True} if balanced else {}))
        aux_loss = router_aux_loss(self.causal_lm, output, batch.attention_mask) if balanced else None
        hidden, weight, options = self._head_inputs(batch, states)
        del states, output  # [R, L, D], of which the loss needs N rows
        config = self.loss_config if config is None else config
        if not len(batch.targets):  # of a rank without samples, which has no log-probs of a sampler
            config = dataclasses.replace(config, score_centering="off")
        if config.score_centering != "off":
            options["sampling_topk_ids"], options["sampling_topk_logprobs"] = batch.centering or (None, None)
        if squares:
            options["squared_gradients"] = hidden.new_empty(len(hidden), dtype=compute_dtype(hidden))
        output = fused_linear_grpo_loss(
            hidden,
            weight,
            batch.targets,
            advantages=batch.advantages,
            cu_seqlens=batch.cu_seqlens,
            old_logprobs=batch.old_logprobs,
            ref_logprobs=batch.ref_logprobs,
            sampling_logprobs=batch.sampling_logprobs,
            covariance_selected=batch.covariance_selected,
            num_tokens=num_tokens,
            num_sequences=num_sequences,
            entropy_threshold=entropy_threshold,
            num_entropy_tokens=num_entropy_tokens,
            config=config,
            distillation=distillation,
            **options,
        )
        if squares:
            output.metrics["squared_gradients"] = options["squared_gradients"]
        if self.routing is not None:
            output.metrics.update(self.routing.counts())
        if aux_loss is None:
            return output
        aux_loss = aux_loss / num_micro_batches
        metrics = {**output.metrics, "aux_loss": aux_loss.detach()}
        loss = (output.loss + self.router_aux_loss_coef * aux_loss).to(output.loss.dtype)
        return output._replace(loss=loss, metrics=metrics)

    @torch.no_grad()
    def measure(self, batch: MicroBatch, output: Output, **step: Any) -> Any:
        """Without gradients: the loss, log-probs [N] of the completion tokens, these and the squared norms [N] of their
        gradients in the logits ("scores"), or entropies [N] in nats of what they were drawn from."""
        with nullcontext() if self.routing is None else self.routing:
            return self(batch, output, **step)

    def run(self, batch: MicroBatch, **options: Any) -> tuple[Tensor, Any]:
        """The states [R, L, D] that the model gives its head, and its output."""
        model, inputs = self.causal_lm, {"input_ids": batch.input_ids}
        if self.is_adapted:
            inputs = model_inputs(self.model, batch.input_ids, batch.position_ids)
        if self.routing is not None:
            self.routing.start(batch.routed_experts)
        named = _parameters(type(model).forward)
        if batch.row_cu_seqlens is not None and None in named & _parameters(type(model.base_model).forward):
            # Without these, every layer finds them in the position ids, and waits for the device.
            ends = dict.fromkeys(("cu_seq_lens_q", "cu_seq_lens_k"), batch.row_cu_seqlens)
            options |= ends | dict.fromkeys(("max_length_q", "max_length_k"), batch.longest)
        options |= {"position_ids": batch.position_ids, "use_cache": False, "return_dict": True}
        if batch.seen_until is not None:
            device = model.device.type
            dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else model.dtype
            options["attention_mask"] = tree_mask(batch.seen_until, dtype)
        options = {name: value for name, value in options.items() if not named.isdisjoint({name, None})}
        return to_head(model, **inputs, **options)

    def _head_inputs(self, batch: MicroBatch, states: Tensor | None = None) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Hidden states [N, D] that predict completion tokens, the head's weight [V, D], and options of the ops: the
        transform of the logits, and the tokens that the sampler kept."""
        states = self.run(batch)[0] if states is None else states
        # The last place of a shared prompt predicts several tokens. An embedding adds their gradients in one order; an
        # index does so on a GPU only, and index_select on a CPU.
        head, hidden = head_of(self.causal_lm), functional.embedding(batch.predictors, states.flatten(0, 1))
        options = {"bias": getattr(head, "bias", None), "temperature": self.temperature, "support": batch.support}
        options |= {"chunk_bytes": self.chunk_bytes, **self._transform}
        return hidden, weight_of(head), options


@contextmanager
def evaluating(policy: PolicyLoss) -> Iterator[None]:
    """Without dropout. At the end FSDP2 frees what a forward pass without a backward leaves gathered: the root."""
    was_training = policy.training
    policy.eval()
    try:
        yield
    finally:
        policy.train(was_training)
        if isinstance(policy, FSDPModule):
            policy.reshard()


def tree_mask(seen_until: Tensor, dtype: torch.dtype) -> Tensor:
    """What to add to attention scores, [R, 1, L, L]: 0 where query q sees key k, k <= q < seen_until[k].

    In the dtype of the scores, so that no layer makes and keeps a copy of its own.
    """
    places = torch.arange(seen_until.shape[1], device=seen_until.device)
    seen = (places <= places[:, None]) & (places[:, None] < seen_until[:, None, None, :])
    return torch.zeros((), dtype=dtype, device=seen.device).where(seen, torch.finfo(dtype).min)


def router_loss_coefficient(model: PreTrainedModel, args: GRPOConfig) -> float:
    """`args.router_aux_loss_coef`; where that is None, the model's own. 0 for a model that knows no router logits.

    InputError for one with reentrant gradient checkpointing, which runs the routers without autograd.
    """
    config, given = model.config.get_text_config(), args.router_aux_loss_coef
    if not hasattr(config, "output_router_logits"):
        return 0.0
    own = getattr(config, "router_aux_loss_coef", None) or 0.0
    coefficient = float(own if given is None else given)
    if coefficient and args.gradient_checkpointing and (args.gradient_checkpointing_kwargs or {}).get("use_reentrant"):
        raise InputError(
            f"got use_reentrant=True with router_aux_loss_coef={given} (the model's own: {own}), want router logits "
            "with a gradient; fix: leave use_reentrant out, or router_aux_loss_coef=0.0"
        )
    return coefficient


def router_aux_loss(model: PreTrainedModel, states: Any, attention_mask: Tensor) -> Tensor:
    """The loss that balances the load of experts, 0-d, of the tokens of a micro-batch (arXiv:2101.03961, eq. 4-6).

    Over the tokens and the routers of all layers, f_e is the share of the tokens that expert e is chosen for, and P_e
    its mean probability; with E experts the loss is E sum_e f_e P_e. It is not linear in the tokens. The loss of a step
    is the mean over its micro-batches, as in TRL, so the cut into micro-batches changes this term.

    Equals, for rows that are padded only,
        model(input_ids, attention_mask=attention_mask, output_router_logits=True).aux_loss

    Args:
        states: the output of its decoder, which was called with `output_router_logits=True`.
        attention_mask: [R, L], 0 where there is padding; at least one token is not.
    """
    # Mixtral's function is the one that all mixture-of-experts models of transformers have.
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    logits = getattr(states, "router_logits", None)
    if not logits:
        raise UnsupportedError(
            f"got no router logits from a {type(model).__name__}, want one tensor per router for its auxiliary loss; "
            "fix: router_aux_loss_coef=0.0"
        )
    top_k = model.config.get_text_config().num_experts_per_tok
    # An int only where there are no logits.
    return cast(Tensor, load_balancing_loss_func(tuple(logits), logits[0].shape[-1], top_k, attention_mask))


@functools.cache
def _parameters(function: Callable[..., Any]) -> frozenset[str | None]:
    """The names of a function's parameters; None for `**keywords`, which models pass to their attention."""
    parameters = inspect.signature(function).parameters.values()
    return frozenset(None if p.kind is p.VAR_KEYWORD else p.name for p in parameters)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """Hidden states and head of the teacher for a micro-batch, as `fused_linear_grpo_loss` takes them."""

    lend: Callable[[], AbstractContextManager[PolicyLoss]]  # the model, which is not trained while it is lent
    vocab_size: int  # the rows of the policy's head; a teacher may have further ones, for padding, which take no part
    options: dict[str, Any]  # of `Distillation`
    identity: dict[str, Any]  # what a resumed run must have the same: options, and a fingerprint of the weights

    @torch.no_grad()
    def __call__(self, batch: MicroBatch) -> Distillation:
        batch = dataclasses.replace(batch, routed_experts=None)
        with self.lend() as policy, evaluating(policy):
            hidden, weight, head_options = policy(batch, "head_inputs")
            bias = None if head_options["bias"] is None else head_options["bias"][: self.vocab_size]
        transform = {name: head_options[name] for name in ("logit_scale", "softcap")}
        return Distillation(hidden, weight[: self.vocab_size], **self.options, bias=bias, **transform)
