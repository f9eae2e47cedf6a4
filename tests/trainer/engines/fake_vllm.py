"""A fake vLLM server over HTTP whose failures a test chooses: in a thread (test_replicas), or as a script.

As a script it prints its URL, then the time (of the monotonic clock) of each fault, and serves until it is killed:

    fake_vllm.py FAULT ATTRIBUTES    as JSON: what becomes of each request for completions, attributes of FakeServer
"""

import contextlib
import gzip
import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

# Instead of an answer: status, headers and body as they are, whatever they say about each other.
RAW = {
    "not json": (200, {"Content-Type": "text/html"}, b"<html>It works! KEY</html>"),
    "long page": (500, {}, b"-" * 490 + b"KEY"),
    "json of another kind": (200, {}, b'[{"choices": 3}]'),
    "nested": (200, {}, b"[" * 100_000),
    "endless": (200, {}, b"[" * (1 << 20)),
    "gzip": (200, {"Content-Encoding": "gzip"}, gzip.compress(b'{"choices": []}')),
    "two gzips": (200, {"Content-Encoding": "gzip, gzip"}, gzip.compress(gzip.compress(b" " * (1 << 20)))),
    "unknown encoding": (200, {"Content-Encoding": "br"}, b"{}"),
    "error in gzip": (500, {"Content-Encoding": "gzip"}, gzip.compress(b"-" * (1 << 20))),
    "not finite": (400, {}, b'{"error": {"message": "Out of range float values are not JSON compliant"}}'),
    "nothing": (200, {}, b""),
    "Success": (200, {}, b"Success: LoRA adapter 'name' added successfully."),
    "cut off": (200, {"Content-Length": "100000"}, b'{"choices": [{"index": 0, "token_ids": [4'),
}


class FakeServer(ThreadingHTTPServer):
    """Completion i of prompt [p, ...] is [p, i]. `faults` are what becomes of the next requests for completions."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.weight_version, self.faults, self.seen, self.served = "default", iter(()), [], 0
        self.weights: dict[str, Any] = {}
        self.folder = Path()
        self.adapters: dict[str, dict[str, Any]] = {}
        self.lora_config, self.environment = None, None  # None: without --enable-lora, without vllm_env
        self.parallel_config, self.device, self.watermark_config = {}, "cpu", None
        self.speculative_config = None
        self.workers: list[Any] = []  # with our worker extension
        self.name = "model"  # as others call it
        self.api_key = ""  # of the routes that vLLM protects; "": none is wanted
        self.model = ""  # as vLLM prints it; "": the server is too old to do so
        self.mutate: Any = lambda path, answer: answer  # every answer with status 200
        self.refuses_to_join, self.refuses_weights = False, False
        self.tied, self.dev_mode, self.logprobs_mode = False, True, "processed_logprobs"
        self.is_vllm = True  # else that of `trl vllm-serve`
        self.transfer, self.elsewhere, self.dtype = None, "", None
        self.sent = 0  # bytes
        self.encodings: set[str | None] = set()  # that clients accept
        self.max_model_len, self.old, self.max_logprobs = 64, False, 20
        self.calls: list[tuple[str, Any]] = []
        self.wire: Any = None  # what was broadcast of an update, where a test replaces NCCL
        self.lock, self.released = threading.Lock(), threading.Event()
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that hung up is what the tests are about."""

    def stop(self) -> None:
        self.released.set()
        self.shutdown()
        self.server_close()

    def complete(self, body: dict[str, Any]) -> dict[str, Any] | int | str | None:
        """The answer; a status or something of RAW in its place; or None for none at all."""
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
            case "death":
                os.kill(os.getpid(), signal.SIGKILL)
            case str() if fault in RAW:
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
                self.weight_version = "another trainer's"
        return {"choices": choices[::-1]}

    def get(self, path: str) -> dict[str, Any] | int:
        config = {
            "model_config": {
                "logprobs_mode": self.logprobs_mode,
                "dtype": self.dtype,
                "max_logprobs": self.max_logprobs,
            },
            "device_config": {"device": self.device},
            "lora_config": self.lora_config,
            "parallel_config": self.parallel_config,
            "watermark_config": self.watermark_config,
            "speculative_config": self.speculative_config,
            "weight_transfer_config": self.transfer and {"backend": self.transfer},
        }
        models = [{"id": self.name, "max_model_len": self.max_model_len}]
        models += [{"id": name, "max_model_len": None} for name in self.adapters]
        answer = {"vllm_config": config} | ({} if self.environment is None else {"vllm_env": self.environment})
        return {
            "/health": {},
            "/version": {"version": "0.0"},
            "/v1/models": {"data": models} if self.is_vllm else 404,
            "/server_info?config_format=json": answer if self.dev_mode else 404,
            "/weight_info": 404 if self.old else {"weight_version": self.weight_version},
            "/get_world_size": {"world_size": 2},
            "/sent": {"bytes": self.sent, "answers": self.served},
        }.get(path, 404)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any] | int | str | None:
        self.calls.append((path, body))
        match path:
            case "/v1/completions" if body.get("model", self.name) not in {self.name, *self.adapters}:
                return 404
            case "/v1/load_lora_adapter" if self.refuses_weights:
                return 500
            case "/v1/load_lora_adapter" if body["lora_name"] in self.adapters:
                return 400
            case "/v1/load_lora_adapter":
                self.folder = Path(body["lora_path"])
                assert json.loads((self.folder / "adapter_config.json").read_text())["peft_type"] == "LORA"
                self.adapters[body["lora_name"]] = load_file(self.folder / "adapter_model.safetensors")
                return "Success"
            case "/v1/unload_lora_adapter":
                return "Success" if self.adapters.pop(body["lora_name"], None) else 404
            case "/v1/completions":
                return self.complete(body)
            case "/collective_rpc" if body["method"] == "get_model_inspection":
                return {"results": [self.model]} if self.model else 404
            case "/collective_rpc" if body["method"] == "load_changed_weights":
                return {"results": [worker.load_changed_weights(**body["kwargs"]) for worker in self.workers]}
            case "/collective_rpc":
                self.folder = Path(body["kwargs"]["weights_path"])
                for file in self.folder.glob("*.safetensors"):
                    self.weights |= load_file(file)
                return 500 if self.refuses_weights else {"results": [None]}
            case "/reset_prefix_cache":
                return {"success": True}
            case "/update_weight_version" | "/weight_checker" if self.old:
                return 404
            case "/update_weight_version":
                self.weight_version = body["new_version"]
                return {}
            case "/weight_checker":
                held = ["model.embed_tokens.weight", *([] if self.tied else ["lm_head.weight"])]
                return {"checksums": {f"dp0:pp0:pcp0:tp{rank}:{name}": "" for rank in (0, 1) for name in held}}
            case "/finish_weight_update":
                self.weights |= self.wire(dict(self.calls)["/update_weights"]["update_info"])
                return {}
            case "/init_weight_transfer_engine" | "/shutdown_weight_transfer_engine":
                return 500 if self.refuses_to_join else {}
            case "/start_weight_update" | "/update_weights":
                return 500 if self.refuses_weights else {}
        return 404


class Handler(BaseHTTPRequestHandler):
    server: FakeServer

    def do_GET(self) -> None:
        self.answer(401 if self.is_locked() else self.server.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
        self.answer(401 if self.is_locked() else self.server.post(self.path, body))

    def is_locked(self) -> bool:
        key = self.server.api_key
        return bool(key) and self.path.startswith("/v1") and self.headers["Authorization"] != f"Bearer {key}"

    def answer(self, what: dict[str, Any] | int | str | None) -> None:
        self.server.encodings.add(self.headers["Accept-Encoding"])
        if what is None:
            return
        if isinstance(what, dict):
            what = self.server.mutate(self.path, what)
        status, headers, payload = RAW[what] if isinstance(what, str) else self.written(what)
        payload = payload.replace(b"KEY", str(self.headers["Authorization"]).encode()) if what != "endless" else payload
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):
            # An endless answer ends when the client has had enough of it.
            for _ in itertools.repeat(None) if what == "endless" else (None,):
                self.wfile.write(payload)
                self.server.sent += len(payload)

    def written(self, what: dict[str, Any] | bytes | int) -> tuple[int, dict[str, str], bytes]:
        """An answer, as it is where a test made its bytes, or an error that quotes the key it was sent."""
        error = {"error": f"on order: {self.headers['Authorization']}"}
        status, body = (what, error) if isinstance(what, int) else (200, what)
        payload = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Length": str(len(payload))}
        return status, headers | ({"Location": self.server.elsewhere} if 300 <= status < 400 else {}), payload

    def log_message(self, *_: Any) -> None:
        """Not on the console."""


def choice(prompt: int, index: int) -> dict[str, Any]:
    listed = [{f"token_id:{token}": 0.0, "token_id:63": -9999.0} for token in (prompt, index)]
    logprobs = {"token_logprobs": [-0.5, -1.0 - index], "top_logprobs": listed}
    return {"index": index, "token_ids": [prompt, index], "logprobs": logprobs, "finish_reason": "stop"}


def serving(count: int) -> Iterator[list[FakeServer]]:
    servers = [FakeServer() for _ in range(count)]
    yield servers
    for server in servers:
        server.stop()


def main(fault: str, attributes: str) -> None:
    server = FakeServer()
    vars(server).update(json.loads(attributes))
    server.faults = timed(json.loads(fault))
    print(server.url, flush=True)
    signal.pause()


def timed(fault: Any) -> Iterator[Any]:
    while fault is not None:
        print(time.monotonic(), flush=True)
        yield fault


if __name__ == "__main__":
    main(*sys.argv[1:])
