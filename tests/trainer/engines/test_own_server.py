"""A vLLM server that the trainer starts beside itself: its process, its end, and runs with batches in flight."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import chdir, suppress
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from numerics import logprobs_of
from peft import LoraConfig

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.engines import weight_files
from fused_grpo.trainer.engines.server import own_server, replicas, server_command
from fused_grpo.trainer.engines.server.own_server import OwnServer, as_flags
from fused_grpo.trainer.engines.server.replicas import Replicas, RequestError
from fused_grpo.trainer.engines.server.server_engine import VLLMServerEngine

SUMS = [{"prompt": f"{a}+{b}="} for a in range(4) for b in range(4)]
# What torchrun sets, and a user for servers of his own.
FOREIGN = {"RANK", "TORCHELASTIC_USE_AGENT_STORE", "VLLM_API_KEY"}
# In the place of vLLM's server: says what it was given, starts a process, and waits.
SERVER = """
import json, os, subprocess, sys, time
child = subprocess.Popen(["sleep", "600"])
said = {"arguments": sys.argv[1:], "environment": dict(os.environ), "processes": [os.getpid(), child.pid]}
with open(os.environ["SAID"] + ".new", "w") as file:
    json.dump(said, file)
os.rename(os.environ["SAID"] + ".new", os.environ["SAID"])
time.sleep(600)
"""
# With a fork, as those of a reward function's pool, which has all that the trainer has open and outlives it.
TRAINER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fused_grpo.trainer.engines import weight_files
from fused_grpo.trainer.engines.server.own_server import OwnServer
weight_files._SHARED_MEMORY = sys.argv[4]
server = OwnServer("folder", {}, environment={"SAID": sys.argv[2]}, log=Path(sys.argv[2] + ".log"))
if os.fork() == 0:
    while not os.path.exists(sys.argv[3]):
        time.sleep(0.05)
    os._exit(0)
time.sleep(600)
"""
# In the middle of a sync, or of a start.
SENDING = """
import sys, time
from pathlib import Path
import torch
sys.path.insert(0, sys.argv[1])
from fused_grpo.trainer.engines import weight_files
from fused_grpo.trainer.engines.server.own_server import OwnServer
weight_files._SHARED_MEMORY = sys.argv[3]
with weight_files.temporary_weight_files([("weight", torch.zeros(8))]) as folder:
    server = OwnServer(folder, {}, environment={"SAID": sys.argv[2]}, log=Path(sys.argv[2] + ".log"))
    time.sleep(600)
"""
# With a fork that ends as any process does, with exit functions, finalizers and all objects.
FORKING = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from fused_grpo.trainer.engines import weight_files
from fused_grpo.trainer.engines.server.own_server import OwnServer
weight_files._SHARED_MEMORY = sys.argv[3]
server = OwnServer("folder", {}, environment={"SAID": sys.argv[2]}, log=Path(sys.argv[2] + ".log"))
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
if os.fork() != 0:
    os.wait()
    time.sleep(0.2)
    assert not server.has_ended
    assert Path(server.socket).parent.exists()
"""


@pytest.fixture(autouse=True)
def shared_memory(monkeypatch) -> Iterator[str]:
    """Of this test's own: others look for what is left in the machine's."""
    with tempfile.TemporaryDirectory(prefix="own-") as folder:
        monkeypatch.setattr(weight_files, "_SHARED_MEMORY", folder)
        yield folder


@pytest.fixture
def stand_in(tmp_path, monkeypatch) -> Callable[[str], Path]:
    """Has this code run where vLLM's server would; the folder that has it."""

    def install(code: str) -> Path:
        folder, (*packages, module) = tmp_path / "stand-in", server_command("model")[0][2].split(".")
        for package in accumulate(packages, "{}/{}".format):
            (folder / package).mkdir(parents=True)
            (folder / package / "__init__.py").touch()
        (folder / "/".join(packages) / f"{module}.py").write_text(code)
        monkeypatch.syspath_prepend(str(folder))
        return folder

    return install


def what_it_said(path: Path) -> Any:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return json.loads(path.read_text())


def wait_for_the_end(processes: list[int]) -> None:
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}/stat").exists() and not is_zombie(pid) for pid in processes):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_a_log_that_is_there_stays_and_its_errors_are_no_ones_else(stand_in, tmp_path) -> None:
    stand_in("raise ValueError('of this server')")
    log = tmp_path / "log"
    log.write_text("RuntimeError: of a run before\n")
    server = OwnServer("folder", {}, environment={}, log=log)
    deadline = time.monotonic() + 60
    while not server.has_ended:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert server.errors() == "an end with status 1; ValueError: of this server"
    assert log.read_text().startswith("RuntimeError: of a run before\n")


def test_it_has_the_options_of_the_engine_and_ends_with_it(stand_in, tmp_path, monkeypatch) -> None:
    stand_in(SERVER)
    for name in FOREIGN:
        monkeypatch.setenv(name, "True")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setattr(sys, "path", [tmp_path, *sys.path])  # a Path, which imports ignore
    options = {"dtype": "bfloat16", "enforce_eager": True, "enable_chunked_prefill": False, "hf_overrides": {"a": [1]}}
    environment, log = {"SAID": str(tmp_path / "said")}, tmp_path / "run" / "log"
    server = OwnServer("folder", options | {"hf_token": "hf_secret"}, environment=environment, log=log)
    said = what_it_said(tmp_path / "said")
    assert " ".join(said["arguments"]).endswith(
        f"--uds {server.socket} --uvicorn-log-level warning --disable-uvicorn-access-log "
        "--no-use-tqdm-on-load --dtype bfloat16 "
        '--enforce-eager --no-enable-chunked-prefill --hf-overrides {"a": [1]} --hf-token hf_secret'
    )
    assert not any("secret" in Path(f"/proc/{pid}/cmdline").read_text() for pid in said["processes"])
    assert said["arguments"][:2] == ["--model", "folder"]
    assert said["environment"]["VLLM_SERVER_DEV_MODE"] == said["environment"]["VLLM_NO_USAGE_STATS"] == "1"
    assert said["environment"]["VLLM_LOGGING_LEVEL"] == "DEBUG"  # as in process
    assert not FOREIGN & said["environment"].keys()
    assert not server.has_ended
    folder = Path(server.socket).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert said["environment"]["VLLM_RPC_BASE_PATH"] == str(folder)
    server.close()
    wait_for_the_end(said["processes"])
    assert server.has_ended
    assert not folder.exists()
    assert log.exists()


def test_a_fork_of_its_trainer_that_ends_does_not_end_it(stand_in, fork_server, tmp_path, shared_memory) -> None:
    (tmp_path / "trainer.py").write_text(FORKING)
    arguments = stand_in(SERVER), tmp_path / "said", shared_memory
    fork_server.run(tmp_path / "trainer.py", *arguments, stage="libraries", teardown=True)
    wait_for_the_end(what_it_said(tmp_path / "said")["processes"])


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_a_trainer_that_is_killed(stand_in, fork_server, tmp_path, shared_memory, number) -> None:
    (tmp_path / "trainer.py").write_text(TRAINER)
    arguments = stand_in(SERVER), tmp_path / "said", tmp_path / "end of the fork", shared_memory
    trainer = fork_server.start(tmp_path / "trainer.py", *arguments, stage="libraries")
    said = what_it_said(tmp_path / "said")
    trainer.kill(number)
    assert trainer.wait() == -number
    try:
        wait_for_the_end(said["processes"])
    finally:
        (tmp_path / "end of the fork").touch()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_nothing_is_left_in_memory_by_a_trainer_that_is_killed(
    stand_in, fork_server, tmp_path, shared_memory, number
) -> None:
    (tmp_path / "trainer.py").write_text(SENDING)
    arguments = stand_in(SERVER), tmp_path / "said", shared_memory
    trainer = fork_server.start(tmp_path / "trainer.py", *arguments, stage="libraries")
    said = what_it_said(tmp_path / "said")
    assert len(os.listdir(shared_memory)) == 2
    trainer.kill(number)
    assert trainer.wait() == -number
    wait_for_the_end(said["processes"])
    assert os.listdir(shared_memory) == []


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (
            'sys.exit("ValueError: no room\\nRuntimeError: no core\\nLastError: no server")',
            "an end with status 1; ValueError: no room; RuntimeError: no core",
        ),
        (
            'sys.exit("usage: server\\nserver: error: unrecognized arguments: --a")',
            "an end with status 1; error: unrecognized arguments: --a",
        ),
        ('print("WARNING OSError: may follow", "no more", "", sep="\\n")', "an end with status 0; no more"),
        ("os.kill(os.getpid(), 9)", "an end with status -9"),
    ],
)
def test_one_that_cannot_start_says_why_at_once(stand_in, build_model, tokenizer, tmp_path, code, said) -> None:
    stand_in(f"import os, sys; {code}")
    log = tmp_path / "run" / "log"
    with chdir(tmp_path):
        server = OwnServer("folder", {}, environment={}, log=Path("run", "log"))
    message = f"^got {re.escape(said)} .*at http://vllm-beside-the-trainer, want .*fix: look at its log, {log}$"
    with pytest.raises(UnavailableError, match=message):
        VLLMServerEngine(build_model("qwen2", tied=True), tokenizer, own=server, timeout=15.0)
    server.close()
    assert said.rpartition("; ")[2] in log.read_text() + said * ("-9" in said)


def test_a_secret_that_it_quotes_is_in_no_error(stand_in, tmp_path) -> None:
    stand_in('import sys; sys.exit("error: unrecognized arguments: --hf-tokn hf_" + "a1" * 17)')
    server = OwnServer("folder", {}, environment={}, log=tmp_path / "log")
    server._process.wait()
    assert "--hf-tokn <redacted>" in server.errors()
    server.close()


def test_of_a_long_log_the_end_alone_is_read(stand_in, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(own_server, "_READ", 250)
    stand_in("print('ValueError: of yesterday\\n' * 40, flush=True)\nraise KeyError('of today')")
    server = OwnServer("folder", {}, environment={}, log=tmp_path / "log")
    server._process.wait()
    assert server.errors() == "an end with status 1; KeyError: 'of today'"
    server.close()


def test_requests_that_fail_wait_for_its_end_side_by_side(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(replicas, "_MOMENT", 0.5)
    own = SimpleNamespace(url="http://own", socket=str(tmp_path / "none"), log="", has_ended=False, errors=lambda: "")
    servers = Replicas([], own=own, timeout=10.0)

    async def all_failed(client: Any) -> list[Any]:
        requests = (servers.all[0].request(client, "GET", "/health") for _ in range(12))
        return await asyncio.gather(*requests, return_exceptions=True)

    started = time.monotonic()
    assert {type(error) for error in servers.run(all_failed, doing="a test")} == {RequestError}
    assert 0.5 <= time.monotonic() - started < 5.0  # one after the other they wait for 6 s


def test_as_many_requests_are_in_flight_as_at_a_server_of_the_users(tmp_path) -> None:
    """httpx itself opens 100 connections."""
    path, all_there = str(tmp_path / "socket"), asyncio.Barrier(150)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await all_there.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async def ask_all() -> None:
        async with await asyncio.start_unix_server(answer, path, backlog=150):
            await asyncio.to_thread(servers.run, asked, doing="a test")

    async def asked(client: Any) -> None:
        await asyncio.gather(*(servers.all[0].request(client, "GET", "/health") for _ in range(150)))

    servers = Replicas([], own=SimpleNamespace(url="http://own", socket=path, log=""), timeout=10.0)
    asyncio.run(ask_all())


@pytest.mark.parametrize(
    ("visible", "current", "expected"), [(None, 2, "2"), ("4, 5, GPU-8a", 2, "GPU-8a"), ("7", 0, "7")]
)
def test_it_sees_the_device_of_its_rank_alone(monkeypatch, visible, current, expected) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert own_server._device() == {"CUDA_VISIBLE_DEVICES": expected}
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert own_server._device() == {"HIP_VISIBLE_DEVICES": expected, "CUDA_VISIBLE_DEVICES": expected}
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "8,9,10")
    assert own_server._device() == dict.fromkeys(("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), str(8 + current))


def test_a_list_is_several_arguments_of_one_flag() -> None:
    options = {"cudagraph_capture_sizes": [1, 2], "offload_params": {"a"}, "hf_overrides": {"a": [1]}}
    assert as_flags(options) == [
        *("--cudagraph-capture-sizes", "1", "2"),
        *("--offload-params", "a"),
        *("--hf-overrides", '{"a": [1]}'),
    ]


def test_flags_of_none_are_left_out() -> None:
    assert as_flags({"seed": 0, "quantization": None, "kv_cache_memory_bytes": 1 << 20}) == [
        *("--seed", "0"),
        *("--kv-cache-memory-bytes", "1048576"),
    ]


@pytest.fixture
def from_the_fork_server(fork_server, monkeypatch) -> Iterator[None]:
    """vLLM's server, in a process that has imported vLLM already."""
    processes = list[Any]()

    def started(command: list[str], *, env: dict[str, str], **pipes: Any) -> Any:
        # It waits for its trainer in vain: standard input is empty there.
        script, arguments = Path(__file__).with_name("serve_forked.py"), json.loads(env["FUSED_GRPO_SERVER_ARGUMENTS"])
        processes.append(fork_server.start(script, *arguments, env=env, stage="vllm"))
        processes[-1].stdin = None
        return processes[-1]

    monkeypatch.setattr(own_server, "subprocess", SimpleNamespace(Popen=started, PIPE=subprocess.PIPE))
    yield
    for process in processes:  # of a test that failed
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def letters(completions: list[str], **columns: Any) -> list[float]:
    return [sum(letter.isalpha() for letter in text) / (len(text) + 1) for text in completions]


@pytest.fixture
def make_trainer(build_model, tokenizer, tmp_path) -> Callable[..., GRPOTrainer]:
    def make(name: str, peft_config: Any = None, **options: Any) -> GRPOTrainer:
        defaults = {
            "generate_ahead": 2,
            "vllm_server_timeout": 500.0,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 8,
            "max_steps": 5,
            "save_steps": 3,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
        }
        args = GRPOConfig(str(tmp_path / name), **{**defaults, **options})
        model = build_model("qwen2", tied=True)
        return GRPOTrainer(model, letters, args, SUMS, processing_class=tokenizer, peft_config=peft_config)

    return make


@pytest.mark.engine
@pytest.mark.parametrize("adapter", [False, True])
def test_batches_in_flight_without_a_server_of_the_users(
    from_the_fork_server, make_trainer, monkeypatch, adapter
) -> None:
    """Their log-probs are those of the version that they say, and a resumed run makes the same steps."""
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False) if adapter else None
    whole = make_trainer("whole", config, vllm_adapter_sync=adapter)
    learn, policies, batches = whole.learner.learn, list[Any](), list[Any]()

    def learning(*arguments: Any, **options: Any) -> Any:
        policies.append({name: weight.clone() for name, weight in whole.model.state_dict().items()})
        batches.append(whole.scored.samples)
        return learn(*arguments, **options)

    with monkeypatch.context() as two_ranks:  # ranks, which have a server each, and wait for no other
        two_ranks.setattr(torch.distributed, "is_initialized", lambda: True)
        two_ranks.setattr(torch.distributed, "get_rank", lambda *group: 1)
        whole.engine.load_weights(whole.learner.served_weights(whole.engine), version=0)
    whole.learner.learn = learning
    whole.train()
    assert [batch[0].weight_version for batch in batches] == [0, 0, 0, 1, 2]
    trained = {name: weight.clone() for name, weight in whole.model.state_dict().items()}

    def difference(version: int) -> float:
        whole.model.load_state_dict(policies[version])
        differences = [
            abs(p - q)
            for sample in batches[-1]
            for p, q in zip(
                logprobs_of(whole.model, sample.prompt_ids, sample.completion_ids, 1.0),
                sample.sampling_logprobs,
                strict=True,
            )
        ]
        return max(differences)

    assert difference(2) < 1e-3 < 1e-2 < difference(3)
    resumed = make_trainer(
        "resumed", config, vllm_adapter_sync=adapter, resume_from_checkpoint=f"{whole.output_dir}/checkpoint-3"
    )
    resumed.train()
    for name, weight in resumed.model.state_dict().items():
        assert torch.equal(weight, trained[name]), name
    assert resumed.engine._own.has_ended


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_vllm": False}, "the transformers engine, which samples with the model that is trained"),
        ({"vllm_enable_sleep_mode": True}, "vllm_enable_sleep_mode=True, want vLLM awake"),
    ],
)
def test_what_cannot_sample_beside_the_trainer_is_refused(build_model, tokenizer, tmp_path, options, message) -> None:
    args = GRPOConfig(str(tmp_path / "run"), generate_ahead=2, **options)
    with pytest.raises(InputError, match=f"^got generate_ahead=2 with {message}.*fix: "):
        GRPOTrainer(build_model("qwen2", tied=True), letters, args, SUMS, processing_class=tokenizer)
