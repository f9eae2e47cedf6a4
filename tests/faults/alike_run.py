"""Runs on two processes that are not given, or do not do, the same. Run by test_alike.py.

    alike_run.py <folder> <names of cases as JSON>

One case after the other in the same processes: an error that all of them raise leaves the process group as it was.
Every process leaves `{case: its error}` in <folder>/rank-<rank>.json; the error of a case that ends well is "".
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, TrainerCallback

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
from scale_out_run import EngineByPrompt

from fused_grpo.trainer import GRPOConfig, GRPOTrainer, loop
from fused_grpo.trainer.distributed.failures import gather_objects
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer

OUT, RANK = Path(sys.argv[1]), int(os.environ["RANK"])
ROWS = [{"prompt": f"{a}+{b}="} for a in range(10) for b in range(10)]


def make_model(seed: int = 0, **shape: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    options = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=14, num_key_value_heads=2, tie_word_embeddings=False, **options | shape)
    )


def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def make_trainer(name: str, options: dict[str, Any], **given: Any) -> GRPOTrainer:
    model = given.pop("model", None) or make_model()
    defaults = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "save_strategy": "no"}
    args = GRPOConfig(str(OUT / name), **defaults | {"max_completion_length": 9} | options)
    arguments = {"reward_funcs": reward, "train_dataset": ROWS, "processing_class": build_tokenizer()}
    return GRPOTrainer(model, args=args, rollout_engine=EngineByPrompt(model), **arguments | given)


class Calls(TrainerCallback):
    """Calls something after the first step, on rank 1 alone."""

    def __init__(self, call: Callable[[GRPOTrainer], object]) -> None:
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if RANK == 1 and state.global_step == 1:
            self.call(self.trainer)


# What one rank alone calls, in a callback and after the run.
CALLS: dict[str, Callable[[GRPOTrainer], object]] = {
    "evaluate": lambda trainer: trainer.evaluate(),
    "save_model": lambda trainer: trainer.save_model(OUT / "saved"),
    "save_checkpoint": lambda trainer: trainer.save_checkpoint(),
    "push_to_hub": lambda trainer: trainer.push_to_hub(),
}


def in_a_callback(name: str, call: Callable[[GRPOTrainer], object]) -> None:
    trainer = make_trainer(name, {"num_iterations": 2}, eval_dataset=ROWS[:3], callbacks=[callback := Calls(call)])
    callback.trainer = trainer
    trainer.train()


def behind_the_run(name: str, call: Callable[[GRPOTrainer], object]) -> None:
    trainer = make_trainer(name, {}, eval_dataset=ROWS[:3])
    (call if RANK == 1 else GRPOTrainer.end)(trainer)


CASES: dict[str, Callable[[str], object]] = {}
for called, calling in CALLS.items():
    CASES[f"{called} in a callback"] = lambda name, call=calling: in_a_callback(name, call)
    CASES[f"{called} behind the run"] = lambda name, call=calling: behind_the_run(name, call)


def main() -> None:
    loop.RunOutput.report = lambda self, model: Path(self.args.output_dir)  # which takes longer than a run
    errors = {}
    for name in json.loads(sys.argv[2]):
        errors[name] = ""
        try:
            CASES[name](name)
        except Exception as error:
            errors[name] = f"{type(error).__name__}: {error}"
        gather_objects(name, None)
    (OUT / f"rank-{RANK}.json").write_text(json.dumps(errors))


if __name__ == "__main__":
    main()
