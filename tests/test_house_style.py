"""scripts/house_style.py finds what it forbids, in a small house of its own."""

import importlib.util
import re
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / "scripts" / "house_style.py"
HOUSE = {
    "trainer/types.py": '"""Types."""\n',
    "trainer/batching/packing.py": '"""Rows."""\n\nfrom fused_grpo.trainer import types\n',
    "trainer/loop.py": '"""The loop."""\n\nfrom fused_grpo.trainer.batching.packing import pack\n',
    "docs/README.md": "# Pages\n\n[Rows](rows.md#one-row) `trainer/loop.py`\n",
    "docs/rows.md": "# Rows\n\n## One row\n",
    "CONTRIBUTING.md": "loop         -> batching\nbatching     -> types\ntypes        ->\n",
}


@pytest.fixture
def breaches(tmp_path, monkeypatch, capsys):
    """What the script says of the house with some files changed."""
    spec = importlib.util.spec_from_file_location("house_style", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "ROOT", tmp_path)

    def breaches_of_house(**changed):
        for name, text in {**HOUSE, **changed}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        failed = script.main()
        said = capsys.readouterr().out
        return said if failed else ""

    return breaches_of_house


def test_a_house_in_order_passes(breaches):
    assert breaches() == ""


@pytest.mark.parametrize(
    "line",
    [
        "from fused_grpo.trainer.loop import step",
        "import fused_grpo.trainer.loop",
        "from fused_grpo.trainer import loop",
        "def late():\n    from fused_grpo.trainer import loop",
        "if TYPE_CHECKING:\n    from fused_grpo.trainer.loop import Trainer",
    ],
)
def test_an_import_that_is_turned_round_is_found(breaches, line):
    said = breaches(**{"trainer/types.py": f'"""Types."""\n\n{line}\n'})
    assert "fused_grpo.trainer.types imports fused_grpo.trainer.loop, which is above it" in said
    assert "a circle of imports: fused_grpo.trainer.batching.packing, fused_grpo.trainer.loop" in said


def test_a_circle_within_a_room_is_found(breaches):
    rows = '"""Rows."""\n\nfrom fused_grpo.trainer.batching import packing\n'
    packing = HOUSE["trainer/batching/packing.py"] + "from fused_grpo.trainer.batching import rows\n"
    said = breaches(**{"trainer/batching/rows.py": rows, "trainer/batching/packing.py": packing})
    assert "a circle of imports: fused_grpo.trainer.batching.packing, fused_grpo.trainer.batching.rows" in said


def test_the_floors_keep_their_order(breaches):
    said = breaches(**{"fused_grpo/op.py": '"""An op."""\n\nfrom fused_grpo.trainer import types\n'})
    assert "fused_grpo.op imports fused_grpo.trainer.types, which is above it" in said
    assert "none of the rooms" in breaches(**{"trainer/attic.py": '"""Old things."""\n'})


def test_the_rooms_of_the_ops_keep_their_order(breaches):
    passes = '"""Passes."""\n\nfrom fused_grpo.head import head\n'
    said = breaches(**{"fused_grpo/passes/rows.py": passes, "fused_grpo/head/head.py": '"""The head."""\n'})
    assert "fused_grpo.passes.rows imports fused_grpo.head.head, which is above it" in said
    assert "none of the rooms integrations" in breaches(**{"fused_grpo/attic.py": '"""Old things."""\n'})


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("-> batching", "-> batching types", "has the line 'loop         -> batching types', which is not"),
        ("-> types", "->", "lacks the line 'batching     -> types'"),
        ("types        ->\n", "", "lacks the line 'types        ->'"),
        ("loop         -> batching\nbatching     -> types", "batching     -> types\nloop         -> batching", "order"),
    ],
)
def test_an_arrow_that_is_not_drawn_or_not_there_is_found(breaches, old, new, says):
    assert says in breaches(**{"CONTRIBUTING.md": HOUSE["CONTRIBUTING.md"].replace(old, new)})


def test_the_files_of_the_head_are_drawn_from_top_to_bottom(breaches):
    files = {"head": '"""The head."""\n', "plans": '"""Plans."""\n\nfrom fused_grpo.head import head\n'}
    files = {f"fused_grpo/head/{name}.py": text for name, text in files.items()}
    drawn = HOUSE["CONTRIBUTING.md"] + "head         ->\nplans              -> head\nhead               ->\n"
    assert breaches(**files, **{"CONTRIBUTING.md": drawn}) == ""
    said = breaches(**files, **{"CONTRIBUTING.md": drawn.replace("-> head", "->")})
    assert "lacks the line 'plans              -> head'" in said


def test_the_drawing_names_the_rooms_of_the_floor_below(breaches):
    types = '"""Types."""\n\nfrom fused_grpo import config, kernels\n'
    below = {"fused_grpo/config.py": '"""Options."""\n', "kernels/torch-ext/fused_grpo_kernels/__init__.py": types[:13]}
    said = breaches(**below, **{"trainer/types.py": types})
    assert "the drawing lacks the line 'types        -> | config kernels'" in said


@pytest.mark.parametrize(
    "text", ["def is_used_up(): ...", "# Whoever calls.", "rows = dealt", "# Rehearsed by Farm 2."]
)
def test_a_word_that_is_not_the_fields_is_found(breaches, text):
    assert "trainer/types.py:3: " in breaches(**{"trainer/types.py": f'"""Types."""\n\n{text}\n'})


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("left, right = 0, 1", "left"),
        ("def f(**how): ...", "how"),
        ("f = lambda of_rows: of_rows", "of_rows"),
        ("class A:\n    def f(self): self.known, self.done = 0, 1", "known"),
        ("class A:\n    done: int\n    some: int", "some"),
        ("done = 1", "done"),
    ],
)
@pytest.mark.parametrize("folder", ["trainer", "bench", "tests"])
def test_a_name_that_does_not_say_what_it_is_is_found(breaches, folder, line, name):
    said = breaches(**{f"{folder}/types.py": f'"""Types."""\n\n{line}\n'})
    assert re.findall(r"types\.py:(\d): '(\w+)' is vague", said) == [(f"{3 + line.count(chr(10))}", name)]


def test_a_function_and_a_call_may_have_such_names(breaches):
    text = "def of_rows(): ...\n\n\nof_rows(some=theirs.left)\n"
    assert breaches(**{"trainer/types.py": f'"""Types."""\n\n{text}'}) == ""


def test_a_test_name_that_is_too_long_is_found(breaches):
    for length, said in ((70, ""), (71, "has 71 characters, at most 70")):
        name = f"test_{'a' * (length - 5)}"
        assert said in (output := breaches(**{"tests/test_a.py": f"def {name}(): ...\n"}))
        assert bool(output) == bool(said)


@pytest.mark.parametrize("text", ["git push", "push_to_hub", "generate_ahead", "divided by 2", "handset"])
def test_a_word_that_is_the_fields_is_not(breaches, text):
    assert breaches(**{"trainer/types.py": f'"""Types: {text}."""\n'}) == ""


def kernel(*, lines=2, arguments=1, decorator="@triton.jit"):
    """A module with a jit function of so many lines, its signature and docstring among them."""
    names = ", ".join(f"a{i}" for i in range(arguments - 1)) + ", *, LAST: tl.constexpr"
    body = ["    pass"] * (lines - 2)
    return "\n".join(
        ['"""A pass."""', decorator, f"def _kernel({names.lstrip(', ')}):", '    """Grid: rows."""', *body, ""]
    )


KERNEL_FILE = "kernels/torch-ext/fused_grpo_kernels/rows.py"


@pytest.mark.parametrize("decorator", ["@triton.jit", "@triton.jit(do_not_specialize=['N'])"])
@pytest.mark.parametrize(
    ("size", "says"), [({"lines": 91}, "91 lines, at most 90"), ({"arguments": 25}, "25 arguments, at most 24")]
)
def test_a_kernel_that_is_too_long_is_not_accepted(breaches, decorator, size, says):
    assert f"_kernel is a kernel {'of' if 'lines' in size else 'with'} {says}" in breaches(
        **{KERNEL_FILE: kernel(decorator=decorator, **size)}
    )


def test_a_kernel_of_a_page_passes(breaches):
    assert breaches(**{KERNEL_FILE: kernel(lines=90, arguments=24)}) == ""


@pytest.mark.parametrize(
    ("page", "says"),
    [
        ("[none](none.md)", "a link to none.md, which does not exist"),
        ("[rows](rows.md#two-rows)", "a link to rows.md#two-rows, which does not exist"),
        ("`trainer/none.py`", "names trainer/none.py, which does not exist"),
        ("nothing", "docs/rows.md: docs/README.md has no link to it"),
        ("line\n" * 250, "251 lines, at most 250"),
        ("| a | b |\n|---|---|\n| 1 | 2 |\n\n| 3 | 4 |", "'| 3 | 4 |' begins a table without a header"),
    ],
)
def test_a_page_that_leads_nowhere_is_found(breaches, page, says):
    assert says in breaches(**{"docs/README.md": f"{page}\n"})
