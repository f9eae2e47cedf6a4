"""Log-probs out of five causal LMs of transformers, beside those that come of their full logits.

Each does something else to its logits. Models are small, and made here. Prints the largest difference in a log-prob, in
an entropy and in a weight's gradient (of the largest there), and what generate() writes inside the block.
"""

import torch
from transformers import AutoModelForCausalLM, CohereConfig, Gemma2Config, GraniteConfig, LlamaConfig, PhiConfig

from fused_grpo.integrations.transformers import return_logprobs

SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "initializer_range": 0.2,
}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    "Llama: x": LlamaConfig(**SIZES),
    "Phi: x + bias": PhiConfig(**SIZES),
    "Gemma 2: 5 tanh(x / 5)": Gemma2Config(**SIZES, head_dim=16, final_logit_softcapping=5.0),
    "Granite: x / 4": GraniteConfig(**SIZES, logits_scaling=4.0),
    "Cohere: 0.25 x": CohereConfig(**SIZES, logit_scale=0.25),
}


def by_logits(model, ids, labels):
    logprobs, labels = model(ids, use_cache=False).logits[:, :-1].log_softmax(-1), labels[:, 1:]
    label_logprobs = logprobs.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return [value.masked_fill(labels == -100, 0.0) for value in (label_logprobs, entropy)]


def gradients(model, logprobs, entropy):
    return torch.autograd.grad((logprobs - 0.01 * entropy).sum(), list(model.parameters()))


def main(seed: int = 0) -> dict[str, list[float]]:
    differences = {}
    for name, config in FAMILIES.items():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        ids = torch.randint(3, 500, (4, 24))
        labels = ids.masked_fill(torch.arange(24) < 8, -100)  # a prompt of 8 tokens
        with return_logprobs(model):
            out = model(ids, labels=labels)
            written = model.generate(ids[:1, :8], attention_mask=torch.ones(1, 8), max_new_tokens=3, do_sample=False)
        ours, from_logits = (out.log_probs, out.entropy), by_logits(model, ids, labels)
        differences[name] = [(a - b).abs().max().item() for a, b in zip(ours, from_logits, strict=True)]
        pairs = zip(gradients(model, *ours), gradients(model, *from_logits), strict=True)
        differences[name].append(max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs))
        figures = "log-probs {:.0e}, entropies {:.0e}, gradients {:.0e};".format(*differences[name])
        print(f"{name:22}", figures, written[0, 8:].tolist())
    return differences


if __name__ == "__main__":
    main()
