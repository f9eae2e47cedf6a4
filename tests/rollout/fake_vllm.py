"""What a vLLM server says over HTTP, from a thread of this process, with failures on order. See test_replicas."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file


class FakeServer(ThreadingHTTPServer):
    """Completion i of prompt [p, ...] is [p, i]. `faults` are what becomes of the next requests for completions."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.tag, self.faults, self.seen, self.served = "default", iter(()), [], 0
        self.weights: dict[str, Any] = {}
        self.folder = Path()
        self.refuses_weights, self.tied, self.dev_mode, self.logprobs_mode = False, False, True, "processed_logprobs"
        self.lock, self.released = threading.Lock(), threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is what the tests are about."""

    def stop(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()

    def complete(self, body: dict[str, Any]) -> dict[str, Any] | int | None:
        """The answer; a status in its place; or None for none at all."""
        with self.lock:
            fault = next(self.faults, None)
            self.seen.append(body)
            self.served += 1
        choices = [choice(body["prompt"][0], index) for index in range(body["n"])]
        match fault:
            case "no answer":
                return None
            case int():
                return fault
            case "silence":
                self.released.wait(30)
            case "one too few":
                choices.pop()
            case "one twice":
                choices[-1] = choices[0]
            case dict():
                choices[0] |= fault
            case "new weights":
                self.tag = "another trainer's"
        return {"choices": choices[::-1]}

    def get(self, path: str) -> dict[str, Any] | int:
        config = {"model_config": {"logprobs_mode": self.logprobs_mode}, "device_config": {"device": "cpu"}}
        return {
            "/health": {},
            "/version": {"version": "0.0"},
            "/v1/models": {"data": [{"id": "model", "max_model_len": 64}]},
            "/server_info?config_format=json": {"vllm_config": config} if self.dev_mode else 404,
            "/weight_info": {"weight_version": self.tag},
        }.get(path, 404)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | int | None:
        match path:
            case "/v1/completions":
                return self.complete(body)
            case "/collective_rpc":
                self.folder = Path(body["kwargs"]["weights_path"])
                for file in self.folder.glob("*.safetensors"):
                    self.weights |= load_file(file)
                return 500 if self.refuses_weights else {"results": [None]}
            case "/reset_prefix_cache":
                return {"success": True}
            case "/update_weight_version":
                self.tag = body["new_version"]
                return {}
            case "/weight_checker":
                heads = [] if self.tied else ["dp0:tp0:lm_head.weight"]
                return {"checksums": dict.fromkeys(["dp0:tp0:model.norm.weight", *heads], "")}
        return 404


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.answer(self.server.get(self.path))

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self.answer(self.server.post(self.path, json.loads(self.rfile.read(length) or b"{}")))

    def answer(self, what: dict[str, Any] | int | None) -> None:
        if what is None:
            return
        status, body = (what, {"error": "on order"}) if isinstance(what, int) else (200, what)
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: Any) -> None:
        """Not on the console."""


def choice(prompt: int, index: int) -> dict[str, Any]:
    logprobs = {"token_logprobs": [-0.5, -1.0 - index]}
    return {"index": index, "token_ids": [prompt, index], "logprobs": logprobs, "finish_reason": "stop"}


def serving(count: int) -> Iterator[list[FakeServer]]:
    servers = [FakeServer() for _ in range(count)]
    yield servers
    for server in servers:
        server.stop()
