"""Callbacks: one that looks at logs, one that stops the run, one that is added and removed."""

from datasets import load_dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Rewards(TrainerCallback):
    """Keeps the rewards that are logged, and stops the run after the second step."""

    def __init__(self):
        self.seen, self.ended = [], False

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.seen.append(logs["reward"])

    def on_step_end(self, args, state, control, model=None, processing_class=None, optimizer=None, **kwargs):
        assert next(model.parameters()).device == next(iter(optimizer.param_groups[0]["params"])).device
        assert processing_class.decode([5])
        control.should_training_stop = state.global_step == 2

    def on_train_end(self, args, state, control, **kwargs):
        self.ended = True


def long(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


args = GRPOConfig(
    output_dir="Qwen-GRPO",
    logging_steps=1,
    max_steps=50,
    num_generations=4,
    per_device_train_batch_size=4,
    max_completion_length=8,
    use_vllm=False,
)
rewards = Rewards()
trainer = GRPOTrainer(
    model="Qwen/Qwen2.5-0.5B-Instruct",
    reward_funcs=long,
    args=args,
    train_dataset=load_dataset("trl-lib/tldr", split="train"),
    callbacks=[rewards],
)
trainer.add_callback(PrinterCallback)
trainer.remove_callback(PrinterCallback)
trainer.train()
assert len(rewards.seen) == 2
assert rewards.ended
