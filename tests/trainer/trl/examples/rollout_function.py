"""A rollout function: the script samples, and passes a column to its reward."""

import torch
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def rollout(prompts, trainer):
    tokenizer, model = trainer.processing_class, trainer.accelerator.unwrap_model(trainer.model)
    rollouts = {"prompt_ids": [], "completion_ids": [], "logprobs": [], "turns": []}
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        with torch.no_grad():
            out = model.generate(
                ids, max_new_tokens=4, do_sample=True, output_scores=True, return_dict_in_generate=True
            )
        completion = out.sequences[0, ids.shape[1] :]
        scores = torch.stack(out.scores, dim=1)[0].log_softmax(-1)
        rollouts["prompt_ids"].append(ids[0].tolist())
        rollouts["completion_ids"].append(completion.tolist())
        rollouts["logprobs"].append(scores.gather(1, completion[:, None])[:, 0].tolist())
        rollouts["turns"].append(float(len(completion)))
    return rollouts


def reward(completions, turns, **kwargs):
    return [turn + len(set(text)) for text, turn in zip(completions, turns, strict=True)]


args = GRPOConfig(
    "Qwen-GRPO", max_steps=2, num_generations=4, per_device_train_batch_size=4, max_completion_length=8, use_vllm=False
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=reward,
    args=args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
    rollout_func=rollout,
)
trainer.train()
