"""The auxiliary loss that balances the load of a mixture-of-experts model's experts (arXiv:2101.03961, eq. 4-6).

Over the tokens of a micro-batch and the routers of all layers, f_e is the share of the tokens that expert e is chosen
for, and P_e its mean probability; with E experts the loss is E sum_e f_e P_e. transformers' own function computes it.

It is not linear in the tokens. The loss of a step is the mean over its micro-batches, as in TRL, so the cut into
micro-batches changes this term: with `max_tokens_per_micro_batch`, under accumulation, and on several ranks, between
which sequences are balanced, it is not exactly TRL's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer.config.grpo_config import GRPOConfig


def router_loss_coefficient(model: PreTrainedModel, args: GRPOConfig) -> float:
    """`args.router_aux_loss_coef`; where that is None, the model's own. 0 for a model without router logits.

    Raises:
        InputError: a coefficient for a model that does not return router logits; or reentrant gradient checkpointing,
            which runs the routers without autograd.
    """
    config, given = model.config.get_text_config(), args.router_aux_loss_coef
    if not hasattr(config, "output_router_logits"):
        if given:
            raise InputError(
                f"got router_aux_loss_coef={given} with a {type(model).__name__}, which does not return router "
                "logits, want a mixture-of-experts model that does; fix: leave it out"
            )
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
    """The auxiliary loss, 0-d, of the tokens of a micro-batch.

    Equals, for rows that are padded only,
        model(input_ids, attention_mask=attention_mask, output_router_logits=True).aux_loss

    Args:
        model: the causal LM.
        states: the output of its decoder, which was called with `output_router_logits=True`.
        attention_mask: [R, L], 0 where there is padding; at least one token is not.

    Raises:
        UnsupportedError: no router logits in `states`.
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
    loss: Any = load_balancing_loss_func(tuple(logits), logits[0].shape[-1], top_k, attention_mask)
    assert isinstance(loss, Tensor)  # an int where there are no logits
    return loss
