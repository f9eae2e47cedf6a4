"""A resumed run goes on at its row of a stream, from the stream's own state or by reading up to it."""

import json
from fractions import Fraction
from typing import Any

import datasets
import pytest
from datasets import IterableDataset
from packaging.version import Version

from fused_grpo.errors import CheckpointError
from fused_grpo.trainer.checkpoint.training_state import check_alike
from fused_grpo.trainer.data.prompt_sampler import Epochs, PromptSampler, prompt_sampler

ROWS = [{"prompt": f"{number}="} for number in range(12)]
# Before that the state of a mapped stream loses rows, and none is used.
JUMPS = Version(datasets.__version__) >= Version("5.0.1")


def sampler_of(stream: Any, size: int) -> PromptSampler:
    return prompt_sampler(stream, prompts_per_batch=size, seed=0, shuffle=False)


class Unsized:
    """An iterable that is not of the package datasets."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        return iter(ROWS[: self.count])


def test_a_resumed_stream_does_not_read_finished_shards_again():
    opened = []

    class Shards:
        def __call__(self, shards: list[int]):
            for shard in shards:
                opened.append(shard)
                yield from ROWS[:4]

    sampler, resumed = (
        sampler_of(IterableDataset.from_generator(Shards(), gen_kwargs={"shards": [0, 1, 2]}), 5) for _ in range(2)
    )
    sampler.next_batch()
    opened.clear()
    resumed.load_state_dict(sampler.state_dict())
    assert [row["prompt"] for row in resumed.next_batch()] == ["1=", "2=", "3=", "0=", "1="]
    assert opened == [0, 1, 2][JUMPS:]
    assert len(resumed.next_batch()) == 5
    assert opened == [*[0, 1, 2][JUMPS:], 0]


def test_a_checkpoint_made_with_older_datasets_goes_on_at_its_row():
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3)
    sampler, resumed = sampler_of(stream, 5), sampler_of(stream, 5)
    sampler.next_batch()
    resumed.load_state_dict(sampler.state_dict() | {"stream": None})
    assert [resumed.next_batch() for _ in range(3)] == [sampler.next_batch() for _ in range(3)]
    assert resumed.state_dict() == sampler.state_dict()


STREAMS = {
    "interleaved": lambda one: datasets.interleave_datasets([one, one], probabilities=[0.6, 0.4], seed=1),
    "interleaved in turn": lambda one: datasets.interleave_datasets([one, one], stopping_strategy="all_exhausted"),
    "one behind the other": lambda one: datasets.concatenate_datasets([one, one]),
    "mapped and filtered": lambda one: one.map(lambda row: row, batched=True).filter(lambda row: row["prompt"] != "1="),
    "a part, repeated": lambda one: one.skip(1).take(9).repeat(2),
}


@pytest.mark.parametrize("kind", STREAMS)
def test_the_place_in_each_kind_of_stream_fits_a_resumed_run(kind):
    stream = [STREAMS[kind](datasets.Dataset.from_list(ROWS).to_iterable_dataset(num_shards=3)) for _ in range(2)]
    sampler, resumed = (sampler_of(each, 5) for each in stream)
    sampler.next_batch()
    saved = json.loads(json.dumps(sampler.state_dict()))
    check_alike({"stream": resumed.stream_form}, saved, "position", exact=True)
    resumed.load_state_dict(saved)
    assert [resumed.next_batch() for _ in range(3)] == [sampler.next_batch() for _ in range(3)]


def test_a_stream_that_became_shorter_than_what_was_used_is_refused():
    sampler = sampler_of(Unsized(9), 8)
    sampler.next_batch()
    with pytest.raises(CheckpointError, match=r"got a train_dataset of 5 rows.*at least 8"):
        sampler_of(Unsized(5), 8).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize("max_steps", [60, 100, 200])
def test_a_longer_or_shorter_run_over_a_stream_is_one_epoch(max_steps):
    """A step is another share of it than of the run that saved step 50 of 100."""
    epochs = Epochs(None, Fraction(1), max_steps)
    epochs.resume(50, 0.5, of=100)
    assert [step for step in range(51, max_steps + 1) if epochs.ends_with(step)] == [max_steps]
    epochs.resume(50, 1.0, of=100)  # where a callback has left out the rest
    assert epochs.skipped == Fraction(1, 2)
