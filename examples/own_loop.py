"""A whole GRPO loop around one op: generate, reward, advantages, loss, step. Copy it and put your own things in.

The task: from a digit, count on to nine and stop, 6 -> 7 8 9 END. A small model of random weights, made here, learns it
in seconds on one CPU core. Prints the reward as it rises and what the model writes after a 3; leaves no file behind.
Letters: B completions in a step, G of each prompt; P tokens of a prompt, T of the longest completion; V vocabulary.
"""

from itertools import takewhile
from operator import eq

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fused_grpo import GRPOLossConfig, fused_linear_grpo_loss

END, PAD = 10, 11  # 0 to 9 are the digits
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
G, MICRO_BATCH, ITERATIONS, TEMPERATURE = 16, 40, 2, 1.0


def reward(digit: int, written: list[int]) -> float:
    """The share of the answer before the first mistake; to write on after its end costs, too."""
    answer = [*range(digit + 1, 10), END]
    return sum(takewhile(bool, map(eq, answer, written))) / max(len(answer), len(written))


def main(steps: int = 80, seed: int = 0) -> list[float]:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=12, eos_token_id=END, pad_token_id=PAD, **SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.5e-3)
    config = GRPOLossConfig(loss_type="dapo", epsilon=0.2, epsilon_high=0.28)  # names and meaning are TRL's
    history = []
    for step in range(steps):
        # Generate once, for all micro-batches of the step, and from the policy itself: a top_k or top_p, here or in a
        # checkpoint's generation_config, would sample from another. Prompts of several lengths are padded on the left.
        prompts = torch.arange(10)[:, None].repeat_interleave(G, 0)  # [B, P]
        sampling = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "top_p": 1.0, "max_new_tokens": 12}
        tokens = model.generate(prompts, attention_mask=torch.ones_like(prompts), **sampling)  # [B, P + T]
        completions = tokens[:, prompts.shape[1] :]
        ends = (completions == END).long()
        mask = ends.cumsum(1) == ends  # [B, T]: everything up to the first END, and that, too

        written = [ids[kept].tolist() for ids, kept in zip(completions, mask, strict=True)]
        rewards = torch.tensor([*map(reward, prompts[:, -1].tolist(), written)])
        groups = rewards.view(-1, G)  # compared as wholes, here; after that a micro-batch may cut them anywhere
        advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten()

        micro_batches = torch.arange(len(tokens)).split(MICRO_BATCH)
        old_logprobs = [None] * len(micro_batches)  # None: the weights are those that sampled
        for _ in range(ITERATIONS):
            for i, rows in enumerate(micro_batches):
                # The backbone without its head: logits [B, T, V] never exist. What predicts a token is the hidden state
                # before it. Under DDP, this line and the loss belong in a module: docs/integrations/own-loop.md.
                hidden = model.model(tokens[rows, :-1], use_cache=False).last_hidden_state[:, prompts.shape[1] - 1 :]
                loss, _, logprobs = fused_linear_grpo_loss(
                    hidden,
                    model.lm_head.weight,
                    completions[rows],
                    mask=mask[rows],
                    advantages=advantages[rows],
                    old_logprobs=old_logprobs[i],
                    temperature=TEMPERATURE,
                    num_tokens=mask.sum(),  # of the whole step: its gradient is then the same however it is cut
                    config=config,
                )
                loss.backward()
                if old_logprobs[i] is None:  # the first pass leaves what the second compares with, at no cost
                    old_logprobs[i] = logprobs
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        history.append(rewards.mean().item())
        if step % 10 == 0 or step == steps - 1:
            print(f"step {step:2}  reward {history[-1]:.2f}  3 -> {written[3 * G]}")
    return history


if __name__ == "__main__":
    main()
