"""The trackers and the trainer's state: a run with a name, TensorBoard, and logs of one's own."""

from pathlib import Path

from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer


def long(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


args = GRPOConfig(
    output_dir="Qwen-GRPO",
    run_name="sums",
    report_to="tensorboard",
    logging_steps=1,
    max_steps=2,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=8,
    use_vllm=False,
)
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=long,
    args=args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
)
trainer.train()
trainer.log({"final_check": 1.0})
assert trainer.state.log_history[-1]["final_check"] == 1.0
assert list(Path("Qwen-GRPO").rglob("events.out.tfevents.*"))
