"""A taskset of verifiers 0.4: sums, with two rewards of the task, which become one column.

    pip install 'fused-grpo[verifiers]'
    python examples/verifiers_taskset.py [model, such as Qwen/Qwen3-0.6B]

Without a model it is the base model of `fused-grpo train`'s demo, which adds badly. What is printed is the mean reward
of each step. The report with the completions is in runs/verifiers.
"""

import sys

import torch
import verifiers.v1 as vf

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.environments import verifiers_task
from fused_grpo.trainer.recipes import arithmetic

RUN = {"overwrite_output_dir": True, "max_steps": 10, "logging_steps": 1, "save_strategy": "no", "use_vllm": False}
TINY = {"per_device_train_batch_size": 256, "num_generations": 8, "max_completion_length": 4, "learning_rate": 1e-3}


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.reward(weight=0.1)
    async def brief(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply) <= len(self.data.answer))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> list[Sum]:
        sums = [(a, b) for a in range(10, 40) for b in range(10, 40)]
        return [Sum(SumData(prompt=f"{a}+{b}=", answer=str(a + b)), self.config.task) for a, b in sums]


def base_model() -> tuple[object, object]:
    """It has seen no conversations: the template is the question alone."""
    model, tokenizer = arithmetic.load_base_model()
    tokenizer.chat_template = "{{ messages[-1].content }}"
    return model, tokenizer


def main(name: str = "") -> None:
    torch.set_num_threads(1)  # a model this small gains nothing from a second thread
    task = verifiers_task(Sums(vf.TasksetConfig()), heldout_size=100)
    model, tokenizer = (name, None) if name else base_model()
    args = GRPOConfig("runs/verifiers", **RUN, **({} if name else TINY))
    trainer = GRPOTrainer(model, task.reward, args, task.train, task.heldout, processing_class=tokenizer)
    trainer.train()
    print("reward by step:", *(f"{entry['reward']:.2f}" for entry in trainer.state.log_history if "reward" in entry))


if __name__ == "__main__":
    main(*sys.argv[1:])
