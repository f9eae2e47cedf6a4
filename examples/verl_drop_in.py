"""verl's fused head with one import changed: what verl's `dense_common.forward_with_triton_backend` does, on a CPU.

    python examples/verl_drop_in.py

A tiny model with random weights stands in for the policy; nothing is downloaded and verl need not be installed.
"""

from __future__ import annotations

import importlib.util
import math
import resource

import torch
from transformers import LlamaConfig, LlamaForCausalLM

# from verl.utils.kernel.linear_cross_entropy import linear_cross_entropy
from fused_grpo.integrations.verl import linear_cross_entropy

PROMPT, TEMPERATURE, ENTROPY_COEFFICIENT = 8, 0.8, 0.01

WITH_VERL = """verl is installed. To have its own calls end here, in each of its worker processes:

    from fused_grpo.integrations.verl import patched

    with patched():
        ...  # with use_fused_kernels=True and fused_kernel_options.impl_backend=triton"""


def make_model() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=32_000, **sizes))


def score(model: LlamaForCausalLM, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of each next token and the entropies, both [B, T]: verl's lines, and the shape they are wanted in."""
    hidden_states = model.model(input_ids=input_ids)[0]
    rolled_labels = torch.roll(input_ids, shifts=-1, dims=-1)
    head = model.lm_head.weight
    log_probs, entropy = linear_cross_entropy(hidden_states, head, rolled_labels, TEMPERATURE, "none")
    return log_probs.view_as(input_ids), entropy.view_as(input_ids)


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10


def main() -> None:
    torch.manual_seed(0)
    model = make_model()
    input_ids = torch.randint(0, model.config.vocab_size, (8, 768))
    advantages = torch.tensor([1.0, -1.0, 0.5, -0.5]).repeat(2)[:, None]

    before = peak_mib()
    log_probs, entropy = score(model, input_ids)
    # The last position has no next token: its label is the first one, rolled around.
    on = slice(PROMPT - 1, -1)
    ratio = torch.exp(log_probs - log_probs.detach())[:, on]
    loss = -(ratio * advantages).mean() - ENTROPY_COEFFICIENT * entropy[:, on].mean()
    loss.backward()
    grown = peak_mib() - before

    with torch.no_grad():
        logits = model(input_ids[:1]).logits / TEMPERATURE
        expected = logits.log_softmax(-1).gather(-1, torch.roll(input_ids[:1], -1, -1)[..., None])[..., 0]
    rows, columns = input_ids.numel(), model.config.vocab_size
    print(f"loss {loss.item():.4f}, of the head's gradient the norm {model.lm_head.weight.grad.norm().item():.4f}")
    print(f"entropy {entropy[:, on].mean().item():.4f} nats; a uniform distribution has {math.log(columns):.4f}")
    print(f"largest difference from log_softmax of the logits: {(log_probs[:1] - expected).abs().max().item():.1e}")
    print(
        f"not allocated: logits [{rows}, {columns}], {rows * columns * 4 / 2**20:.0f} MiB in fp32, nor their gradient"
    )
    print(f"allocated, backbone and gradients included: {grown:.0f} MiB more than before, at the peak")
    if importlib.util.find_spec("verl") is not None:
        print(WITH_VERL)


if __name__ == "__main__":
    main()
