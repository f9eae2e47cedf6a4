"""Ranks that are not given the same, or are not in the same place of a run, all say so at once."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from fused_grpo.trainer.collect.start_checks import Start

SCRIPT = Path(__file__).with_name("alike_run.py")
# Of each argument of the trainer that each rank is given another of, what the error names; then more of some.
GIVEN = {
    "args": r"learning_rate=0.001 on rank 0 and learning_rate=0.0001 on rank 1",
    "model": r"model.config.num_hidden_layers=1, .* and model.config.num_hidden_layers=2",
    "train_dataset": r"train_dataset=100 rows, sha256 \w+ on rank 0 and train_dataset=100 rows, sha256",
    "eval_dataset": r"eval_dataset=None on rank 0 and eval_dataset=3 rows",
    "reward_funcs": r"reward_funcs=reward \(sha256 \w+\) on rank 0 and reward_funcs=other_reward",
    "reward_processing_classes": r"reward_funcs=Qwen2ForSequenceClassification .* and reward_funcs=Qwen2For",
    "processing_class": r"processing_class=\w+, sha256 \w+ on rank 0 and processing_class=",
    "quantization_config": r"quantization_config=NoneType on rank 0 and quantization_config=BitsAndBytesConfig on",
    "peft_config": r"peft_config.r=4 on rank 0 and peft_config.r=5 on rank 1",
    "rollout_engine": r"rollout_engine=EngineByPrompt on rank 0 and rollout_engine=OtherEngine on rank 1",
    "rollout_func": r"rollout_func=rollouts .* on rank 0 and rollout_func=other_rollouts",
    "teacher_model": r"other weights of the teacher on rank 1",
    "tools": r"tools=add .* on rank 0 and tools=add_more",
    "environment_factory": r"environment_factory=Counter on rank 0 and .*environment_factory=Other on rank 1",
    "optimizers": r"schedule=ConstantLR, sha256 \w+ on rank 0 and .*schedule=ConstantLR",
    "rows that a stream draws": r"train_dataset=a stream, sha256 \w+ on rank 0 and train_dataset=a stream",
    "arguments of loading": r"model_init_kwargs.dtype='torch.float32' on rank 0 and .*='torch.bfloat16' on rank 1",
    "types of weights": r"model=Qwen2ForCausalLM with 15 parameters, .* and model=Qwen2ForCausalLM with 15",
    "weights that are trained": r"model=Qwen2ForCausalLM with 15 parameters, .* and model=Qwen2ForCausalLM with 15",
    "weights of a reference": r"other weights of the model on rank 1",
    "weights of a base": r"other weights of the model on rank 1",
    "weights that are sharded": r"other weights of the model on rank 1",
    "weights of a reward model": r"reward_funcs=Qwen2ForSequenceClassification .* and reward_funcs=Qwen2For",
    "an eval set that cannot be used": r"rank 1 of 2 failed while checking the eval sets.*without a 'prompt' column",
    "a row that cannot be used": r"rank 1 of 2 failed while checking the arguments.*without a 'prompt' column",
}
# What both ranks do, and the error.
RUNS = {
    "a weight without a gradient": r"got 2 trained parameter\(s\) without a gradient, such as model.more.weight",
    "the same in other words": "^$",
    "a weight that DDP finds": "^$",
    "a weight of a static graph": "^$",
    "an optimizer that draws numbers": "got weights that differ by 0.01 of their size between ranks after step 1",
    "rows of a stream behind the first": r"rows of train_dataset=8 with checksum \w+ on rank 0 and rows of train_d",
    "parts of groups that one rank drops": "every group of the batch was dropped; .* ValueError: no fours any more",
    "rows of evaluate()": r"eval_dataset=2 rows with checksum \w+ on rank 0 and eval_dataset=3 rows",
    "streams of evaluate()": r"eval_dataset=2 rows with checksum \w+ on rank 0 and eval_dataset=3 rows",
    "sets of evaluate()": r"eval_dataset=2 rows with checksum \w+ on rank 0 and eval_dataset=2 rows",
    "prefixes of evaluate()": r"metric_key_prefix=a on rank 0 and metric_key_prefix=b on rank 1",
    "checkpoints to resume from": r"resume_from_checkpoint=here on rank 0 and resume_from_checkpoint=there on rank 1",
}
CALLS = [
    f"{call} {place}"
    for call in ("evaluate", "save_model", "save_checkpoint", "push_to_hub")
    for place in ("in a callback", "behind the run")
]
CALLS.append("save_model of shards")


@pytest.fixture(scope="module")
def errors(fork_server, tmp_path_factory):
    """Of each case, those of both ranks."""
    out = tmp_path_factory.mktemp("alike")
    fork_server.run(SCRIPT, out, json.dumps([*GIVEN, *RUNS, *CALLS]), processes=2, timeout=100)
    first, second = (json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(2))
    return {name: [first[name], second[name]] for name in first}


@pytest.mark.parametrize("name", GIVEN)
def test_ranks_that_are_not_given_the_same_say_so_at_the_start(errors, name):
    first, second = errors[name]
    assert re.search(GIVEN[name], first), first
    # Where one cannot begin, the other one has its reason; else both have found the same.
    assert first == second or (first.startswith("PeerError") and second.split(": ", 1)[1] in first)


def test_every_argument_of_the_trainer_is_compared():
    arguments = {entry.name for entry in dataclasses.fields(Start) if entry.init}
    assert arguments - {"callbacks"} <= GIVEN.keys()  # what those decide holds on all ranks


@pytest.mark.parametrize("name", RUNS)
def test_both_ranks_end_with_the_same_error(errors, name):
    first, second = errors[name]
    assert re.search(RUNS[name], first), first
    assert first == second


@pytest.mark.parametrize("name", CALLS)
def test_what_one_rank_alone_calls_is_named_on_both(errors, name):
    first, second = errors[name]
    assert first == second
    assert first.startswith("PeerError: got ranks at different places of the run (rank 0 ")
