"""Packages of extras: what is said of one that is missing, and nothing of the source of one that is there."""

import sys
import warnings

import pytest

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.common.packages import installed
from fused_grpo.trainer.rewards.reward_call import load_reward

# What Python 3.11 to 3.13 say of such a source, once, when they compile it.
SOURCES = {
    "is with a literal": 'same = 0 is "text"',
    "is with a number": "same = [] is not 1",
    "an assertion of a tuple": 'assert (False, "a reason")',
    "a call of a text": 'called = lambda: "text"()',
    "an index that is none": "item = lambda: [1, 2][3.5]",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Make a package of one module of this source beside an empty `__init__.py`, as pip leaves it: not compiled."""
    monkeypatch.syspath_prepend(tmp_path)
    before = set(sys.modules)

    def make(source: str) -> None:
        (tmp_path / "of_others").mkdir()
        (tmp_path / "of_others" / "__init__.py").write_text("from of_others import inside")
        (tmp_path / "of_others" / "inside.py").write_text(source + "\n")

    yield make
    for name in set(sys.modules) - before:
        if name.startswith("of_others"):
            del sys.modules[name]


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_the_source_of_others_is_not_shown_to_a_user(package, source):
    package(source)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        assert installed("of_others", extra="tasks").inside
    assert shown == []


def test_what_a_package_says_itself_is_shown(package):
    package("import warnings\nwarnings.warn('this needs a newer libx')")
    with pytest.warns(UserWarning, match="a newer libx"):
        installed("of_others", extra="tasks")


def test_of_a_users_own_file_python_says_it(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text('def reward(completions, **columns):\n    return [float(one is "yes") for one in completions]\n')
    with pytest.warns(SyntaxWarning, match='"is" with'):
        load_reward(f"{path}:reward")


def test_one_that_cannot_be_imported_is_named_with_its_extra(package):
    package("import no_such_library")
    with pytest.raises(UnavailableError, match=r"no of_others .*no_such_library.* pip install 'fused-grpo\[tasks\]'"):
        installed("of_others", extra="tasks")
