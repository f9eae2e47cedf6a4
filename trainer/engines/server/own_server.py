"""A vLLM server of the trainer's own, beside each rank; docs/engines.md says why ("Starting a server").

It ends with the trainer, by whatever signal that ends: serve_beside.py notices it, removes what the trainer has left in
memory, and ends its process group, to which vLLM's own processes belong. It listens at a socket in a folder that this
user alone can enter, and at no port.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from fused_grpo.errors import shown
from fused_grpo.trainer.common.contexts import finalizer
from fused_grpo.trainer.common.redaction import public_text
from fused_grpo.trainer.engines.server import server_command
from fused_grpo.trainer.engines.vllm.start_vllm import DEFAULT_ENVIRONMENT
from fused_grpo.trainer.engines.weight_files import temporary_folder, usual_parents
from fused_grpo.trainer.rewards.isolation import import_path

# Of this process' place among the ranks, to which its server does not belong: for torchrun's last one vLLM may wait for
# a store that does not exist. The key is of the user's servers.
_NOT_INHERITED = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
_NOT_INHERITED |= {"TORCHELASTIC_USE_AGENT_STORE", "VLLM_API_KEY"}
_ERROR, _SHOWN = re.compile(r"\w*[Ee]rror: .+"), 2
_END_SECONDS = 5.0
_READ = 1 << 22  # bytes at the end of a log, for each request that fails: in days a log may outgrow the memory
_SCRIPT = Path(__file__).with_name("serve_beside.py")


class OwnServer:
    """A vLLM server that starts beside this process; an engine that is given it waits until it is up.

    Args:
        options: arguments of `vllm.LLM`, which become those of vLLM's command line.
        log: the file that what it prints is added to; it stays.
    """

    url = "http://vllm-beside-the-trainer"  # in requests and errors; `socket` is where it listens

    def __init__(
        self, folder: str | Path, options: Mapping[str, Any], *, environment: Mapping[str, str], log: Path
    ) -> None:
        with ExitStack() as resources:
            home = resources.enter_context(temporary_folder(0))
            self.socket, self.log = str(home / "socket"), log.absolute()
            # A progress bar of each sync would end the sync where the disk of the log is full.
            quiet = ("--uvicorn-log-level", "warning", "--disable-uvicorn-access-log", "--no-use-tqdm-on-load")
            command, variables = server_command(folder, options=("--uds", self.socket, *quiet, *as_flags(options)))
            inherited = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
            variables = {**DEFAULT_ENVIRONMENT, **inherited, **variables, **_device(), **environment}
            variables["VLLM_RPC_BASE_PATH"] = str(home)  # of vLLM's own sockets; a long TMPDIR has no room for them
            variables["PYTHONPATH"] = import_path()
            variables["FUSED_GRPO_SERVER_ARGUMENTS"] = json.dumps(command[2:])  # after `python -m`
            variables["FUSED_GRPO_LEFT_IN"] = json.dumps(usual_parents())
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("ab") as file:  # another run may be writing to it
                self._begin = file.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-P", str(_SCRIPT)],
                    env=variables,
                    stdin=subprocess.PIPE,
                    stdout=file,
                    stderr=file,
                    start_new_session=True,  # a process group of its own, which Ctrl-C does not reach
                )
            resources.callback(_end, self._process)
            self.close = finalizer(self, resources.pop_all().close)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def errors(self) -> str:
        """Whether it has ended, and the first errors in its log, from which the others follow; "" for neither."""
        has_ended, lines = self.has_ended, list[str]()
        with suppress(FileNotFoundError):  # somebody has removed it
            with self.log.open("rb") as file:
                file.seek(max(self._begin, self.log.stat().st_size - _READ))
                said = file.read(_READ).decode(errors="replace").splitlines()
            lines = [line for line in said if line.strip() and "WARNING" not in line]
        named = [match[0] for match in map(_ERROR.search, lines) if match]
        marked = [line for line in lines if "ERROR" in line]
        first = [*dict.fromkeys(named)][:_SHOWN] or marked[:1] or lines[-1:] * has_ended
        ended = [f"an end with status {self._process.poll()}"] if has_ended else []
        return shown(public_text("; ".join(ended + first)), 800)


def as_flags(options: Mapping[str, Any]) -> list[str]:
    """Arguments of `vllm.LLM` as its command line has them; None is its default."""
    flags = list[str]()
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            items = value if isinstance(value, list | tuple | set) else [value]
            flags += [f"--{flag}", *(json.dumps(item) if isinstance(item, dict) else str(item) for item in items)]
    return flags


def _device() -> dict[str, str]:
    """The environment in which vLLM sees this rank's device alone."""
    if not torch.cuda.is_available():
        return {}
    # vLLM refuses two lists that differ.
    names = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"] if torch.version.hip else ["CUDA_VISIBLE_DEVICES"]
    index, visible = torch.cuda.current_device(), next(filter(None, map(os.environ.get, names)), None)
    return dict.fromkeys(names, visible.split(",")[index].strip() if visible else str(index))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Have the process group end, while vLLM removes its shared memory, and kill what is left after some seconds."""
    deadline = time.monotonic() + _END_SECONDS
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
