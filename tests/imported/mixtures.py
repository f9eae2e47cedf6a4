"""Tiny mixtures of experts, and the experts that their routers choose, read off with hooks of the tests' own."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from torch import Tensor, nn

V, LAYERS, EXPERTS, K = 22, 3, 8, 2
SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 24,
    "moe_intermediate_size": 16,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": K,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": None,
    "router_aux_loss_coef": 0.0,
    "tie_word_embeddings": False,
}
GROUPS = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8}
HEADS = {"head_dim": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": {"num_experts": EXPERTS, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": EXPERTS},
    "Olmoe": {"num_experts": EXPERTS},
    "DeepseekV3": {
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "routed_scaling_factor": 1.5,
        **GROUPS,
        **HEADS,
    },
    "GptOss": {"num_local_experts": EXPERTS},
}


def mixture(name: str, *, seed: int = 0, **options: Any) -> Any:
    config = getattr(transformers, f"{name}Config")(**SIZES | FAMILIES.get(name, {}) | options)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
        for parameter in model.parameters():  # so that it matters which experts compute a token
            parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    return model.eval()


def routers(model: nn.Module) -> dict[int, nn.Module]:
    """The router of each layer that has one."""
    mlps = {layer: block.mlp for layer, block in enumerate(model.model.layers)}
    by_layer = {layer: getattr(mlp, "gate", getattr(mlp, "router", None)) for layer, mlp in mlps.items()}
    return {layer: router for layer, router in by_layer.items() if router is not None and hasattr(router, "weight")}


def hooked(model: nn.Module, hook: Callable[..., Any]) -> list[Any]:
    """`hook(layer, router, inputs, output)` behind each router."""

    def behind(layer: int) -> Callable[..., Any]:
        return lambda router, inputs, output: hook(layer, router, inputs, output)

    return [router.register_forward_hook(behind(layer)) for layer, router in routers(model).items()]


@torch.no_grad()
def experts_of(model: nn.Module, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """[P+T-1, layers, k] uint8, as vLLM returns them: the last token was never read."""
    ids = [*prompt, *completion][:-1]
    table = torch.zeros(len(ids), LAYERS, K, dtype=torch.uint8)

    def record(layer: int, router: Any, inputs: Any, output: Any) -> None:
        table[:, layer] = output[-1]

    handles = hooked(model, record)
    model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    return table
