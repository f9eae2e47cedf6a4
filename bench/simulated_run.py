"""A run on eight processes and four servers whose latencies are made up: `python -m fused_grpo.bench.simulated_run`.

What runs is the trainer's own: eight ranks of gloo under DDP, their requests to the replicas, weight sync through
files, rewards, packing, prefetching. What is made up is time. A stand-in for vLLM completes its requests token by
token, and sleeps for each as long as `token_seconds` says that an engine with so many sequences takes; the policy
sleeps for the tokens of its micro-batch, the reward function and the servers' reload for a time of their own. So the
measured steps tell how well throughput.py puts a step together: lengths, shares of the replicas and ranks, waiting,
overlap.

It writes bench/results/<machine>/simulated-<date>.json: measured and predicted seconds of `--steps` steps in each mode.
`--small` has two ranks and two servers, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import random
import socket
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from fused_grpo.bench.raw_file import raw_file, write
from fused_grpo.trainer import GRPOConfig, GRPOTrainer
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer
from fused_grpo.trainer.throughput import BINS, ModelSize, Rates, Run, Step, survivors, token_seconds, train_seconds

# On one H100: 22 ms for a token of one sequence, and 0.4 ms more for each further one. All of it takes `SLOWER` times
# as long: what eight trainers and four servers really compute on two cores, up to a second a step, is not predicted.
SLOWER = 3
SIZE = ModelSize(
    model_params=20e9, layers=2, hidden_size=1024, heads=8, kv_heads=2, vocab_size=1024, tie_word_embeddings=True
)
RUN = Run(
    size=SIZE,
    gpus=12,
    prompts=16,
    num_generations=8,
    prompt_length=8,
    completion_length=40,
    max_completion_length=128,
    gradient_checkpointing=False,
    share_prompts=False,
    reward_seconds=0.5 * SLOWER,
    sync_bandwidth=80e9 / SLOWER,
    rates=Rates(
        bandwidth=0.7 / SLOWER, decode=0.5 / SLOWER, host=5e-3 * SLOWER, sequence=3e-4 * SLOWER, mfu=0.032 / SLOWER
    ),
)
MEANWHILE, RANKS = replace(RUN, generate_ahead=1), 8
MODES = {
    "in turn, 4 servers": (RUN, 4),
    "prefetched, 4 servers": (MEANWHILE, 4),
    "prefetched, 2 servers": (MEANWHILE, 2),
}
SMALL = replace(
    MEANWHILE,
    prompts=4,
    completion_length=16,
    max_completion_length=40,
    reward_seconds=0.2,
    sync_bandwidth=200e9,
    rates=Rates(host=5e-3, sequence=3e-4, mfu=0.08),
)


class StandIn(ThreadingHTTPServer):
    """Has vLLM's routes. A thread of its own gives every sequence that is in work a token at a time."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, run: Run, seed: int) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.run, self.version = run, "default"
        self._random = random.Random(seed)
        self._work: list[tuple[list[int], threading.Event]] = []  # of each request: the tokens that are missing
        self._changed = threading.Condition()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        threading.Thread(target=self._decode, daemon=True).start()

    def _decode(self) -> None:
        until = 0.0
        while True:
            with self._changed:
                if not self._work:
                    self._changed.wait_for(lambda: bool(self._work))
                    until = time.monotonic()
                sequences = sum(remaining > 0 for missing, _ in self._work for remaining in missing)
            # A sleep that took too long is made up for: only the schedule counts.
            until += token_seconds(self.run, 1, sequences, self.run.prompt_length)
            time.sleep(max(0.0, until - time.monotonic()))
            with self._changed:
                for missing, completed in self._work:
                    missing[:] = [max(0, remaining - 1) for remaining in missing]
                    if not any(missing):
                        completed.set()
                self._work = [request for request in self._work if any(request[0])]

    def complete(self, body: dict[str, Any]) -> dict[str, Any]:
        longest = self.run.max_completion_length
        alive = survivors(self.run.completion_length, longest)
        draws = [self._random.random() for _ in range(body["n"])]
        lengths = [max(1, round(sum(draw < share for share in alive) * longest / BINS)) for draw in draws]
        completed = threading.Event()
        with self._changed:
            self._work.append(([*lengths], completed))
            self._changed.notify()
        completed.wait()
        return {"choices": [choice(index, length, length < longest) for index, length in enumerate(lengths)]}

    def answer(self, path: str, body: dict[str, Any]) -> Any:
        match path:
            case "/v1/completions":
                return self.complete(body)
            case "/collective_rpc" if body["method"] == "get_model_inspection":
                return {"results": [""]}
            case "/collective_rpc":
                time.sleep(2 * SIZE.model_params / self.run.sync_bandwidth)
            case "/update_weight_version":
                self.version = body["new_version"]
        vllm = {"model_config": {"logprobs_mode": "processed_logprobs", "dtype": None, "max_logprobs": 20}}
        return {
            "/version": {"version": "0.0"},
            "/v1/models": {"data": [{"id": "model", "max_model_len": 1024}]},
            "/server_info?config_format=json": {"vllm_config": vllm | {"device_config": {"device": "cuda"}}},
            "/weight_info": {"weight_version": self.version},
            "/collective_rpc": {"results": [None]},
            "/reset_prefix_cache": {"success": True},
        }.get(path, {})


class Handler(BaseHTTPRequestHandler):
    server: StandIn

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        payload = json.dumps(self.server.answer(self.path, json.loads(body or b"{}"))).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        """Not on the console."""


def choice(index: int, length: int, has_ended: bool) -> dict[str, Any]:
    """A completion under a head of zeros, which gives every token the same probability."""
    logprobs = {"token_logprobs": [-math.log(len(build_tokenizer()))] * length}
    reason = "stop" if has_ended else "length"
    return {"index": index, "token_ids": [2 + index % 10] * length, "logprobs": logprobs, "finish_reason": reason}


def serve(run: Run, servers: int, urls: Any) -> None:
    """The servers, in one process, which ends with the one that started it."""
    started = [StandIn(run, seed) for seed in range(servers)]
    urls.put([f"http://127.0.0.1:{server.server_port}" for server in started])
    threading.Event().wait()


def tiny_model() -> tuple[Any, Any]:
    """A model whose head is zero and stays so, and its tokenizer."""
    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    model = Qwen2ForCausalLM(config)
    torch.nn.init.zeros_(model.lm_head.weight)
    return model, tokenizer


def train(number: int, *, run: Run, ranks: int, port: int, urls: Sequence[str], steps: int, out: str) -> None:
    """One process of the trainer; the first writes the log that holds the times."""
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    os.environ |= group | {"RANK": str(number), "LOCAL_RANK": str(number)}
    torch.set_num_threads(1)
    model, tokenizer = tiny_model()
    token = train_seconds(run, 1) / (run.completions * (run.completion_length + run.prompt_length))

    def reward(completions: Sequence[str], **_: Any) -> list[float]:
        time.sleep(run.reward_seconds)
        return [float(index % 3) for index in range(len(completions))]

    def take_time(_: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else given[0]
        time.sleep(token * int((ids != tokenizer.pad_token_id).sum()))

    args = GRPOConfig(
        out,
        per_device_train_batch_size=run.completions // ranks,
        num_generations=run.num_generations,
        max_completion_length=run.max_completion_length,
        max_steps=steps,
        learning_rate=1e-9,
        share_prompts=run.share_prompts,
        use_vllm=True,
        vllm_mode="server",
        vllm_server_base_url=list(urls),
        generate_ahead=run.generate_ahead > 0,
        save_strategy="no",
        log_completions=False,
        report_to=[],
        bf16=False,
        use_cpu=True,
    )
    rows = [{"prompt": f"{10_000_000 + index}"} for index in range(run.prompts * steps)]
    trainer = GRPOTrainer(model, reward, args, rows, processing_class=tokenizer)
    model.model.register_forward_pre_hook(take_time, with_kwargs=True)
    trainer.train()
    trainer.end()


def measured(run: Run, *, ranks: int, servers: int, steps: int) -> list[float]:
    """Seconds of each step of a run, but the first two and the last, which prefetch less or more."""
    context = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    urls: Any = context.SimpleQueue()
    server = context.Process(target=serve, args=(run, servers, urls), daemon=True)
    server.start()
    server_urls = urls.get()
    with tempfile.TemporaryDirectory() as out:
        body = partial(train, run=run, ranks=ranks, port=port, urls=server_urls, steps=steps + 3, out=out)
        started = [context.Process(target=body, args=(number,)) for number in range(ranks)]
        for process in started:
            process.start()
        for process in started:
            process.join()
        server.terminate()
        if failed := [process.exitcode for process in started if process.exitcode]:
            raise SystemExit(f"ranks ended with {failed}")
        lines = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [line["step_time"] for line in lines[2:-1]]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    rows, ranks = [], 2 if options.small else RANKS
    raw = None if options.small else raw_file("simulated", "python -m fused_grpo.bench.simulated_run", ranks=ranks)
    for mode, (run, servers) in ({"small": (SMALL, 2)} if options.small else MODES).items():
        predicted = Step(run, servers, ranks, 1)
        times = measured(run, ranks=ranks, servers=servers, steps=options.steps)
        rows.append({"mode": mode, "predicted": predicted.phases | {"seconds": predicted.seconds}, "steps": times})
        print(f"{mode}: predicted {predicted.seconds:.2f} s, measured {statistics.mean(times):.2f} s", flush=True)
    if raw is not None:
        path, entries = raw
        write(path, entries | {"modes": rows})
        print(path)


if __name__ == "__main__":
    main()
