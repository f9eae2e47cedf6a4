"""Text that others wrote: whatever it is, an error shows it without control characters and of a bounded length."""

import pickle
import traceback
import unicodedata

import pytest
from hypothesis import given
from hypothesis.strategies import characters, integers, one_of, sampled_from, text

from fused_grpo import errors
from fused_grpo.errors import CHARACTERS, LINES, NOTE, quoted, shown

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.FusedGRPOError)]
hostile = one_of(
    text(characters(exclude_categories=())),  # surrogates, controls, bidirectional overrides, unassigned
    text(sampled_from("\x1b[31m\u202e\n\t\r\x00\ud800a")),
    integers(0, 3 * CHARACTERS).map(lambda n: "\x1b[2J" * n),
    integers(0, 3 * CHARACTERS).map(lambda n: "\U000e0001" * n + "\n" * n),
)


class Silent:
    """Neither `str` nor `repr` work."""

    def __str__(self) -> str:
        raise RuntimeError("\x1b[31mno")

    __repr__ = __str__


def harmless(written: str) -> bool:
    controls = {"Cc", "Cf", "Cs", "Co", "Cn"}
    return not any(unicodedata.category(c) in controls for c in written if c not in "\n\t")


@given(hostile)
def test_what_is_shown_is_harmless_bounded_and_stays_as_it_is(written):
    safe = shown(written)
    assert harmless(safe)
    assert len(safe) <= CHARACTERS + NOTE
    assert safe.count("\n") <= LINES
    assert shown(safe) == safe
    if harmless(written) and len(written) <= CHARACTERS and written.count("\n") < LINES:
        assert safe == written


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_of_ours_shows_its_text_so_here_and_in_another_process(kind):
    error = kind("got \x1b[31m" + "y" * 10_000_000 + "\u202e; fix: it")
    assert str(error).startswith("got \\x1b[31myyy")
    assert str(error).endswith("yyy\\u202e; fix: it")
    assert len(str(error)) <= CHARACTERS + NOTE
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    assert str(kind()) == ""


def test_values_are_quoted_whatever_their_repr_does():
    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    assert quoted("p\x1b") == "'p\\x1b'"
    assert len(quoted(["x" * 10_000_000] * 2)) <= 500 + NOTE
    assert (quoted(deep), quoted(Silent())) == ("<list>", "<Silent>")
    assert shown(Silent()) == "Silent without text (RuntimeError)"


@pytest.mark.parametrize("implicit", [False, True])
def test_causes_are_printed_as_harmless_as_the_error_itself(implicit):
    def user_code():
        try:
            raise KeyError("first " + "\x1b[31m")
        except KeyError:
            raise ValueError("\x1b[2J" * 1_000_000)  # noqa: B904 - as a user would

    try:
        try:
            user_code()
        except ValueError as cause:
            raise errors.RewardError("ours") from (cause if not implicit else ValueError("\x1b[m").with_traceback(None))
    except errors.RewardError as error:
        errors.show_causes(error)
        printed = "".join(traceback.format_exception(error))
    assert harmless(printed)
    assert len(printed) < 3 * CHARACTERS
    assert "ValueError: \\x1b[" in printed
    assert ("in user_code" in printed) is not implicit


def test_causes_that_may_be_printed_are_the_same_objects_afterwards():
    cause = ValueError("plain")
    error = errors.InputError("ours")
    error.__cause__ = cause
    errors.show_causes(error)
    assert error.__cause__ is cause
    foreign = RuntimeError("not ours")
    foreign.__cause__ = raw = ValueError("\x1b")
    errors.show_causes(foreign)
    assert foreign.__cause__ is raw
