"""Prompts that leave no room for a completion: left out with a count, or an error, and otherwise the same run."""

import itertools
import json
from typing import Any

import pytest
import torch
from datasets import Dataset, IterableDataset

from fused_grpo.errors import DataError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.common.warnings import warn_once
from fused_grpo.trainer.data.prompt_sampler import prompt_sampler
from fused_grpo.trainer.data.prompts import PromptLimit

LONG = "1+1+1+1+1="
PROMPTS = ["1=", LONG, "2=", "3=", LONG, "4=", "5="]
ROWS = [{"prompt": prompt} for prompt in PROMPTS]
SHORT = [row for row in ROWS if row["prompt"] != LONG]


class Rows(torch.utils.data.Dataset):
    """Random access, and neither a list nor of the package datasets."""

    def __len__(self) -> int:
        return len(ROWS)

    def __getitem__(self, index: int) -> dict[str, str]:
        return ROWS[index]


@pytest.fixture(autouse=True)
def first_warning() -> None:
    warn_once.cache_clear()


def limit(tokenizer: Any, **options: Any) -> PromptLimit:
    lengths = {"vllm_max_model_length": 10, "max_completion_length": 6}
    return PromptLimit(GRPOConfig(**{**lengths, **options}), tokenizer)


def prompts(dataset: Any, count: int, *, keep: Any = None, shuffle: bool = True, saved: Any = None) -> tuple[Any, Any]:
    sampler = prompt_sampler(dataset, prompts_per_batch=1, seed=3, shuffle=shuffle, keep=keep)
    if saved is not None:
        sampler.load_state_dict(json.loads(json.dumps(saved)))
    return [sampler.next_batch()[0]["prompt"] for _ in range(count)], sampler


@pytest.mark.parametrize("dataset", [ROWS, Dataset.from_list(ROWS), Rows()], ids=["list", "Dataset", "torch"])
def test_order_and_resume_are_those_of_the_data_without_its_long_prompts(tokenizer, caplog, dataset):
    fitting = limit(tokenizer).applied(dataset, name="train_dataset")
    assert [row["prompt"] for row in fitting] == [row["prompt"] for row in SHORT]
    assert "got 2 of 7 prompts of train_dataset with more than 4 tokens" in caplog.text
    expected, _ = prompts(SHORT, 12)
    begun, sampler = prompts(fitting, 7)
    assert begun + prompts(fitting, 5, saved=sampler.state_dict())[0] == expected


def test_data_without_a_long_prompt_or_a_limit_stay_as_they_are(tokenizer, caplog):
    assert limit(tokenizer).applied(SHORT, name="train_dataset") is SHORT
    assert limit(tokenizer, vllm_max_model_length=None).applied(ROWS, name="train_dataset") is ROWS
    assert caplog.records == []


def test_a_long_prompt_is_named_before_the_run_and_no_prompt_is_an_error(tokenizer):
    with pytest.raises(DataError, match=r"got 10 tokens for the prompt of row 1 .* want 4 at most .* fix:"):
        limit(tokenizer, long_prompts="fail").applied(ROWS, name="train_dataset")
    with pytest.raises(DataError, match=r"got 2 of 2 prompts of eval_dataset with more than 4 tokens .* want at least"):
        limit(tokenizer).applied([ROWS[1]] * 2, name="eval_dataset")


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_stream_passes_over_long_prompts_and_resumes_where_it_was(tokenizer, caplog, shuffle):
    def stream(rows: list[dict[str, str]] = ROWS) -> Any:
        return IterableDataset.from_generator(lambda: iter(rows))

    keep = limit(tokenizer).fits
    whole, sampler = prompts(stream(), 12, keep=keep, shuffle=shuffle)
    assert sorted(whole[:5]) == sorted(whole[5:10]) == sorted(row["prompt"] for row in SHORT)
    assert sampler.dropped >= 4
    assert caplog.text.count("with more than 4 tokens") == 1
    for count in range(1, 12):
        begun, cut = prompts(stream(), count, keep=keep, shuffle=shuffle)
        rest, resumed = prompts(stream(), 12 - count, keep=keep, shuffle=shuffle, saved=cut.state_dict())
        assert begun + rest == whole
        assert resumed.dropped == sampler.dropped
    with pytest.raises(DataError, match="all of them too long"):
        prompts(stream([ROWS[1]]), 1, keep=keep, shuffle=shuffle)


def test_a_stream_without_an_end_and_a_short_prompt_is_refused(tokenizer, monkeypatch):
    monkeypatch.setattr("fused_grpo.trainer.data.prompt_sampler.MOST_DROPPED", 50)
    stream = IterableDataset.from_generator(lambda: itertools.repeat(ROWS[1], 100))
    with pytest.raises(DataError, match="got 50 prompts in train_dataset, all of them too long"):
        prompts(stream, 1, keep=limit(tokenizer).fits)


def test_a_run_over_a_stream_counts_them_and_an_evaluation_leaves_them_out(make_trainer):
    lengths = {"vllm_max_model_length": 10, "max_completion_length": 6, "max_steps": 2}
    rows = [{"prompt": prompt, "answer": ""} for prompt in PROMPTS]
    stream = IterableDataset.from_generator(lambda: iter(rows))
    trainer = make_trainer(dataset=stream, eval_dataset=rows, shuffle_dataset=False, **lengths)
    assert trainer.train().metrics["prompts/dropped"] == 1.0
    asked = [count for count, sampling in trainer.engine.calls if sampling.temperature == 0]
    assert asked == [len(SHORT)] * 2
    trainer = make_trainer(dataset=stream, shuffle_dataset=False, long_prompts="fail", **lengths)
    with pytest.raises(DataError, match="got 10 tokens for the prompt of row 1"):
        trainer.train()
    assert trainer.step == 1
    with pytest.raises(DataError, match="row 1"):
        make_trainer(dataset=stream, eval_dataset=rows, long_prompts="fail", **lengths)
