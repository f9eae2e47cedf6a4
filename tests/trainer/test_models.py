"""Every causal LM type of transformers: docs/models.md says what becomes of it, and that is what becomes of it."""

import re
from pathlib import Path

import pytest
import tiny_models
import transformers

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "models.md").read_text()
OUTCOMES = re.findall(r"^\| (\w|refused|not built here) \| (`.*?`) \|", TEXT, flags=re.MULTILINE)
ROWS = {
    name: outcome if len(outcome) > 1 else "right"
    for outcome, names in OUTCOMES
    for name in re.findall(r"`([\w-]+)`", names)
}
VERSION = re.findall(r"^transformers ([\d.]+): \d+ types", TEXT, flags=re.MULTILINE)[0]

# The most used, and those that were wrong once.
OFTEN = {
    *(
        "bert",
        "bloom",
        "falcon",
        "fuyu",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_bigcode",
        "gpt_neox_japanese",
        "gpt_oss",
    ),
    *("granite", "llama", "llama4", "mamba", "minicpm3", "mistral", "mixtral", "mllama", "modernbert-decoder", "opt"),
    *("persimmon", "phi3", "qwen2", "qwen3", "qwen3_moe", "roberta", "seed_oss", "starcoder2", "xglm"),
}

pytestmark = pytest.mark.skipif(transformers.__version__ != VERSION, reason="the page is about another transformers")


@pytest.mark.parametrize(
    "model_type", [name if name in OFTEN else pytest.param(name, marks=pytest.mark.full) for name in tiny_models.TYPES]
)
def test_a_type_is_right_or_refused_by_name(model_type, tmp_path):
    word, why = tiny_models.outcome(model_type, tmp_path)
    assert (word, bool(why)) == (ROWS[model_type], word != "right")


def test_the_page_counts_every_type():
    counts = [list(ROWS.values()).count(word) for word in ("right", "refused", "not built here")]
    said = re.findall(r"(\d+) types, (\d+) right, (\d+) refused, (\d+) not built here", TEXT)[0]
    assert tuple(map(int, said)) == (len(tiny_models.TYPES), *counts)
    assert OFTEN <= ROWS.keys() == set(tiny_models.TYPES)
