"""The loaders of TRL's trainer: the batches that a run samples for, in its order, and no effect on the run."""

import pytest
from datasets import Dataset
from trl.trainer.utils import RepeatSampler

from fused_grpo.errors import DataError, UnsupportedError
from fused_grpo.trainer.data.prompt_sampler import prompt_sampler
from fused_grpo.trainer.transformers_face import repeated_rows

ROWS = [{"prompt": f"{number}="} for number in range(11)]
GROUPED = {"per_device_train_batch_size": 4, "num_generations": 2, "steps_per_generation": 2, "num_iterations": 3}


def test_batches_are_those_of_trl_and_do_not_move_the_run(make_trainer):
    trainer = make_trainer(dataset=ROWS, **GROUPED)
    batches = list(trainer.get_train_dataloader())
    assert len(batches) == len(trainer.get_train_dataloader()) == 2 * 6
    for draw in (0, 1):
        drawn = [row for row in trainer.sampler.next_batch() for _ in range(2)]
        assert batches[6 * draw : 6 * draw + 6] == [drawn] * 6
        assert next(iter(trainer.get_train_dataloader())) == batches[0]
    sampler = RepeatSampler(ROWS, mini_repeat_count=2, batch_size=4, repeat_count=6, shuffle=False)
    numbers = [int(row["prompt"][:-1]) for batch in in_order(make_trainer) for row in batch]
    assert numbers == list(sampler)


def in_order(make_trainer):
    return make_trainer(dataset=ROWS, shuffle_dataset=False, **GROUPED).get_train_dataloader()


@pytest.mark.parametrize("repeats", [1, 2])
def test_each_process_reads_the_rows_that_it_samples_for(repeats):
    for rank in range(4):
        options = {"prompts_per_batch": 2, "seed": 3, "shuffle": True, "rank": rank, "world_size": 4}
        sampler = prompt_sampler(ROWS * 3, repeats=repeats, **options)
        loader = repeated_rows(sampler, each=3, times=1)
        read = [[(ROWS * 3)[number] for number in batch] for batch in loader]
        drawn = [sampler.next_batch() for _ in range(len(loader))]
        assert read == [[row for row in batch for _ in range(3)] for batch in drawn]
        assert len(read) == 33 // (8 // repeats)


@pytest.mark.parametrize("loader", ["get_train_dataloader", "get_eval_dataloader"])
def test_rows_that_a_script_changes_are_copies(make_trainer, loader):
    rows = [{"prompt": "1+1=", "numbers": [number]} for number in range(4)]
    trainer = make_trainer(dataset=rows, eval_dataset=rows)
    for batch in getattr(trainer, loader)():
        for row in batch:
            row["prompt"] = "9="
            row["numbers"].append(0)
    assert rows == [{"prompt": "1+1=", "numbers": [number]} for number in range(4)]


def test_workers_read_for_a_dataset_with_a_length_and_not_for_a_stream(make_trainer):
    """As TRL's own test has it; a worker reads each batch once."""
    stream, dataset = Dataset.from_list(ROWS).to_iterable_dataset(), Dataset.from_list(ROWS)
    trainer = make_trainer(dataset=dataset, eval_dataset=stream, dataloader_num_workers=2, **GROUPED)
    loaders = trainer.get_train_dataloader(), trainer.get_eval_dataloader()
    assert [loader.num_workers for loader in loaders] == [2, 0]
    assert trainer.args.dataloader_num_workers == 2
    assert list(loaders[0]) == list(make_trainer(dataset=dataset, **GROUPED).get_train_dataloader())
    with pytest.raises(UnsupportedError, match="whose position a second reader would move"):
        make_trainer(dataset=stream).get_train_dataloader()


def test_an_eval_set_is_read_whole_by_its_name_with_its_completions(make_trainer):
    options = {"per_device_eval_batch_size": 4, "num_generations_eval": 2}
    trainer = make_trainer(eval_dataset={"a": ROWS, "b": ROWS[:3]}, **options)
    batches = list(trainer.get_eval_dataloader("b"))
    assert batches == [[ROWS[0], ROWS[0], ROWS[1], ROWS[1]], [ROWS[2], ROWS[2]]]
    assert list(trainer.get_eval_dataloader(ROWS[5:6])) == [[ROWS[5], ROWS[5]]]
    with pytest.raises(DataError, match=r"got the eval sets \['a', 'b'\], want one"):
        trainer.get_eval_dataloader()
    with pytest.raises(DataError, match="got no eval_dataset"):
        make_trainer().get_eval_dataloader()
