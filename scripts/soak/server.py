"""Stands in for a vLLM server: its routes, over a real model that takes the trainer's weights. It fails now and then.

What it samples comes with the log-probs of the weights that it has, so a trainer notices when those are stale. The
faults are drawn from a seed and counted in a file.
"""

from __future__ import annotations

import hashlib
import json
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from runs import make_model
from safetensors.torch import load_file

from fused_grpo.trainer.engines.transformers_generate import TransformersEngine
from fused_grpo.trainer.recipes.arithmetic import build_tokenizer
from fused_grpo.trainer.types import SamplingParams

# Of a request for completions, and of one for a sync.
SAMPLING_FAULTS = {"answers 500": 0.01, "drops the connection in its answer": 0.01, "answers after a second": 0.002}
REFUSES, KEEPS, DENIES = "answers a sync with 500", "keeps old weights", "keeps old weights and denies it"
SYNC_FAULTS = {REFUSES: 0.005, KEEPS: 0.005, DENIES: 0.005}
MAX_MODEL_LEN = 64


class Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int, *, seed: int, counts: Path) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model = make_model().eval()
        self.engine = TransformersEngine(self.model, build_tokenizer())
        self.tag, self.random, self.lock = "default", random.Random(seed), threading.Lock()
        self.claimed: dict[str, Any] = self.model.state_dict()
        self.counts_file = counts
        self.counts = Counter[str](json.loads(counts.read_text())) if counts.exists() else Counter[str]()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is not news."""

    def fault(self, rates: dict[str, float]) -> str | None:
        drawn = self.random.random()
        for fault, rate in rates.items():
            drawn -= rate
            if drawn < 0:
                self.counts[fault] += 1
                self.counts_file.write_text(json.dumps(self.counts))
                return fault
        return None

    def get(self, path: str) -> dict[str, Any] | int:
        model = {"logprobs_mode": "processed_logprobs", "dtype": "torch.float32"}
        config = {"model_config": model, "device_config": {"device": "cpu"}}
        return {
            "/health": {},
            "/version": {"version": "stand-in"},
            "/v1/models": {"data": [{"id": "model", "max_model_len": MAX_MODEL_LEN}]},
            "/server_info?config_format=json": {"vllm_config": config},
            "/weight_info": {"weight_version": self.tag},
        }.get(path, 404)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | int | None:
        match path:
            case "/v1/completions":
                return self.complete(body)
            case "/collective_rpc":
                return self.reload(Path(body["kwargs"]["weights_path"]))
            case "/reset_prefix_cache":
                return {"success": True}
            case "/weight_checker":
                sums = {name: hashlib.sha256(value.numpy().data).hexdigest() for name, value in self.claimed.items()}
                return {"checksums": {f"dp0:pp0:pcp0:tp0:{name}": digest for name, digest in sums.items()}}
            case "/update_weight_version":
                self.tag = body["new_version"]
                return {}
        return 404

    def complete(self, body: dict[str, Any]) -> dict[str, Any] | int | None:
        fault = self.fault(SAMPLING_FAULTS)
        if fault == "answers 500":
            return 500
        if fault == "answers after a second":
            time.sleep(1.0)
        sampling = SamplingParams(n=body["n"], max_tokens=body["max_tokens"], temperature=1.0, seed=body["seed"])
        rollouts = self.engine.generate([body["prompt"]], sampling)
        choices = [
            {"index": index, "token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": reason}
            for index, (ids, logprobs, reason) in enumerate(
                zip(rollouts.completion_ids, rollouts.sampling_logprobs, rollouts.finish_reasons, strict=True)
            )
        ]
        return None if fault == "drops the connection in its answer" else {"choices": choices}

    def reload(self, folder: Path) -> dict[str, Any] | int:
        fault = self.fault(SYNC_FAULTS)
        if fault == REFUSES:
            return 500
        weights = {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}
        if fault is None:
            self.model.load_state_dict(weights)
        self.claimed = weights if fault == DENIES else self.model.state_dict()
        return {"results": [None]}


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.answer(self.server.get(self.path))

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = json.loads(self.rfile.read(length) or b"{}")
        with self.server.lock:
            answer = self.server.post(self.path, body)
        self.answer(answer)

    def answer(self, what: dict[str, Any] | int | None) -> None:
        status, body = (what, {"error": "on order"}) if isinstance(what, int) else (200, what)
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload) + (100 if what is None else 0)))
        self.end_headers()
        self.wfile.write(payload)
        self.close_connection = self.close_connection or what is None

    def log_message(self, *_: Any) -> None:
        """Not on the console."""


def serve(port: int, seed: int, counts: Path) -> None:
    """Until it is killed."""
    torch.set_num_threads(1)
    Server(port, seed=seed, counts=counts).serve_forever()
