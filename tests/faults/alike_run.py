"""Runs on two processes that are not given, or do not do, the same. Run by test_alike.py.

    alike_run.py <folder> <names of cases as JSON>

In `GIVEN` both ranks make a trainer, each with its own of two things; in `CALLS` one of them calls what the other does
not. One case after the other in the same processes: an error that all of them raise leaves the process group as it was.
Every process leaves `{case: its error}` in <folder>/rank-<rank>.json; the error of a case that ends well is "".
"""

import json
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import IterableDataset
from peft import LoraConfig
from transformers import (
    BitsAndBytesConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
    TrainerCallback,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))
sys.path.insert(0, str(Path(__file__).parents[1] / "imported"))
from scale_out_run import EngineByPrompt, ShardingAccelerator
from talkers import talking_model, talking_tokenizer

from fused_grpo.trainer import GRPOConfig, GRPOTrainer, loop
from fused_grpo.trainer.distributed import sharding
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
    sharding.Accelerator = ShardingAccelerator if given.pop("sharded", False) else Accelerator
    defaults = {"max_steps": 2, "num_generations": 4, "per_device_train_batch_size": 8, "save_strategy": "no"}
    args = GRPOConfig(str(OUT / name), **defaults | {"max_completion_length": 9} | options)
    arguments = {"reward_funcs": reward, "train_dataset": ROWS, "processing_class": build_tokenizer()}
    return GRPOTrainer(model, args=args, **{"rollout_engine": EngineByPrompt(model), **arguments, **given})


class Calls(TrainerCallback):
    """Calls something after the first step, on rank 1 alone."""

    def __init__(self, call: Callable[[GRPOTrainer], object]) -> None:
        self.call = call

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if RANK == 1 and state.global_step == 1:
            self.call(self.trainer)


def other_reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    return [float(sum(ids) % 5) for ids in completion_ids]


def reward_model(seed: int) -> Any:
    torch.manual_seed(seed)
    config = Qwen2Config(vocab_size=14, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_labels=1)
    config.num_attention_heads = config.num_key_value_heads = 2
    return Qwen2ForSequenceClassification(config)


def padded_by_end(tokenizer: Any, rank: int) -> Any:
    tokenizer.pad_token = tokenizer.eos_token if rank else tokenizer.pad_token
    return tokenizer


def optimizers(rank: int) -> dict[str, Any]:
    optimizer = torch.optim.AdamW((model := make_model()).parameters(), lr=1e-3)
    return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer, [0.5, 0.1][rank]))}


def of_episodes(**given: Any) -> dict[str, Any]:
    rows = [{"prompt": [{"role": "user", "content": "Count."}]}]
    tokenizer = talking_tokenizer()
    return {"processing_class": tokenizer, "model": talking_model(tokenizer), "train_dataset": rows, **given}


def add(number: int) -> str:
    """Add.

    Args:
        number: How much.
    """
    return str(number)


def add_more(number: int) -> str:
    """Add more.

    Args:
        number: How much.
    """
    return str(number)


class Counter:
    add = staticmethod(add)

    def reset(self, **row: Any) -> str:
        return ""

    def get_reward(self) -> float:
        return 0.0


class Other(Counter):
    pass


def rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return {}


def other_rollouts(prompts: list[str], trainer: Any) -> dict[str, Any]:
    return {"prompt_ids": []}


class OtherEngine(EngineByPrompt):
    pass


def lora(rank: int) -> LoraConfig:
    return LoraConfig(r=4 + rank, target_modules=["q_proj"])


# Of each argument of the trainer: what each rank gives.
GIVEN: dict[str, Callable[[int], dict[str, Any]]] = {
    "args": lambda rank: {"options": {"learning_rate": [1e-3, 1e-4][rank]}},
    "model": lambda rank: {"model": make_model(num_hidden_layers=1 + rank)},
    "train_dataset": lambda rank: {"train_dataset": ROWS[:: [1, -1][rank]]},
    "eval_dataset": lambda rank: {"eval_dataset": [None, ROWS[:3]][rank]},
    "reward_funcs": lambda rank: {"reward_funcs": [reward, other_reward][rank]},
    "reward_processing_classes": lambda rank: {
        "reward_funcs": reward_model(0),
        "reward_processing_classes": padded_by_end(build_tokenizer(), rank),
    },
    "processing_class": lambda rank: {"processing_class": padded_by_end(build_tokenizer(), rank)},
    "quantization_config": lambda rank: {"quantization_config": [None, BitsAndBytesConfig(load_in_4bit=True)][rank]},
    "peft_config": lambda rank: {"peft_config": lora(rank)},
    "rollout_engine": lambda rank: {"rollout_engine": [EngineByPrompt, OtherEngine][rank](make_model())},
    "rollout_func": lambda rank: {"rollout_engine": None, "rollout_func": [rollouts, other_rollouts][rank]},
    "teacher_model": lambda rank: {"teacher_model": make_model(rank), "options": {"distillation_coef": 0.5}},
    "tools": lambda rank: of_episodes(tools=[[add, add_more][rank]]),
    "environment_factory": lambda rank: of_episodes(reward_funcs=None, environment_factory=[Counter, Other][rank]),
    # More of some.
    "optimizers": optimizers,
    "rows that a stream draws": lambda rank: {"train_dataset": stream(rank)},
    "arguments of loading": lambda rank: {
        "options": {"model_init_kwargs": {"dtype": [torch.float32, torch.bfloat16][rank]}}
    },
    "types of weights": lambda rank: {"model": make_model().to([torch.float32, torch.bfloat16][rank])},
    "weights that are trained": lambda rank: {"model": trained(rank)},
    "weights of a reference": lambda rank: {"model": make_model(rank), "options": {"beta": 0.1}},
    "weights that are sharded": lambda rank: {"model": make_model(rank), "sharded": True},
    "weights of a base": lambda rank: {"model": make_model(rank), "peft_config": lora(0)},
    "weights of a reward model": lambda rank: {
        "reward_funcs": reward_model(rank),
        "reward_processing_classes": build_tokenizer(),
    },
    "a row that cannot be used": lambda rank: {"train_dataset": [ROWS, [{"promt": "1+1="}]][rank]},
}


def stream(rank: int) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(ROWS[rank:]))


def trained(rank: int) -> Qwen2ForCausalLM:
    model = make_model()
    model.model.layers[0].mlp.requires_grad_(not rank)
    return model


# Of methods: what each rank calls behind a run of both.
CALLED: dict[str, Callable[[GRPOTrainer, int], object]] = {
    "rows of evaluate()": lambda trainer, rank: trainer.evaluate(ROWS[: 2 + rank]),
    "streams of evaluate()": lambda trainer, rank: trainer.evaluate(
        IterableDataset.from_generator(lambda: iter(ROWS[: 2 + rank]))
    ),
    "sets of evaluate()": lambda trainer, rank: trainer.evaluate(["first", "second"][rank]),
    "prefixes of evaluate()": lambda trainer, rank: trainer.evaluate(metric_key_prefix=["a", "b"][rank]),
    "an eval set that cannot be used": lambda trainer, rank: trainer.evaluate([ROWS, [{"promt": ""}]][rank]),
    "checkpoints to resume from": lambda trainer, rank: trainer.train(["here", "there"][rank]),
}


def called(name: str) -> None:
    trainer = make_trainer(name, {"max_steps": 1}, eval_dataset={"first": ROWS[:2], "second": ROWS[2:4]})
    CALLED[name](trainer, RANK)


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


def behind_the_run(name: str, call: Callable[[GRPOTrainer], object], **given: Any) -> None:
    trainer = make_trainer(name, {}, eval_dataset=ROWS[:3], **given)
    (call if RANK == 1 else GRPOTrainer.end)(trainer)


def without_a_gradient(name: str, options: dict[str, Any] | None = None) -> None:
    model = make_model()
    model.more = torch.nn.Linear(4, 4)
    make_trainer(name, options or {}, model=model).train()


class Drawing(torch.optim.SGD):
    """Moves weights by numbers that are others on each rank, as stochastic rounding does."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for weight in self.param_groups[0]["params"]:
            weight.data.mul_(1 + 0.01 * RANK)


def other_replicas(name: str) -> None:
    """An error, here, with the first warning of rank 0."""
    warnings, model = list[str](), make_model()
    logging.getLogger("fused_grpo").addHandler(handler := logging.Handler())
    handler.emit = lambda record: warnings.append(record.getMessage())
    options = {"max_steps": 1, "logprob_mismatch": "warn"}
    make_trainer(name, options, model=model, optimizers=(Drawing(model.parameters(), lr=1e-3), None)).train()
    logging.getLogger("fused_grpo").removeHandler(handler)
    raise ValueError(gather_objects(name, " ".join(warnings))[0])


def streams_apart(name: str) -> None:
    rows = ROWS[:5] + ROWS[5:][:: [1, -1][RANK]]
    dataset = IterableDataset.from_generator(lambda: iter(rows))
    make_trainer(name, {"shuffle_dataset": False}, train_dataset=dataset).train()


def the_same(name: str) -> None:
    """What processes write otherwise is no difference, nor is what is of one rank or machine alone."""
    shown = [{}, {"log_level": "error", "log_completions": False, "run_name": "second"}][RANK]
    order = [[0, 8], [8, 0]][RANK]
    assert [*{*order}] == order
    variables = {"set": {*order}, "object": [object() for _ in range(100 + RANK)][-1]}
    loading = {"device_map": {"": RANK}}
    make_trainer(
        name,
        {"chat_template_kwargs": variables, "model_init_kwargs": loading, **shown},
        peft_config=LoraConfig(r=4, target_modules={"q_proj", "v_proj"}, revision=None),
        callbacks=[Calls(print)] * RANK,
    )


def parts_dropped(name: str) -> None:
    def raises(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        if RANK == 1:
            raise ValueError("no fours any more")
        return reward(completion_ids)

    make_trainer(name, {"per_device_train_batch_size": 2, "reward_failure": "drop"}, reward_funcs=raises).train()


CASES: dict[str, Callable[[str], object]] = {
    "a weight without a gradient": without_a_gradient,
    "the same in other words": the_same,
    "a weight that DDP finds": lambda name: without_a_gradient(name, {"ddp_find_unused_parameters": True}),
    "parts of groups that one rank drops": parts_dropped,
    "an optimizer that draws numbers": other_replicas,
    "rows of a stream behind the first": streams_apart,
    "a weight of a static graph": lambda name: without_a_gradient(name, {"ddp_static_graph": True}),
} | {name: lambda name: make_trainer(name, **{"options": {}, **GIVEN[name](RANK)}) for name in GIVEN}
CASES |= dict.fromkeys(CALLED, called)
CASES["save_model of shards"] = lambda name: behind_the_run(name, CALLS["save_model"], sharded=True)
for one, calling in CALLS.items():
    CASES[f"{one} in a callback"] = lambda name, call=calling: in_a_callback(name, call)
    CASES[f"{one} behind the run"] = lambda name, call=calling: behind_the_run(name, call)


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
