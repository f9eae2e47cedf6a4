"""Tiny real models, a tokenizer over their characters, and the log-probs that a plain forward pass gives."""

import contextlib
import importlib.metadata
import os
import re
import runpy
import signal
import string
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from fused_grpo.trainer.engines.changed_weights import RECEIVER
from fused_grpo.trainer.engines.server import replicas, server_command, server_folder
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine
from fused_grpo.trainer.models.adapters import checkpoint_weights
from fused_grpo.trainer.types import Rollouts

CHARACTERS = string.digits + string.ascii_lowercase + "+-*= "
MAX_MODEL_LEN = 192
SECOND_STOP_ID = 7


class ServerProcess:
    """A real vLLM server of one folder. An engine waits until it is ready."""

    def __init__(self, folder: Path, port: int, start_process: Callable[..., Any], options: Any = ()) -> None:
        self.folder, self.port, self.url, self.options = folder, port, f"http://127.0.0.1:{port}", options
        self.process, self._start_process = None, start_process

    def start(self) -> None:
        options = ("--dtype", "float32", "--max-model-len", str(MAX_MODEL_LEN), "--enforce-eager")
        options += ("--no-enable-chunked-prefill", *self.options)
        command, variables = server_command(self.folder, port=self.port, options=options)
        small = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        small["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # as on a GPU, the engine's process has the worker
        small |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if "--enable-lora" in self.options else {}
        self.process = self._start_process(command, small | variables)

    def kill(self) -> None:
        """kill -9, of the server and the processes it started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def served_folder(build_model, tokenizer, tmp_path_factory) -> Path:
    return server_folder(build_model("qwen2", tied=True), tokenizer, tmp_path_factory.mktemp("served") / "model")


@pytest.fixture(scope="session")
def start_forked(fork_server) -> Callable[[list[str], dict[str, str]], Any]:
    def start_process(command: list[str], variables: dict[str, str]) -> Any:
        assert command[1] == "-m"
        return fork_server.start(Path(__file__).with_name("serve_forked.py"), *command[2:], env=variables, stage="vllm")

    return start_process


@pytest.fixture(scope="session")
def one_server(served_folder, fork_server, start_forked) -> Iterator[ServerProcess]:
    process = ServerProcess(served_folder, fork_server.free_port(), start_forked, ("--worker-extension-cls", RECEIVER))
    yield process
    process.kill()


@pytest.fixture(scope="module")
def lora_server(served_folder, fork_server, start_forked) -> Iterator[ServerProcess]:
    """Started for adapters of rank 8."""
    options = ("--enable-lora", "--max-lora-rank", "8")
    process = ServerProcess(served_folder, fork_server.free_port(), start_forked, options)
    process.start()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def server(one_server) -> ServerProcess:
    """That of the session; the module before may have killed it."""
    if one_server.process is None:
        one_server.start()
    return one_server


@pytest.fixture
def named_vllm(tmp_path, monkeypatch) -> None:
    """The package of this machine's vLLM is called "vllm", as that of GPUs is, and the `vllm` command works."""
    installed = {one.name: one.version for one in importlib.metadata.distributions() if "vllm" in str(one.name)}
    if "vllm" in installed:
        return
    folder = tmp_path / "named" / "vllm-0.dist-info"
    folder.mkdir(parents=True)
    number = installed.get("vllm-cpu", "0")  # without vLLM: of tests that start none
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {number}+cpu\n")
    monkeypatch.syspath_prepend(str(folder.parent))
    monkeypatch.setenv("PYTHONPATH", str(folder.parent), prepend=os.pathsep)


@pytest.fixture
def spawned_server(served_folder, fork_server, tmp_path, named_vllm) -> Iterator[ServerProcess]:
    """Started by the command as it stands."""

    def start_process(command: list[str], variables: dict[str, str]) -> Any:
        assert command[2:4] == ["vllm.entrypoints.cli.main", "serve"]
        inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        with (tmp_path / "log").open("wb") as log:
            return subprocess.Popen(command, env=inherited | variables, stdout=log, stderr=log, start_new_session=True)

    process = ServerProcess(served_folder, fork_server.free_port(), start_process)
    process.start()
    yield process
    process.kill()
    assert not re.search("entrypoints.*deprecated", (tmp_path / "log").read_text())


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: index for index, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="session")
def build_model(tokenizer: PreTrainedTokenizerFast) -> Callable[..., PreTrainedModel]:
    def build(family: str = "qwen2", *, tied: bool = True, positions: int = MAX_MODEL_LEN) -> PreTrainedModel:
        config_class, model_class = {
            "qwen2": (Qwen2Config, Qwen2ForCausalLM),
            "llama": (LlamaConfig, LlamaForCausalLM),
        }[family]
        config = config_class(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            # Heads of 32, the smallest that vLLM's CPU attention has a kernel for.
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=positions,
            tie_word_embeddings=tied,
            initializer_range=0.1,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = model_class(config).float()
        # As in published models: a second stop token, and sampling defaults that must not be used in training.
        model.generation_config.update(
            eos_token_id=[1, SECOND_STOP_ID], do_sample=True, top_k=2, repetition_penalty=3.0, suppress_tokens=[5]
        )
        return model

    return build


@pytest.fixture(scope="session")
def prompts(tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """Of many lengths, so that padding and order matter; two are equal, one fills a block of vLLM's prefix cache."""
    texts = ["3+4=", "12*7=", "a", "3+4=", "the cat sat", "0123456789" * 15]
    return [tokenizer(text)["input_ids"] for text in texts]


@pytest.fixture(scope="session")
def plain_logits() -> Callable[[PreTrainedModel, Rollouts, int], torch.Tensor]:
    """Logits `[T, V]` that the model alone gives for each token of completion `index`."""

    @torch.no_grad()
    def compute(model: PreTrainedModel, rollouts: Rollouts, index: int) -> torch.Tensor:
        prompt = rollouts.prompt_ids[index // rollouts.num_generations]
        completion = rollouts.completion_ids[index]
        logits = model(torch.tensor([prompt + completion])).logits[0]
        return logits[len(prompt) - 1 : -1]

    return compute


@pytest.fixture(scope="session")
def plain_logprobs(plain_logits) -> Callable[..., torch.Tensor]:
    """Log-probs of all completion tokens by a plain forward pass, end to end."""

    def compute(model: PreTrainedModel, rollouts: Rollouts, *, temperature: float = 1.0) -> torch.Tensor:
        chosen = []
        for index, completion in enumerate(rollouts.completion_ids):
            logprobs = (plain_logits(model, rollouts, index) / temperature).log_softmax(-1)
            chosen.append(logprobs.gather(1, torch.tensor(completion)[:, None])[:, 0])
        return torch.cat(chosen)

    return compute


@pytest.fixture(scope="session")
def sampled_logprobs() -> Callable[[Rollouts], torch.Tensor]:
    """The engine's, end to end."""

    def collect(rollouts: Rollouts) -> torch.Tensor:
        return torch.tensor([value for values in rollouts.sampling_logprobs for value in values])

    return collect


@pytest.fixture
def servers() -> Iterator[list[Any]]:
    """Two servers with vLLM's routes, which fail as a test wants. See fake_vllm.py."""
    yield from runpy.run_path(str(Path(__file__).with_name("fake_vllm.py")))["serving"](2)


@pytest.fixture
def short_pauses(monkeypatch) -> None:
    """Before a server is asked again."""
    monkeypatch.setattr(replicas, "_PAUSES", (0.0, 0.01, 0.03))


@pytest.fixture
def connect(servers, model, tokenizer) -> Callable[..., VLLMServerEngine]:
    """An engine on the first `count` of a module's `servers`, with its `model`."""

    def make(count: int = 2, *, synced: bool = True, **options: Any) -> VLLMServerEngine:
        urls = [server.url for server in servers[:count]]
        engine = VLLMServerEngine(model, tokenizer, base_urls=urls, **{"timeout": 20, **options})
        if synced:
            engine.load_weights(checkpoint_weights(model), version=0)
        return engine

    return make
