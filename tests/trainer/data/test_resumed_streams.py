"""A resumed run goes on at its row of a stream, from the stream's own state or by reading up to it."""

from fractions import Fraction
from typing import Any

import datasets
import pytest
from datasets import IterableDataset
from packaging.version import Version

from fused_grpo.errors import CheckpointError
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
