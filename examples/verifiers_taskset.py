"""A taskset of verifiers 0.4: sums of two-digit numbers, with two rewards.

    pip install 'fused-grpo[verifiers]'
    python examples/verifiers_taskset.py [model, such as Qwen/Qwen3-0.6B]

The reward is the weighted sum that verifiers records: 1 for the sum, and 0.1 for digits alone. Without a model the
tiny one of the recipe `demo` is taken, which adds and rarely carries. What is printed is the mean reward of each step.
The report with the completions is in runs/verifiers.
"""

import sys
from collections.abc import Iterator

import torch
import verifiers.v1 as vf
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.environments import verifiers_task
from fused_grpo.trainer.recipes import arithmetic

SYSTEM = "Add the two numbers. Answer with the digits of the sum alone, the last digit first."
RUN = {"overwrite_output_dir": True, "max_steps": 10, "logging_steps": 1, "save_strategy": "no", "use_vllm": False}
TINY = {"per_device_train_batch_size": 256, "num_generations": 8, "max_completion_length": 5, "learning_rate": 1e-3}


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.reward(weight=0.1)
    async def digits(self, trace: vf.Trace) -> float:
        return float(trace.last_reply.isdecimal())


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for row in arithmetic.build_splits().train:
            yield Sum(SumData(system_prompt=SYSTEM, **row), self.config.task)


def tiny_model() -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    model, tokenizer = arithmetic.load_base_model()
    tokenizer.chat_template = "{{ messages[-1].content }}"  # the sum alone: it has no tokens for letters
    return model, tokenizer


def main(name: str = "") -> None:
    torch.set_num_threads(1)  # a model this small gains nothing from a second thread
    task = verifiers_task(Sums(vf.TasksetConfig()))
    model, tokenizer = (name, None) if name else tiny_model()
    args = GRPOConfig("runs/verifiers", **RUN, **({} if name else TINY))
    trainer = GRPOTrainer(model, task.reward, args, task.train, processing_class=tokenizer)
    trainer.train()
    print("reward by step:", *(f"{entry['reward']:.2f}" for entry in trainer.state.log_history if "reward" in entry))


if __name__ == "__main__":
    main(*sys.argv[1:])
