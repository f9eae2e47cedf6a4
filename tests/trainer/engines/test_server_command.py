"""The command that starts a server, for each package of vLLM: `vllm serve` wherever that works."""

import sys
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from fused_grpo.trainer.engines import server
from fused_grpo.trainer.engines.server import server_command

ROOT = Path(__file__).parents[3]
FLAGS = ["--host", "127.0.0.1", "--port", "8000", "--logprobs-mode", "processed_logprobs"]


@pytest.fixture
def package_of_cpus(tmp_path, monkeypatch):
    """vLLM's CPU package, whose server is this module, and no other vLLM."""

    def no_package(name: str) -> str:
        raise PackageNotFoundError(name)

    def install(module: str) -> None:
        monkeypatch.setattr(server, "version", no_package)
        path = tmp_path.joinpath("vllm", *module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True)
        path.touch()
        (tmp_path / "vllm" / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, "vllm", raising=False)
        monkeypatch.syspath_prepend(str(tmp_path))

    return install


def test_vllm_serve_is_what_starts(named_vllm):
    command, variables = server_command("model", options=("--seed", "1"))
    assert command[1:] == ["-m", "vllm.entrypoints.cli.main", "serve", "model", *FLAGS, "--seed", "1"]
    assert variables == {"VLLM_SERVER_DEV_MODE": "1"}


@pytest.mark.parametrize("module", ["entrypoints.launchers.api_server.entry", "entrypoints.openai.api_server"])
def test_the_cpu_package_starts_by_the_module_that_it_has(package_of_cpus, module):
    package_of_cpus(module)
    assert server_command("model")[0][1:] == ["-m", f"vllm.{module}", "--model", "model", *FLAGS]


@pytest.mark.parametrize("folder", ["docs", "examples", "scripts", "trainer", "fused_grpo"])
def test_nothing_recommends_the_old_module(folder):
    pages = [path for path in (ROOT / folder).rglob("*") if path.suffix in {".md", ".py", ".yaml", ".sh"}]
    assert pages
    assert [str(page) for page in pages if "python -m vllm" in page.read_text()] == []
