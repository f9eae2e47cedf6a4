"""A whole run writes no secret and no pickle to its files, and listens on no port that other machines reach."""

import os
import stat
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fused_grpo.errors import InputError
from fused_grpo.trainer import GRPOConfig
from fused_grpo.trainer.engines.server import server_command
from fused_grpo.trainer.engines.vllm import start_vllm
from fused_grpo.trainer.engines.weight_files import temporary_weight_files

SCRIPT = Path(__file__).with_name("tiny_run.py")
SECRET = "planted0123456789abcdefplanted0123"
ENVIRONMENT = {"HF_TOKEN": f"hf_{SECRET}", "WANDB_API_KEY": SECRET, "OPENAI_API_KEY": f"sk-{SECRET}"}


@pytest.fixture(scope="module")
def finished(fork_server, tmp_path_factory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("secrets")
    output = fork_server.run(SCRIPT, folder, SECRET, env=ENVIRONMENT)
    files = [path for path in (folder / "run").rglob("*") if path.is_file()]
    return SimpleNamespace(output=output, files={path.relative_to(folder): path.read_bytes() for path in files})


def test_no_file_and_no_line_of_a_run_holds_a_secret(finished):
    names = {path.name for path in finished.files}
    assert {"run.json", "metrics.jsonl", "rollouts.jsonl", "report.html", "README.md", "manifest.json"} <= names
    assert [str(path) for path, content in finished.files.items() if SECRET.encode() in content] == []
    assert SECRET not in finished.output
    assert b"<redacted>" in finished.files[Path("run/run.json")]


def test_no_file_of_a_run_is_a_pickle(finished):
    suffixes = {path.suffix for path in finished.files if "trackers" not in path.parts}
    assert suffixes <= {".json", ".jsonl", ".safetensors", ".md", ".html", ".svg", ".jinja"}
    assert not [
        path for path, content in finished.files.items() if content.startswith((b"\x80\x02", b"\x80\x04", b"PK"))
    ]


def test_a_run_of_one_process_listens_on_nothing(finished):
    assert {line for line in finished.output.splitlines() if line.startswith("listens")} == {"listens:"}


def test_in_a_run_of_two_only_torchs_own_store_listens_beyond_this_machine(fork_server, tmp_path):
    ranks = fork_server.start_ranks(SCRIPT, tmp_path, SECRET, env={"GLOO_SOCKET_IFNAME": "lo"})
    outputs = [rank.output for rank in ranks if rank.wait() == 0]
    sockets = {line for output in outputs for line in output.splitlines() if line.startswith("listens: ")}
    assert any(line.startswith("listens: 127.0.0.1 ") for line in sockets), outputs
    assert len({line.rpartition(" ")[2] for line in sockets if "127.0.0.1" not in line}) == 1


@pytest.mark.parametrize(("given", "expected"), [(None, "lo"), ("eth7", "eth7")])
def test_the_process_groups_of_an_engine_alone_stay_on_this_machine(monkeypatch, given, expected):
    if given is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", given)
    interface = lambda **options: os.environ["GLOO_SOCKET_IFNAME"]  # noqa: E731
    monkeypatch.setattr("gc.freeze", lambda: None)
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=interface))
    monkeypatch.setattr(start_vllm, "preserved_classes", nullcontext)  # of the real vllm
    assert start_vllm._launch("folder", {}, on_cpu=False) == expected
    assert os.environ.get("GLOO_SOCKET_IFNAME") == given


def test_what_is_written_for_a_server_is_the_users_alone(tmp_path):
    with temporary_weight_files([("weight", torch.zeros(2))], directory=str(tmp_path)) as folder:
        assert (stat.S_IMODE(folder.stat().st_mode), len(list(folder.iterdir()))) == (0o700, 1)


def test_a_server_is_started_for_this_machine_alone():
    command, _ = server_command("model")
    assert command[command.index("--host") + 1] == "127.0.0.1"


def test_remote_code_is_asked_for_once_and_for_both_engines():
    assert GRPOConfig().trust_remote_code is False
    assert GRPOConfig().runs_remote_code is False
    with pytest.raises(InputError, match=r"got trust_remote_code in vllm_engine_kwargs.*fix: trust_remote_code=True"):
        GRPOConfig(vllm_engine_kwargs={"trust_remote_code": True})
