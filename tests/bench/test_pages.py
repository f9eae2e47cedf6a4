"""Figures in pages are equal to those of their raw files."""

import re
from pathlib import Path

import pytest

from fused_grpo.bench.pages import END, PAGES, START, figures, main
from fused_grpo.errors import DataError

ROOT = Path(__file__).resolve().parent.parent.parent


def test_the_pages_of_this_repository_are_current(capsys):
    """fix: python -m fused_grpo.bench.pages"""
    assert main(["--check", *(str(ROOT / page) for page in PAGES)]) == 0, capsys.readouterr()


def test_the_pages_with_figures_have_blocks():
    for name in ("README.md", "docs/accuracy.md", "bench/predictions/README.md"):
        assert START.search((ROOT / name).read_text()), f"{name} has no block of figures"


@pytest.fixture
def page(build, saved, tmp_path):
    """A page with one block, in a folder below that of its file."""
    saved(build.result())

    def make(what="loss", path="../result.json"):
        (tmp_path / "docs").mkdir(exist_ok=True)
        file = tmp_path / "docs" / "page.md"
        file.write_text(f"Before.\n<!-- figures: {what} from {path} -->\nold\n{END}\nAfter.\n")
        return file

    return make


def test_a_block_is_rewritten_and_nothing_else(page):
    file = page()
    assert main([str(file)]) == 0
    text = file.read_text()
    assert re.match(r"Before\.\n<!-- figures: loss from \.\./result\.json -->\n", text)
    assert "| fused-grpo 1.2.3 | **1.10** | 1.10 | **250** | 4.0e-07 |" in text
    assert "Raw file: [result.json](../result.json).\n<!-- end of figures -->\nAfter.\n" in text
    assert "old" not in text
    assert main([str(file)]) == 0
    assert file.read_text() == text


def test_check_changes_nothing_and_fails_until_it_is_current(page, capsys):
    file = page()
    before = file.read_text()
    assert main(["--check", str(file)]) == 1
    assert f"fix: python -m fused_grpo.bench.pages {file}" in capsys.readouterr().out
    assert file.read_text() == before
    main([str(file)])
    assert main(["--check", str(file)]) == 0


def test_every_block_of_a_page_is_rewritten(page):
    file = page()
    file.write_text(file.read_text() + f"\n<!-- figures: machine from ../result.json -->\n{END}\n")
    main([str(file)])
    assert file.read_text().count("Raw file") == 2
    assert "Measured on cpu-2-cores (Intel Xeon, 2 CPU cores" in file.read_text()


def test_a_block_may_select_a_group(build, saved, page):
    work = build.WORK.__class__(kind="logprobs", head="GPT-2", tokens=128)
    saved(build.result([build.head("fused-grpo"), build.head("fused-grpo", work)]))
    file = page("logprobs of GPT-2, N=128")
    assert main([str(file)]) == 0
    assert f"{work.name}:\n\n" in file.read_text()


def test_a_table_over_n_has_each_group_and_what_was_left_out(build, saved, page):
    works = [build.WORK.__class__(kind="loss", head="GPT-2", tokens=tokens) for tokens in (1024, 4096)]
    rows = [build.head(name, work) for work in reversed(works) for name in ("products alone", "fused-grpo")]
    saved(build.result([*rows, build.head("TRL", works[0], peak_bytes=None)]))
    file = page("over of loss, GPT-2")
    assert main([str(file)]) == 0
    text = file.read_text()
    assert "| s (MiB) | N=1,024 | N=4,096 |\n" in text
    assert "| products alone | 0.500 (400) | 2.00 (400) |\n" in text
    assert "| fused-grpo | **0.550** (250) | **2.20** (250) |\n| TRL | 1.35 | - |\n" in text


def test_peers_that_win_and_those_that_are_absent_show(build, saved, page):
    fast = build.head("Liger GRPO", seconds=1.02, peak_bytes=2**20)
    absent = [{"group": build.WORK.name, "implementation": "verl", "why": "not installed"}]
    saved(build.result([build.head("fused-grpo"), fast], absent=absent))
    file = page()
    main([str(file)])
    assert "| Liger GRPO 1.2.3 | **1.02** | - | **1.00** | 9.0e-06 |" in file.read_text()
    assert "| fused-grpo 1.2.3 | 1.10 | - | 250 | 4.0e-07 |" in file.read_text()
    assert "Not measured here: verl." in file.read_text()


def test_trainers_have_their_speed(build, saved):
    extra = {"completion_tokens_per_second": 2446.3, "peak_bytes": 2**29}
    rival = {"completion_tokens_per_second": 368.4, "peak_bytes": 2**32}
    trainers = [
        build.other("training phase", "fused-grpo trainer", 0.69, **extra),
        build.other("training phase", "TRL", 4.6, **rival),
    ]
    path = saved(build.result([build.head("fused-grpo"), *trainers]))
    text = figures("trainer", None, path)
    assert text.startswith("training phase:\n\n|  | time (s) | spread | completion tokens/s | peak memory (MiB) |")
    assert "| fused-grpo trainer | **0.690** | 5% | 2,446 | **512** |" in text
    with pytest.raises(DataError, match="want one of: training phase; fix"):
        figures("trainer", "evaluation", path)


@pytest.mark.parametrize(
    ("what", "path", "says"),
    [
        (
            "speed",
            "../result.json",
            "got the figures 'speed', want loss, logprobs, divergence, distillation, over, trainer, ",
        ),
        ("logprobs", "../result.json", "got no group with logprobs"),
        ("loss", "../other.json", "got no file at"),
    ],
)
def test_a_block_that_cannot_be_filled_is_an_error_and_not_a_gap(page, capsys, what, path, says):
    file = page(what, path)
    before = file.read_text()
    assert main([str(file)]) == 2
    assert says in capsys.readouterr().err
    assert file.read_text() == before


def test_a_block_without_an_end_is_refused(page, capsys):
    file = page()
    file.write_text(file.read_text().replace(END, ""))
    assert main([str(file)]) == 2
    assert "without its end" in capsys.readouterr().err


def test_a_page_that_is_not_there_is_no_pass(tmp_path, capsys):
    assert main(["--check", str(tmp_path / "none.md")]) == 2
    assert "none.md" in capsys.readouterr().err
