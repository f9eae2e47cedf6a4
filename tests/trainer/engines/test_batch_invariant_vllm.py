"""`batch_invariant` with vLLM: where it cannot be, it is refused before anything is loaded. No test here has a GPU."""

import os
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional

from fused_grpo.errors import InputError, UnsupportedError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines.engine_choice import choose_engine
from fused_grpo.trainer.engines.vllm.start_vllm import enable_batch_invariance, preserved_state

INVARIANT = {"VLLM_BATCH_INVARIANT": "1", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}
NEEDS_GPU = (
    r"got batch_invariant=True with vLLM in this process, on \w+, want an NVIDIA GPU of .* 9\.0 or more: .*fix: "
)


@pytest.fixture
def environment() -> Iterator[dict[str, Any]]:
    """That of the process, restored afterwards."""
    with patch.dict(os.environ):
        yield os.environ


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any]) -> Callable[..., None]:
    def on_gpu(capability: int, *, cuda: bool = True) -> None:
        methods = {"is_cuda": lambda: cuda, "has_device_capability": lambda wanted: wanted <= capability}
        monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(**methods, device_name="gpu"))

    return on_gpu


@pytest.mark.engine
def test_on_a_cpu_it_is_refused_at_the_start(build_model, tokenizer, tmp_path) -> None:
    args = GRPOConfig(str(tmp_path), batch_invariant=True, use_vllm=True)
    with pytest.raises(UnsupportedError, match=NEEDS_GPU + r"vllm_mode='server' and .*, or use_vllm=False"):
        GRPOTrainer(build_model(), "accuracy", args, [{"prompt": "1+1="}], processing_class=tokenizer)
    assert INVARIANT.keys().isdisjoint(os.environ)


@pytest.mark.engine
@pytest.mark.parametrize(("capability", "cuda"), [(80, True), (89, True), (94, False)])
def test_gpus_whose_matrix_products_vllm_replaces_are_refused(on_gpu, capability: int, cuda: bool) -> None:
    on_gpu(capability, cuda=cuda)
    with pytest.raises(UnsupportedError, match=NEEDS_GPU):
        enable_batch_invariance()
    assert INVARIANT.keys().isdisjoint(os.environ)


@pytest.mark.engine
@pytest.mark.parametrize("capability", [90, 100, 120])
def test_the_environment_that_vllm_reads_stays_for_the_process(on_gpu, environment, capability: int) -> None:
    on_gpu(capability)
    enable_batch_invariance()
    with preserved_state():  # in which vLLM sets two of them, too
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        del environment["CUBLASLT_WORKSPACE_SIZE"]
    assert INVARIANT.items() <= environment.items()
    from vllm import envs

    assert envs.VLLM_BATCH_INVARIANT is True  # the name that the installed vLLM has


@pytest.mark.engine
def test_a_vllm_that_has_started_without_it_is_refused(on_gpu, monkeypatch) -> None:
    on_gpu(90)
    monkeypatch.setattr("vllm.envs.VLLM_BATCH_INVARIANT", False, raising=False)  # as vLLM keeps it at its start
    with pytest.raises(UnsupportedError, match=r"or that has started in this process without it, .*; fix: .* new proc"):
        enable_batch_invariance()


def test_a_replaced_linear_has_no_backward_pass() -> None:
    """Why those GPUs are refused: this is what vLLM does to the whole process, there by a kernel of Triton."""
    weight, states = torch.ones(2, 2, requires_grad=True), torch.ones(1, 2)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("aten::linear", lambda states, weight, bias=None: states @ weight.t(), "CPU")
        with pytest.raises(NotImplementedError, match="linear_backward"):
            functional.linear(states, weight).sum().backward()
    functional.linear(states, weight).sum().backward()
    assert weight.grad is not None


def test_a_bmm_without_a_gradient_does_not_stay(monkeypatch) -> None:
    own = torch.bmm
    with preserved_state():
        monkeypatch.setattr(torch, "bmm", lambda first, second: first.detach() @ second.detach())
    assert torch.bmm is own


@pytest.fixture(scope="module")
def fake_server() -> Iterator[Any]:
    for (server,) in runpy.run_path(str(Path(__file__).with_name("fake_vllm.py")))["serving"](1):
        yield server


@pytest.mark.parametrize(
    ("environment", "wanted", "outcome"),
    [
        ({"VLLM_BATCH_INVARIANT": True}, True, "accepted"),
        ({"VLLM_BATCH_INVARIANT": False}, True, "refused"),
        ({"VLLM_BATCH_INVARIANT": "0"}, True, "refused"),
        ({}, True, "refused"),
        (None, True, "warned"),
        ({}, False, "accepted"),
    ],
)
def test_a_server_says_whether_it_is(fake_server, build_model, tokenizer, caplog, environment, wanted, outcome) -> None:
    def with_environment(path: str, answer: Any) -> Any:
        is_info = path.startswith("/server_info") and environment is not None
        return answer | {"vllm_env": environment} if is_info else answer

    fake_server.mutate = with_environment
    args = GRPOConfig(vllm_mode="server", vllm_server_base_url=fake_server.url, batch_invariant=wanted)
    if outcome == "refused":
        with pytest.raises(InputError, match=r"got a server at http\S+ without VLLM_BATCH_INVARIANT=1, .*fix: restart"):
            choose_engine("server", args, build_model(), tokenizer)
    else:
        choose_engine("server", args, build_model(), tokenizer).close()
    assert ("does not say whether it was started with VLLM_BATCH" in caplog.text) is (outcome == "warned")


@pytest.mark.engine
def test_a_real_server_says_that_it_is_not(server, build_model, tokenizer) -> None:
    args = GRPOConfig(vllm_mode="server", vllm_server_base_url=server.url, batch_invariant=True)
    with pytest.raises(InputError, match="without VLLM_BATCH_INVARIANT=1"):
        choose_engine("server", args, build_model("qwen2", tied=True), tokenizer)
