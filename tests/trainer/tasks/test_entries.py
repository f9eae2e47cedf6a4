"""Entries as text and back, how difficult they are, and the answer in a completion. None of it needs reasoning-gym."""

import doctest
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fused_grpo.errors import DataError
from fused_grpo.trainer.tasks import entries
from fused_grpo.trainer.tasks.entries import as_text, difficulties, from_text, last_answer, tagged_answer

KEYS = st.one_of(st.text(max_size=4), st.integers(), st.booleans(), st.tuples(st.integers(), st.integers()))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(KEYS, inner, max_size=3),
        st.sets(st.integers(), max_size=3),
        st.frozensets(st.text(max_size=2), max_size=3),
    ),
    max_leaves=8,
)


def exact(value):
    """A form that tells 1 from True and (1,) from [1]."""
    if isinstance(value, dict):
        return "dict", sorted(((exact(key), exact(entry)) for key, entry in value.items()), key=repr)
    if isinstance(value, list | tuple):
        return type(value), [exact(entry) for entry in value]
    return type(value), value


@given(st.dictionaries(st.text(max_size=4), VALUES, max_size=4))
def test_an_entry_is_the_same_after_its_way_through_text(metadata):
    entry = {"question": "q", "answer": None, "metadata": metadata}
    assert exact(from_text(as_text(entry))) == exact(entry)


def test_numbers_of_numpy_become_those_of_python_and_the_rest_is_refused():
    entry = {"board": np.arange(4).reshape(2, 2), "n": np.int64(3), "p": np.float32(0.5)}
    assert from_text(as_text(entry)) == {"board": [[0, 1], [2, 3]], "n": 3, "p": 0.5}
    with pytest.raises(DataError, match="a object, in an entry, want plain values"):
        as_text({"it": object()})


def entry(difficulty=None, **metadata):
    return {"metadata": metadata | ({} if difficulty is None else {"difficulty": difficulty})}


def test_difficulty_is_where_an_entrys_own_values_lie():
    listed = {"num_terms": (2, 6), "words": (1, 9), "level": 3}
    rows = [entry(listed, num_terms=n, num_words=w) for n, w in ((2, 1), (6, 1), (4, 9))]
    assert difficulties(rows) == [0.0, 0.5, 0.75]  # what does not vary does not count
    assert difficulties([entry({"difficulty": level}) for level in (1, 5, 3)]) == [0.0, 1.0, 0.5]


@pytest.mark.parametrize("difficulty", [None, {}, "hard", {"n": (1, 2)}, {"words": ["a"]}])
def test_without_a_number_that_varies_there_is_no_difficulty(difficulty):
    assert difficulties([entry(difficulty, n=1, words=["a"]), entry(difficulty, n=1, words=["b"])]) is None


def test_a_value_that_some_entries_lack_does_not_count():
    assert difficulties([entry({"n": (1, 2)}, n=1), entry({"n": (1, 2)}), entry({"n": (1, 2)}, n=2)]) is None


@pytest.mark.parametrize(
    ("text", "correct", "answer"),
    [
        ("1 <answer>2</answer> 3 <answer> 4\n</answer> 5", "4", "4"),
        ("<answer>a<answer>b</answer>", "b", "b"),
        ("<answer>never closed 7", "7", "7"),
        ("</answer>9<answer>", "9", "9"),
        ("It is 12, so 30 + 12 = 42.", "42", "42"),
        ("-3 - 4 = -7", "-7", "-7"),
        ("Answer: \\boxed{5} because of 9", "5", "5"),
        ("#### 8", "8", "8"),
        ("<think>3 or 4</think>\nfour", "four", "four"),
        ("no number", "5", "no number"),
        ("", "5", ""),
        ("  red \n", "red", "red"),
        ("1 0 1", "1 0 1", "1 0 1"),
    ],
)
def test_the_answer_in_a_completion(text, correct, answer):
    assert last_answer(text, correct) == answer


def test_tags_alone_are_what_reasoning_gym_reads():
    assert tagged_answer("the answer is 4", "4") is None
    assert tagged_answer("<answer>" * 300_000) is None  # a regular expression that is not greedy would take minutes


def test_the_examples_of_the_docstrings_hold():
    assert doctest.testmod(entries).failed == 0


def test_no_form_of_json_is_mistaken_for_one_of_ours():
    assert json.loads(as_text({"!tuple": [1]})) == {"!dict": [["!tuple", [1]]]}
    assert from_text(as_text({"!tuple": [1]})) == {"!tuple": [1]}
