"""Datasets, the two kinds of prompt, and the order in which prompts are used."""

import copy
import json
import random
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset, DatasetDict, Image, IterableDataset
from hypothesis import given, settings
from hypothesis.strategies import booleans, dictionaries, integers, lists, none, recursive, text, tuples

from fused_grpo.errors import CheckpointError, DataError, InputError
from fused_grpo.trainer.common.formatting import message_text
from fused_grpo.trainer.data.datasets import (
    all_rows,
    as_conversations,
    check_dataset,
    clean_prompt,
    first_rows,
    load_rows,
    renamed,
)
from fused_grpo.trainer.data.prompt_sampler import fingerprint, prompt_sampler
from fused_grpo.trainer.data.prompts import as_completion, encode_prompts

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "{{ {'system': 'a', 'user': 'b', 'assistant': 'c'}[message.role] }}{{ message.content }}{{ tail or '=' }}"
    "{% endfor %}{% if add_generation_prompt %}c{% endif %}"
)
SUM = [{"role": "system", "content": "0"}, {"role": "user", "content": "1+1"}]
BEGUN = [*SUM, {"role": "assistant", "content": "2-"}]
PICTURES = Dataset.from_list([{"prompt": "1+1=", "images": "nowhere.png"}]).cast_column("images", Image())


def some_rows(count: int) -> list[dict[str, str]]:
    return [{"prompt": f"{number}="} for number in range(count)]


def some_stream(count: int) -> IterableDataset:
    """Three shards of unequal length."""

    def rows(shards: list[int]):
        for shard in shards:
            yield from some_rows(count)[shard::3]

    return IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2]})


class Unsized:
    """An iterable that is not of the package datasets."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self):
        return iter(some_rows(self.count))


MAKERS = {
    "list": some_rows,
    "Dataset": lambda count: Dataset.from_list(some_rows(count)),
    "stream": some_stream,
    "mapped stream": lambda count: Dataset.from_list(some_rows(count)).to_iterable_dataset().map(lambda row: row),
    "iterable": Unsized,
}


@pytest.mark.parametrize("kind", MAKERS)
@settings(deadline=None, max_examples=20)
@given(
    count=integers(3, 20),
    runs=lists(tuples(integers(1, 4), integers(1, 5), integers(0, 4)), min_size=1, max_size=4),
    seed=integers(0, 3),
    shuffle=booleans(),
)
def test_every_prompt_once_per_pass_whatever_the_ranks_batches_and_kills(kind, count, runs, seed, shuffle):
    """A run: (ranks, prompts per rank and batch = micro-batch * accumulation / group, batches until it is killed)."""
    shuffle, make = shuffle and kind != "iterable", MAKERS[kind]
    saved, drawn = None, []
    for world_size, size, batches in runs:
        ranks = [
            prompt_sampler(
                make(count), prompts_per_batch=size, seed=seed, shuffle=shuffle, rank=rank, world_size=world_size
            )
            for rank in range(world_size)
        ]
        for sampler in ranks if saved else []:
            sampler.load_state_dict(json.loads(saved))
        drawn += [row["prompt"] for _ in range(batches) for sampler in ranks for row in sampler.next_batch()]
        states = {json.dumps(sampler.state_dict()) for sampler in ranks}
        assert len(states) == 1
        saved = states.pop()
        assert json.loads(saved)["prompts"] == len(drawn)
    passes = [Counter(drawn[start : start + count]) for start in range(0, len(drawn), count)]
    assert all(whole == Counter(row["prompt"] for row in some_rows(count)) for whole in passes[:-1])
    assert all(times == 1 for part in passes for times in part.values())
    undisturbed = prompt_sampler(make(count), prompts_per_batch=1, seed=seed, shuffle=shuffle)
    assert drawn == [undisturbed.next_batch()[0]["prompt"] for _ in drawn]


@pytest.mark.parametrize("kind", ["list", "Dataset"])
def test_the_order_of_a_pass_is_that_of_the_seed_and_its_number(kind):
    sampler, expected = prompt_sampler(MAKERS[kind](10), prompts_per_batch=4, seed=7, shuffle=True), []
    for number in range(2):
        order = list(range(10))
        random.Random(f"7/{number}").shuffle(order)
        expected += [f"{index}=" for index in order]
    assert [row["prompt"] for _ in range(5) for row in sampler.next_batch()] == expected
    assert sampler.num_prompts == 10


def test_a_shuffled_stream_has_another_order_in_every_pass():
    sampler = prompt_sampler(some_stream(12), prompts_per_batch=12, seed=0, shuffle=True)
    first, second = sampler.next_batch(), sampler.next_batch()
    assert first != second
    assert first != list(some_stream(12))
    assert first != prompt_sampler(some_stream(12), prompts_per_batch=12, seed=1, shuffle=True).next_batch()
    assert sampler.num_prompts is None


def test_a_batch_reads_the_rows_of_its_rank_alone():
    class Counting(list):
        read = 0

        def __getitem__(self, index):
            self.read += 1
            return super().__getitem__(index)

    rows = Counting(some_rows(100))
    sampler = prompt_sampler(rows, prompts_per_batch=2, seed=0, shuffle=True, rank=1, world_size=8)
    sampler.load_state_dict(sampler.state_dict() | {"prompts": 1_000_000})
    rows.read = 0
    sampler.next_batch()
    assert rows.read == 2


@pytest.mark.parametrize("other", [{"count": 9}, {"seed": 2}, {"shuffle": False}])
def test_the_state_of_another_order_is_refused(other):
    def make(count=8, seed=1, shuffle=True):
        return prompt_sampler(some_rows(count), prompts_per_batch=2, seed=seed, shuffle=shuffle)

    state = make().state_dict()
    make().load_state_dict(state)
    with pytest.raises(CheckpointError, match=r"got a train_dataset with .* as in the checkpoint; fix"):
        make(**other).load_state_dict(state)


def test_rows_of_a_stream_are_checked_as_they_come():
    rows = [*some_rows(3), {"prompt": ""}]
    stream = check_dataset(IterableDataset.from_generator(lambda: iter(rows)), name="train_dataset")
    sampler = prompt_sampler(stream, prompts_per_batch=3, seed=0, shuffle=False)
    assert sampler.next_batch() == rows[:3]
    with pytest.raises(DataError, match="got '' as the prompt of row 3"):
        sampler.next_batch()
    with pytest.raises(DataError, match=r"no order to shuffle.*shuffle_dataset=False"):
        prompt_sampler(Unsized(3), prompts_per_batch=1, seed=0, shuffle=True)


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (None, "got no train_dataset"),
        ([], "got an empty train_dataset"),
        (
            [{"question": "1+1=", "answer": "2"}],
            r"without a 'prompt' column in row 0 \(columns: 'question', 'answer'\)",
        ),
        ([{"prompt": "1+1="}, {"prompt": ""}], "got '' as the prompt of row 1"),
        (Dataset.from_list([{"prompt": "1+1="}, {"prompt": None}]), "got None as the prompt of row 1"),
        (Dataset.from_list([{"prompt": ""}, {"prompt": "1"}]).with_transform(lambda batch: batch), "prompt of row 0"),
        ([{"prompt": []}], "a non-empty list of {'role': ..., 'content': ...} messages"),
        ([{"prompt": ["hi"]}], "want messages of the form"),
        ([{"prompt": SUM}, {"prompt": [{"role": "user", "content": None}]}], "row 1 .*want a string, or parts"),
        ([{"prompt": SUM}, {"prompt": "1+1="}], "got a string as the prompt of row 1.*want a conversation"),
        ([{"prompt": "1+1=", "completions": "2"}], "a column 'completions'"),
        (
            [{"prompt": "1+1=", "image": None}],
            r"a column 'image', want text alone.*fix: dataset.remove_columns\('image'\)",
        ),
        # Refused before the file is opened.
        (PICTURES, "got train_dataset with a column 'images', want text alone"),
        (PICTURES.to_iterable_dataset(), "got train_dataset with a column 'images', want text alone"),
        ([{"prompt": [{"role": "user", "content": [{"type": "image"}]}]}], "row 0 .*text alone; fix: leave out"),
        ([{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="}], r"columns \['prompt'\] in row 1"),
        ({"train": [{"prompt": "1+1="}]}, r"got a dict as train_dataset.*choose a split of it \('train'\)"),
        (DatasetDict({"test": Dataset.from_list(some_rows(1))}), r"got a DatasetDict.*choose a split of it \('test'\)"),
        (["1+1="], "got a list as train_dataset"),
        ([{"prompt": "1+1="}, 2], "got a int as row 1"),
        (Dataset.from_list(some_rows(2)).with_format("pandas"), r"fix: rows that are dicts, not DataFrame, .*\(None\)"),
        ("prompts.jsonl", "got a str as train_dataset.*load_dataset"),
        (7, "got a int as train_dataset"),
        ((row for row in some_rows(2)), "got a generator as train_dataset.*from_generator"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_refused(dataset, message):
    with pytest.raises(DataError, match=message):
        check_dataset(dataset, name="train_dataset")


def test_a_prompt_may_be_what_a_transform_makes_of_other_columns():
    dataset = Dataset.from_list([{"sum": "1+1"}]).with_transform(
        lambda batch: {"prompt": [s + "=" for s in batch["sum"]]}
    )
    sampler = prompt_sampler(check_dataset(dataset, name="train_dataset"), prompts_per_batch=1, seed=0, shuffle=True)
    assert sampler.next_batch() == [{"prompt": "1+1="}]


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"other": ["1"]}, r"columns \['other'\] in row [0-3] of train_dataset, want those of row [0-3]: \['prompt'\]"),
        ({"prompt": ["1"], "more": [1]}, r"columns \['prompt', 'more'\] in row [0-3]"),
        ({"prompt": [None]}, "None as the prompt of row [0-3] of train_dataset, want a non-empty string"),
        ({"prompt": [""]}, "'' as the prompt of row [0-3]"),
        (
            {"prompt": [SUM]},
            "a conversation as the prompt of row [0-3] of train_dataset, want a string as in row [0-3]",
        ),
    ],
)
def test_what_a_transform_makes_of_a_row_later_is_checked_when_it_is_drawn(later, message):
    made = []

    def transform(batch):
        made.append(batch)
        return {"prompt": ["1"]} if len(made) < 7 else later

    dataset = check_dataset(Dataset.from_list(some_rows(4)).with_transform(transform), name="train_dataset")
    sampler = prompt_sampler(dataset, prompts_per_batch=1, seed=0, shuffle=True)
    assert [sampler.next_batch() for _ in range(6 - len(made))][-1] == [{"prompt": "1"}]
    with pytest.raises(DataError, match=f"^got {message}"):
        sampler.next_batch()


@pytest.mark.parametrize("odd", [{(1, 2): 3}, {1: "a", "b": 2}, {3, 4}, b"\xff", "\ud800", float("nan"), object()])
def test_a_run_may_save_whatever_columns_its_rows_have(odd):
    def make(value):
        return prompt_sampler([{"prompt": "1+1=", "odd": value}], prompts_per_batch=1, seed=0, shuffle=True)

    state = json.loads(json.dumps(make(odd).state_dict()))
    make(odd).load_state_dict(state)
    with pytest.raises(CheckpointError, match="train_dataset with contents="):
        make([odd]).load_state_dict(state)


def test_a_random_transform_is_no_other_dataset_and_images_are_not_decoded():
    rows = [{"sum": f"{number}+1=", "image": "nowhere.png"} for number in range(300)]
    dataset = Dataset.from_list(rows).cast_column("image", Image())
    moved = Dataset.from_list([{**row, "image": "elsewhere.png"} for row in rows]).cast_column("image", Image())
    draw = random.Random(0)
    noisy = dataset.with_transform(lambda batch: {"prompt": [s + str(draw.random()) for s in batch["sum"]]})
    assert fingerprint(dataset) == fingerprint(moved) == fingerprint(noisy)
    assert fingerprint(dataset) != fingerprint(dataset.select(range(299, -1, -1)))


def test_all_rows_of_a_stream_are_read_and_a_wrong_one_is_named():
    assert all_rows(some_stream(3), name="eval_dataset") == list(some_stream(3))
    with pytest.raises(DataError, match="of row 2 of eval_dataset"):
        all_rows([*some_rows(2), {**some_rows(1)[0], "prompt": 3}], name="eval_dataset")


def test_ranks_that_share_a_group_draw_the_same_prompts():
    def drawn(dataset, rank):
        options = {"prompts_per_batch": 3, "seed": 0, "shuffle": False, "world_size": 2, "repeats": 2}
        sampler = prompt_sampler(dataset, rank=rank, **options)
        return [[row["prompt"] for row in sampler.next_batch()] for _ in range(2)], sampler.used

    for dataset in (some_rows(6), some_stream(6)):
        a, b, c, d, e, f = (row["prompt"] for row in dataset)
        assert drawn(dataset, 0) == ([[a, a, b], [d, d, e]], 6)
        assert drawn(dataset, 1) == ([[b, c, c], [e, f, f]], 6)


@pytest.fixture
def chat_tokenizer(tokenizer):
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def test_prompts_are_encoded_by_kind(chat_tokenizer):
    def ids(*texts):
        return [[chat_tokenizer.convert_tokens_to_ids(character) for character in text] for text in texts]

    assert encode_prompts([{"prompt": "1+1="}, {"prompt": "2"}], chat_tokenizer) == ids("1+1=", "2")
    chats = [{"prompt": SUM}, {"prompt": SUM[1:]}]
    assert encode_prompts(chats, chat_tokenizer) == ids("a0=b1+1=c", "b1+1=c")
    assert encode_prompts(chats, chat_tokenizer, chat_template_kwargs={"tail": "*"}) == ids("a0*b1+1*c", "b1+1*c")
    begun = encode_prompts([{"prompt": BEGUN}], chat_tokenizer, chat_template_kwargs={"continue_final_message": True})
    assert begun == ids("a0=b1+1=c2-")
    assert encode_prompts([], chat_tokenizer) == []


@pytest.mark.filterwarnings("ignore")
def test_prompts_have_the_tokens_that_trl_gives_them(chat_tokenizer):
    trainer = pytest.importorskip("trl.trainer.grpo_trainer")
    trl_trainer = SimpleNamespace(
        processing_class=chat_tokenizer,
        _is_vlm=False,
        environment_factories=None,
        tools=None,
        chat_template=None,
        chat_template_kwargs={"tail": "*"},
    )
    for prompts in (["1+1=", "2"], [SUM, SUM[1:]]):
        ours = encode_prompts([{"prompt": p} for p in prompts], chat_tokenizer, chat_template_kwargs={"tail": "*"})
        assert ours == trainer.GRPOTrainer._tokenize_prompts(trl_trainer, prompts)[0]


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (BEGUN, {}, "ends with a message of 'assistant' as the prompt of row 1 .*continue_final_message"),
        (SUM, {"continue_final_message": True}, "ends with a message of 'user' as the prompt of row 1"),
        ([{"role": "tool", "content": "3"}], {}, "got TemplateError: no tools .* at the prompt of row 1 .'tool: 3'"),
    ],
)
def test_a_conversation_that_cannot_be_rendered_is_named(chat_tokenizer, prompt, options, message):
    rows = [{"prompt": BEGUN if options else SUM}, {"prompt": prompt}]
    with pytest.raises(DataError, match=message):
        encode_prompts(rows, chat_tokenizer, chat_template_kwargs=options, row_numbers=range(2))


def test_what_cannot_be_encoded_is_refused(tokenizer):
    with pytest.raises(DataError, match=r"tokenizer without a chat template.*fix"):
        encode_prompts([{"prompt": SUM}], tokenizer)
    with pytest.raises(DataError, match=r"line 2, want a Jinja template; fix: tokenizer\.chat_template, or"):
        encode_prompts([{"prompt": SUM}], tokenizer, chat_template_kwargs={"chat_template": "\n{% if %}"})
    given_one = encode_prompts([{"prompt": SUM}], tokenizer, chat_template_kwargs={"chat_template": TEMPLATE})
    assert tokenizer.decode(given_one[0]) == "a0=b1+1=c"
    with pytest.raises(DataError, match="got no token for the prompt of row 5"):
        encode_prompts(
            [{"prompt": SUM}], tokenizer, chat_template_kwargs={"chat_template": "{{ '' }}"}, row_numbers=[5]
        )
    with pytest.raises(InputError, match="got 'tokenize' in chat_template_kwargs"):
        encode_prompts([{"prompt": SUM}], tokenizer, chat_template_kwargs={"tokenize": False})


def test_records_and_rewards_get_the_kind_of_the_prompt():
    assert message_text("1+1=") == "1+1="
    assert message_text(SUM) == "system: 0\nuser: 1+1"
    assert as_completion({"prompt": "1+1="}, "2") == "2"
    assert as_completion({"prompt": SUM}, "2") == [{"role": "assistant", "content": "2"}]


@pytest.fixture
def prompt_files(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    for name, first in {"train": 0, "test": 2}.items():
        rows = Dataset.from_list([{"prompt": f"{number}="} for number in (first, first + 1)])
        rows.to_json(tmp_path / "files" / f"{name}.jsonl")
        rows.to_parquet(tmp_path / f"{name}.parquet")
        rows.to_csv(tmp_path / f"{name}.csv")
        rows.save_to_disk(tmp_path / "saved" / name)
    DatasetDict({name: Dataset.load_from_disk(tmp_path / "saved" / name) for name in ("train", "test")}).save_to_disk(
        tmp_path / "splits"
    )
    return tmp_path


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets 4 leaves a CSV file open
@pytest.mark.parametrize(
    ("source", "split", "numbers"),
    [
        ("files/test.jsonl", "train", "23"),
        ("files/*.jsonl", "train", "0123"),
        ("files", "test", "23"),
        ("train.parquet", "train", "01"),
        ("train.csv", "train", "01"),
        ("saved/train", "train", "01"),
        ("splits", "test", "23"),
    ],
)
def test_rows_are_loaded_from(prompt_files, source, split, numbers):
    rows = load_rows(str(prompt_files / source), split=split)
    assert isinstance(rows, Dataset)
    assert sorted(row["prompt"] for row in rows) == [f"{number}=" for number in numbers]


def test_a_file_with_brackets_in_its_name_is_no_pattern(prompt_files):
    name, deep = prompt_files / "rows[1].jsonl", prompt_files / "a" / "b" / "rows.jsonl"
    name.write_text('{"prompt": "itself"}')
    (prompt_files / "rows1.jsonl").write_text('{"prompt": "another"}')
    assert load_rows(str(name))["prompt"][:] == ["itself"]
    deep.parent.mkdir(parents=True)
    deep.write_text('{"prompt": "1"}\nnull')  # would crash Arrow
    with pytest.raises(DataError, match=r"row 1 of rows\.jsonl is null"):
        load_rows(str(prompt_files / "a" / "**" / "*.jsonl"))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # datasets 4 leaves a CSV file open
@pytest.mark.parametrize("source", ["files", "files/rows.csv"])
def test_what_pandas_takes_for_no_value_is_text_of_a_csv_file(tmp_path, monkeypatch, source):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    words = ["None", "NA", "n/a", "null", "nan", "yes", None]
    (tmp_path / "files").mkdir()
    lines = [f"{number}=,{word or ''}" for number, word in enumerate(words)]
    (tmp_path / "files" / "rows.csv").write_text("\n".join(["prompt,answer", *lines]))
    assert load_rows(str(tmp_path / source))["answer"][:] == words


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.jsonl", "none.jsonl.*cannot be loaded: no such file"),
        ("none*.jsonl", "no such file"),
        ("files", "Unknown split"),
        ("splits", r"it has the splits \['test', 'train'\]"),
        ("bad.jsonl", "JSON parse error"),
    ],
)
def test_a_source_that_cannot_be_loaded_is_named(prompt_files, source, message):
    (prompt_files / "bad.jsonl").write_text('{"prompt": "1"}\n{2}')
    with pytest.raises(DataError, match=message):
        load_rows(str(prompt_files / source), split="dev")


NESTED = recursive(
    none() | integers(0, 3),
    lambda inner: lists(inner, max_size=2) | dictionaries(text(max_size=2), inner, max_size=2),
    max_leaves=6,
)


def keys_of_none(value) -> bool:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any((isinstance(value, dict) and one is None) or keys_of_none(one) for one in entries)


@settings(max_examples=30)
@given(more=dictionaries(text(min_size=1), NESTED, max_size=3), parts=lists(text(), min_size=1, max_size=3))
def test_conversations_lose_the_keys_that_arrow_made_and_parts_become_text(more, parts):
    content = [{"type": "text", "text": part, "image": None} for part in parts]
    first = {**more, "role": "user", "content": content}
    prompt = [first, {"role": "tool", "content": "2", "name": None}]
    (message, last), before = clean_prompt(prompt), copy.deepcopy(prompt)
    assert message["content"] == "".join(parts)
    assert last == {"role": "tool", "content": "2"}
    assert not keys_of_none(message)
    assert {name for name, value in first.items() if value is not None} == message.keys()
    assert clean_prompt([message, last]) == [message, last]
    assert prompt == before


@pytest.mark.parametrize("kind", [list, Dataset.from_list])
def test_every_reader_of_a_conversation_sees_it_clean(chat_tokenizer, make_trainer, kind):
    call = {"type": "function", "function": {"name": "f", "arguments": "1"}}
    rows = [
        {"prompt": [{"role": "user", "content": "1"}], "answer": "1"},
        {"prompt": [{"role": "assistant", "content": "2", "tool_calls": [call]}, *SUM], "answer": "2"},
    ]
    chat_tokenizer.chat_template = (
        "{% for m in messages %}{% if 'tool_calls' in m and m.tool_calls | length != 1 %}{{ raise_exception('one') }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    )
    seen = []

    def reward(prompts, completions, **columns):
        seen.extend(prompts)
        return [float(len(completion[0]["content"])) for completion in completions]

    make_trainer(reward, dataset=kind(rows), eval_dataset=kind(rows), max_steps=2).train()
    assert not any(map(keys_of_none, seen))
    assert {len(prompt) for prompt in seen} == {1, 3}


@pytest.mark.parametrize("part", [{"type": "image", "image": "a.png"}, {"type": "text"}, "text", {"text": "1"}])
def test_a_part_of_a_message_that_is_no_text_is_refused(part):
    rows = [{"prompt": [{"role": "user", "content": [{"type": "text", "text": "1"}, part]}]}]
    with pytest.raises(DataError, match=r"row 0 of train_dataset, want a string, or parts \{'type': 'text'"):
        check_dataset(rows, name="train_dataset")


class Procedural(torch.utils.data.Dataset):
    """A row for every index."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"question": f"{index}="}


def test_a_dataset_with_a_row_for_every_index_is_read_by_its_length():
    renamed_rows = renamed(Procedural(), {"prompt": "question"})
    assert [row["prompt"] for row in renamed_rows] == ["0=", "1=", "2=", "3=", "4="]
    assert len(first_rows(Procedural(), 9)) == 5
    assert len(as_conversations(renamed_rows, "")) == 5
    assert len(all_rows(renamed_rows, name="eval_dataset")) == 5
