"""The built-in task with a tool: what its model says, that it is never right without calling, and that it learns to."""

import copy
import hashlib

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.cli.options import RECIPES
from fused_grpo.trainer.episodes.conversation import Template
from fused_grpo.trainer.recipes import calculator
from fused_grpo.trainer.tasks.named import named_task

STEPS, LEAST_GAIN = 12, 0.5


@pytest.fixture(scope="module")
def base():
    return calculator.load_base_model()


@pytest.fixture(scope="module")
def splits():
    return calculator.build_splits()


def factors(row):
    return frozenset(row["prompt"][0]["content"].split("*"))


def test_no_pair_of_factors_is_in_two_splits_in_either_order(splits):
    train, heldout = ({factors(row) for row in rows} for rows in splits)
    assert not train & heldout
    assert (len(splits[0]), len(splits[1])) == (calculator.PROMPTS, calculator.HELD_OUT_PROMPTS)


def test_answers_are_products(splits):
    for row in splits[1]:
        a, b = map(int, row["prompt"][0]["content"].split("*"))
        assert int(row["answer"]) == calculator.multiply(a, b) == a * b


def test_a_call_is_few_tokens_and_read_back(tmp_path):
    calculator.build_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    template = Template(tokenizer, None, stop_ids=[tokenizer.eos_token_id])
    call = '<tool_call>{"name": "multiply", "arguments": {"a": 471, "b": 863}}</tool_call><|end|>'
    ids = tokenizer(call)["input_ids"]
    assert (len(ids), tokenizer.decode(ids)) == (12, call)
    (read,) = template.reply(ids, [], [calculator.multiply])["tool_calls"]
    assert read["function"] == {"name": "multiply", "arguments": {"a": 471, "b": 863}}
    added = template.added([{"role": "tool", "name": "multiply", "content": "406473"}])
    assert tokenizer.decode(added) == "<|tool|>406473<|end|><|assistant|>"


def test_only_a_turn_of_the_model_that_is_the_answer_is_rewarded():
    said = [("assistant", "12"), ("assistant", "12 "), ("assistant", ""), ("tool", "12")]
    completions = [[{"role": role, "content": content}] for role, content in said]
    assert calculator.product_reward(completions=completions, answer=["12"] * 4) == [1.0, 0.0, 0.0, 0.0]


def test_the_base_model_is_the_file_that_the_page_beside_it_describes(base):
    stored = load_file(calculator.BASE_MODEL)
    assert hashlib.sha256(calculator.BASE_MODEL.read_bytes()).hexdigest() in calculator.__doc__
    assert calculator.BASE_MODEL.stat().st_size <= 300_000
    for name, value in base[0].state_dict().items():
        assert torch.equal(value, stored[name].float()), name


@pytest.fixture(scope="module")
def options():
    demo, own = (yaml.safe_load((RECIPES / f"{name}.yaml").read_text()) for name in ("demo", "calculator"))
    brief = {"max_steps": STEPS, "save_strategy": "no", "use_vllm": False, "log_completions": False}
    return {name: value for name, value in {**demo, **own, **brief}.items() if name != "task"}


@pytest.mark.learning
def test_calling_is_learned(base, splits, options, tmp_path, learning_seed, learned):
    """With the recipe's options and transformers' generate. With a tool that returns nothing, no answer is right."""
    model, tokenizer = base
    args = GRPOConfig(**{**options, "output_dir": str(tmp_path), "seed": learning_seed})
    train, heldout = splits
    own = {"eval_dataset": heldout, "processing_class": tokenizer, "tools": [calculator.multiply]}
    trainer = GRPOTrainer(copy.deepcopy(model), calculator.product_reward, args, train, **own)
    result = trainer.train()
    assert result.eval_before["reward"] <= 0.2
    assert result.metrics["sampling/sampling_logp_difference/max"] < 5e-4
    gain = result.eval_after["reward"] - result.eval_before["reward"]
    learned("the built-in task with a tool: gain of held-out accuracy", measured=gain, least=LEAST_GAIN)
    blind = {**own, "tools": [multiply], "eval_dataset": heldout[:64]}
    args = GRPOConfig(**{**options, "output_dir": str(tmp_path / "blind")})
    answers = GRPOTrainer(trainer.model, calculator.product_reward, args, train, **blind).evaluate()
    assert answers["eval_reward"] < 0.05


def multiply(a: int, b: int) -> str:
    """Multiply two numbers.

    Args:
        a: One number.
        b: The other.
    """
    return "0"


def test_the_command_knows_the_task():
    task = named_task("calculator", limit=10, eval_limit=4)
    assert (len(task.train), len(task.heldout), task.tools) == (10, 4, (calculator.multiply,))
