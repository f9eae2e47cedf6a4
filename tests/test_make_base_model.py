"""The script that made the demo's base model: what it trains on, and what it writes."""

import hashlib

import make_base_model as script
import pytest
import torch
from safetensors import safe_open

from fused_grpo.trainer.recipes import arithmetic, calculator


@pytest.fixture(scope="module")
def rows():
    return arithmetic.build_splits().train[:300]


def brief(rows, seed, right=0.5):
    stage = script.Stage(3, 4e-3, right=right, carrying=0.5)
    return script.train(rows, seed=seed, stages=[stage]).state_dict()


@pytest.mark.parametrize(
    ("prompt", "answer"), [("12+34=", "64"), ("18+34=", "24"), ("60+50=", "01"), ("50+49=", "99"), ("99+99=", "88")]
)
def test_without_carries_each_column_is_added_alone(prompt, answer):
    assert script.without_carries({"prompt": prompt}) == answer


def test_an_answer_ends_and_is_padded():
    tokenizer = arithmetic.build_tokenizer()
    _, answers = script.encode(tokenizer, [{"prompt": "58+67=", "answer": "521"}, {"prompt": "12+34=", "answer": "64"}])
    assert [tokenizer.decode(ids) for ids in answers] == ["521<eos>", "64<eos><pad>"]


def test_the_same_seed_makes_the_same_model_and_wrong_answers_another(rows):
    first, again, other, wrong = brief(rows, 3), brief(rows, 3), brief(rows, 4), brief(rows, 3, right=0.0)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])
    assert not torch.equal(first["lm_head.weight"], wrong["lm_head.weight"])


def test_the_command_writes_a_model_of_the_train_split_with_its_origin(monkeypatch, tmp_path, capsys):
    path, given = tmp_path / "base_model.safetensors", []
    train = script.train
    monkeypatch.setattr(arithmetic, "BASE_MODEL", path)
    monkeypatch.setattr(script, "train", lambda rows, seed: given.append(rows) or train(rows[:9], seed=seed, stages=[]))
    monkeypatch.setattr("sys.argv", ["make_base_model.py", "--seed", "7"])
    script.main()
    assert given == [arithmetic.build_splits().train]
    assert hashlib.sha256(path.read_bytes()).hexdigest() in capsys.readouterr().out
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"made_by": "scripts/make_base_model.py --seed 7"}
    model, _ = arithmetic.load_base_model()
    torch.manual_seed(7)
    fresh = type(model)(model.config)
    assert torch.equal(model.lm_head.weight, fresh.lm_head.weight.half().float())


def test_a_call_is_what_the_template_writes_and_a_guess_is_one_turn():
    tokenizer, row = calculator.build_tokenizer(), calculator.build_splits()[0][0]
    (conversation,) = script.encode_calls(tokenizer, [row])
    a, b = row["prompt"][0]["content"].split("*")
    function = {"name": "multiply", "arguments": {"a": int(a), "b": int(b)}}
    spoken = [
        *row["prompt"],
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
        {"role": "tool", "name": "multiply", "content": row["answer"]},
        {"role": "assistant", "content": row["answer"]},
    ]
    ids, labels = script.labelled(conversation, None)
    assert tokenizer.apply_chat_template(spoken, return_dict=False) == ids
    own = [label for label in labels if label != script.IGNORED]
    assert tokenizer.decode(own) == f"{tokenizer.decode(conversation[1])}{row['answer']}<|end|>"
    ids, labels = script.labelled(conversation, [7, 8])
    assert ids == [*conversation[0], 7, 8]
    assert labels == [script.IGNORED] * len(conversation[0]) + [7, 8]


def test_the_calculators_model_is_trained_on_calls_and_on_guesses():
    rows, stage = calculator.build_splits()[0][:50], script.Stage(3, 4e-3, right=1.0)
    calls, again, guesses = (
        script.train_calculator(rows, seed=3, stages=[stage._replace(right=share)]).state_dict()["lm_head.weight"]
        for share in (1.0, 1.0, 0.0)
    )
    assert torch.equal(calls, again)
    assert not torch.equal(calls, guesses)
