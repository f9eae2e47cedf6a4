"""Requests to one or several vLLM servers over HTTP; docs/engines.md ("When something fails") has what a failure does.

All requests are coroutines under one deadline (`Replicas.run`), so no request needs a timeout of its own. At the
deadline all requests in flight are cancelled, and vLLM drops requests whose client disconnects.

Responses are not trusted: they may come from another program, another version or a broken server. All pass through
`Replica.request`, and `parsed` compares all of them with types, so that the code behind it needs no guards.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import logging
import re
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, is_dataclass
from functools import cache, partial
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import httpx
import numpy as np

from fused_grpo.errors import InputError, UnavailableError, shown
from fused_grpo.trainer.common.threads import event_loop
from fused_grpo.trainer.engines.sampling import Completion, as_experts, listed_support
from fused_grpo.trainer.engines.server.own_server import OwnServer
from fused_grpo.trainer.engines.server.urls import certificates, checked_urls, refused, unreachable
from fused_grpo.trainer.types import FinishReason

T = TypeVar("T")
Json = dict[str, Any]

# Seconds before each attempt of one prompt at one server; and between two health checks of a server that starts.
_PAUSES, _HEALTH_INTERVAL = (0.0, 0.2, 1.0), 0.5
_LATER = {408, 425, 429}  # below 500: of a proxy whose connection was idle, before TLS is there, of one that is busy
_LONGEST_PAUSE = 60.0  # that a server may ask for, as for OpenAI's client
# uvicorn closes idle connections after 5 s; one that is reused in that moment would look like a server that died.
_KEEP_ALIVE = 2.0
_MOMENT = 0.1  # seconds from the end of a process' connections to its own
_GRACE = 1.0  # seconds that the other servers have to answer after one has failed
# Largest response: of any route but completions, for each sampled token (its text, id and log-prob), each listed one,
# and the experts of each token that was read or sampled (1,365 of them in all layers, two bytes of each in base64).
_RESPONSE_BYTES, _TOKEN_BYTES, _LISTED_BYTES, _EXPERT_BYTES = 16 << 20, 1 << 10, 1 << 7, 1 << 12

_KEY = re.compile("[!-~]+")

_log = logging.getLogger(__name__)


class RequestError(Exception):
    """One request to one server failed; `retry`: another server may respond, and this one after a `pause` in seconds.

    The message may quote the response: show it through `Replica.redacted`, and do not chain it to another exception.
    """

    def __init__(self, message: str, *, retry: bool = False, pause: float = 0.0) -> None:
        super().__init__(message)
        self.retry, self.pause = retry, pause


class NoRouteError(RequestError):
    """Status 404: the server's vLLM is too old for that route, or not in development mode."""


class FailedError(RequestError):
    """Status 500: vLLM itself has failed at it, where others above come from what is before it."""


@dataclass(frozen=True)
class Logprobs:
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None = None


@dataclass(frozen=True)
class Choice:
    index: int
    token_ids: list[int]
    logprobs: Logprobs
    finish_reason: str
    routed_experts: str | None = None  # an .npy file in base64


class Replica:
    """One server."""

    def __init__(self, url: str, api_key: str | None, own: OwnServer | None = None) -> None:
        self.url, self._key, self._own = url, api_key, own
        self.log = "the server's log" if own is None else f"its log, {own.log}"
        self.in_flight = 0  # requests without a response so far
        self.last_error = ""  # of its last request; "": it was answered, or there was none

    def redacted(self, text: str) -> str:
        """Text of a response for an error, without the API key."""
        return text.replace(self._key, "...") if self._key else text

    async def ask(
        self, client: httpx.AsyncClient, path: str, body: Json | None = None, *, field: str, kind: type[T]
    ) -> T:
        """A field of the response, of a kind that `parsed` knows, or RequestError; POST where there is a body."""
        read = partial(self.request, client, "GET", path)
        answer = await (self.request(client, "POST", path, body) if body else asked_again(read))
        try:
            value: T = parsed(kind, parsed(dict[str, object], answer, "it").get(field), field)
        except ValueError as error:
            problem = f"{type(error).__name__}: {error}"
            raise RequestError(f"an answer from {path} that vLLM does not give ({problem})") from None
        return value

    async def request(
        self, client: httpx.AsyncClient, method: str, path: str, body: Json | None = None, *, is_json: bool = True
    ) -> object:
        """The JSON of the response, {} where it is empty, or its text if not `is_json`.

        RequestError: no response, an error status, or no JSON.
        """
        self.in_flight += 1
        try:
            async with client.stream(method, self.url + path, json=body) as response:
                content = await _read(response, path, limit=_largest_response(body))
        except httpx.HTTPError as error:
            if self._own is not None:
                await asyncio.sleep(_MOMENT)
            problem, may_pass = unreachable(error, self.url + path)
            await self._failed(problem)
            has_ended = self._own is not None and self._own.has_ended
            raise RequestError(self.last_error, retry=may_pass and not has_ended) from error
        except asyncio.CancelledError:  # at the deadline
            self.last_error = self.last_error or f"no answer from {path}"
            raise
        finally:
            self.in_flight -= 1
        if not response.is_success:
            status, text = response.status_code, self.redacted(content.decode(errors="replace"))
            advice = refused(response, text, has_key=self._key is not None)
            await self._failed(f"status {status} from {path}: {text[:500]!r}{advice}")
            kind = {404: NoRouteError, 500: FailedError}.get(status, RequestError)
            asked = response.headers.get("Retry-After", "")  # of what may be before a server, such as nginx
            pause = min(float(asked), _LONGEST_PAUSE) if asked.isdecimal() else 0.0
            raise kind(self.last_error, retry=status >= 500 or status in _LATER, pause=pause)
        self.last_error = ""
        if not is_json:
            return content.decode(errors="replace")
        try:
            return json.loads(content or b"{}")
        except (ValueError, RecursionError):
            text = self.redacted(content.decode(errors="replace"))
            raise RequestError(f"an answer from {path} that is not JSON: {text[:200]!r}") from None

    async def _failed(self, problem: str) -> None:
        """Keep what went wrong, with what the log of a server of the trainer's own says of it."""
        errors = "" if self._own is None else await asyncio.to_thread(self._own.errors)
        self.last_error = self.redacted(f"{errors} ({problem})" if errors else problem)

    async def has_weight_version(self, client: httpx.AsyncClient, version: str) -> bool:
        """Whether the server's weights have this version, or it is too old to have versions."""
        try:
            return await self.ask(client, "/weight_info", field="weight_version", kind=str) == version
        except NoRouteError:
            return True

    async def wait_until_ready(self, client: httpx.AsyncClient) -> None:
        """Return once the server reports that it is healthy."""
        for attempt in itertools.count():
            try:
                await self.request(client, "GET", "/health")
                return
            except RequestError as error:
                if not error.retry:
                    raise
            if attempt == 0 and self._own is None:  # which one that was just started never is
                _log.warning("waiting for %s, which is not up: %s", self.url, shown(self.last_error))
            await asyncio.sleep(_HEALTH_INTERVAL)


class Replicas:
    """All servers of an engine. The arguments are those of VLLMServerEngine; `api_key` is sent as a bearer token.

    `own` is one that the trainer has started, in the place of those at `urls`.

    InputError: a key that no header can have, or what `checked_urls` refuses.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        allow_remote: bool = False,
        api_key: str | None = None,
        max_concurrency: int = 256,
        timeout: float | None = 240.0,
        own: OwnServer | None = None,
    ) -> None:
        # Else an error of httpx would quote it, or be one of a type of its own.
        if api_key is not None and not _KEY.fullmatch(api_key):
            raise InputError(
                "got an api_key that is empty, or has a space, a line end or a character outside of ASCII, want that "
                "of the servers; fix: key.strip() of one that was read from a file"
            )
        if own is None:
            self.all = [Replica(url, api_key) for url in checked_urls(urls, allow_remote=allow_remote)]
        else:
            self.all = [Replica(own.url, None, own)]
        self._socket = None if own is None else own.socket
        self._headers = {"Accept-Encoding": "identity"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._slots, self.timeout = asyncio.Semaphore(max_concurrency), timeout  # of all calls
        # Loading the certificates of the machine is slow. Without them, no server of https is trusted.
        https = any(replica.url.startswith("https:") for replica in self.all)
        self._certificates = certificates() if https else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[T]], *, doing: str) -> T:
        """The result of `work`; UnavailableError with each server's last error after `timeout` seconds."""

        async def with_deadline() -> T:
            # Without the environment's proxies, which are for the internet.
            limits = httpx.Limits(keepalive_expiry=_KEEP_ALIVE)
            transport = httpx.AsyncHTTPTransport(verify=self._certificates, limits=limits, uds=self._socket)
            connections = httpx.AsyncClient(
                headers=self._headers, timeout=None, trust_env=False, follow_redirects=False, transport=transport
            )
            async with asyncio.timeout(self.timeout), connections as client:
                return await work(client)

        # Of its own: a notebook runs a loop in this thread, and a user's functions may block theirs.
        call = asyncio.run_coroutine_threadsafe(with_deadline(), event_loop("servers"))
        try:
            return call.result()
        except TimeoutError as error:
            problems = (f"{replica.url}: {replica.last_error}" for replica in self.all if replica.last_error)
            errors = "; ".join(problems) or self
            raise UnavailableError(
                f"got no end of {doing} within {self.timeout:g} s ({errors}), want servers that answer; fix: start "
                "the server, look at its log, or raise vllm_server_timeout where it only needs longer"
            ) from error
        finally:
            call.cancel()  # where Ctrl-C has ended the waiting

    def post(self, path: str, body: Json | None = None) -> None:
        """Send every server a request of loading weights; UnavailableError where one refuses it or does not respond."""
        self.each(lambda client, replica: replica.request(client, "POST", path, body), doing="loading weights")

    def each(self, work: Callable[[httpx.AsyncClient, Replica], Awaitable[T]], *, doing: str) -> list[T]:
        """`run` of `work` on every server, at the same time; the first failure is an UnavailableError that names it."""

        async def on_one(client: httpx.AsyncClient, replica: Replica) -> T:
            try:
                return await work(client, replica)
            except RequestError as error:
                raise UnavailableError(
                    f"got {replica.redacted(str(error))[:1000]} at {replica.url}, want what was asked of it; fix: look "
                    f"at {replica.log}"
                ) from None

        return self.run(lambda client: _together(on_one(client, replica) for replica in self.all), doing=doing)

    def complete(
        self, bodies: Sequence[Json], *, weight_version: str, top: int, out: dict[Replica, str] | None = None
    ) -> list[Completion]:
        """The completions of each body, in the order of `bodies`, from servers whose weights have `weight_version`.

        A body goes to the least busy server, and to another one when that is out. One response to each is kept. With
        `top` they list so many of the most likely tokens. `out` are servers that are not asked any more, and why; None:
        of this call.

        UnavailableError: no server is left, one refused a request, or time is up.
        """
        out = {} if out is None else out

        def leave_out(replica: Replica, problem: str) -> None:
            if replica not in out:
                out[replica] = f"{problem} at {replica.url}"
                _log.warning("%s is down or has other weights; sampling without it: %s", replica.url, shown(problem))

        async def completed(client: httpx.AsyncClient, body: Json) -> tuple[Replica, list[Completion]]:
            async with self._slots:
                while live := [replica for replica in self.all if replica not in out]:
                    replica = min(live, key=lambda replica: replica.in_flight)
                    try:
                        return replica, await asked_again(partial(_completions, client, replica, body, top=top))
                    except RequestError as error:
                        problem = replica.redacted(str(error))[:1000]
                        # Without a route it was restarted, and does not know the adapter of the sync.
                        if not error.retry and not isinstance(error, NoRouteError):
                            raise self._no_completions(f"{problem} at {replica.url}") from None
                    leave_out(replica, problem)
            whys = "; ".join(out.values())
            raise self._no_completions(f"none of them up with the weights of the last sync: {whys}")

        async def problem_of(client: httpx.AsyncClient, replica: Replica) -> str:
            try:
                is_current = await replica.has_weight_version(client, weight_version)
            except RequestError as error:
                return replica.redacted(str(error))[:1000]
            return "" if is_current else "other weights than those of the last sync"

        async def all_completed(client: httpx.AsyncClient) -> list[Completion]:
            answers: dict[int, tuple[Replica, list[Completion]]] = {}
            while missing := [index for index in range(len(bodies)) if index not in answers]:
                results = await _together(completed(client, bodies[index]) for index in missing)
                answers |= zip(missing, results, strict=True)
                # All that responded, not only live ones: one may have sampled from other weights before it stopped.
                responders = list({replica for replica, _ in answers.values()})
                problems = await _together(problem_of(client, each) for each in responders)
                stale = {replica: problem for replica, problem in zip(responders, problems, strict=True) if problem}
                for replica, problem in stale.items():
                    leave_out(replica, problem)
                answers = {index: result for index, result in answers.items() if result[0] not in stale}
            return [completion for index in range(len(bodies)) for completion in answers[index][1]]

        return self.run(all_completed, doing=f"completing {len(bodies)} prompts")

    def _no_completions(self, problem: str) -> UnavailableError:
        again = "one trainer per server; if it stopped, start it again and " * (self._socket is None)
        return UnavailableError(
            f"got {problem}, want completions from {self}; fix: look at {self.all[0].log}; {again}start the trainer "
            "from its last checkpoint"
        )

    def __str__(self) -> str:
        return ", ".join(replica.url for replica in self.all)


async def asked_again(ask: Callable[[], Awaitable[T]], *, but: type[RequestError] | None = None) -> T:
    """The result of `ask`, which is called once more after each pause where another call may have one; not after `but`.

    So what is asked may arrive twice: its answer was lost, or a proxy has sent it again.
    """
    retry_after = 0.0
    for pause in _PAUSES:
        if pause:  # else its request begins before the next prompt looks for the least busy server
            await asyncio.sleep(max(pause, retry_after))
        try:
            return await ask()
        except RequestError as error:
            if not error.retry or (but and isinstance(error, but)):
                raise
            last, retry_after = error, error.pause
    raise last


async def _completions(client: httpx.AsyncClient, replica: Replica, body: Json, *, top: int) -> list[Completion]:
    """The completions of one prompt: as many as were asked for, in the order of their index."""
    choices = await replica.ask(client, "/v1/completions", body, field="choices", kind=list[Choice])
    choices.sort(key=lambda choice: choice.index)
    indices = [choice.index for choice in choices]
    if indices != list(range(body["n"])):
        raise RequestError(f"completions {indices} where {body['n']} were asked for")
    return [_completion(choice, body, top=top) for choice in choices]


def _completion(choice: Choice, body: Json, *, top: int) -> Completion:
    if choice.finish_reason not in ("stop", "length"):
        raise RequestError(f"a completion that ended with {choice.finish_reason!r}", retry=True)
    if choice.finish_reason == "length" and len(choice.token_ids) < body["max_tokens"]:
        raise RequestError(
            f"a completion that ended for its length after {len(choice.token_ids)} of {body['max_tokens']} tokens, as "
            "with max_new_tokens in --override-generation-config or --generation-config"
        )
    # Values and lengths are checked with those of all engines, in checked_engine.py.
    steps = map(_by_id, choice.logprobs.top_logprobs or [])
    support = listed_support(steps, top) if body["logprobs"] > 0 else None
    reason = cast(FinishReason, choice.finish_reason)
    experts = None if choice.routed_experts is None else as_experts(_array(choice.routed_experts))
    return Completion(choice.token_ids, choice.logprobs.token_logprobs, reason, support, experts)


def _array(encoded: str) -> Any:
    """The array of whole numbers of an .npy file in base64."""
    try:
        array = np.load(io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False)
        if array.dtype.kind not in "ui" or array.ndim != 3:
            raise ValueError(f"numbers of type {array.dtype} and shape {array.shape}")
    except Exception as error:  # of several types, all about this text
        raise RequestError(f"routed_experts that are no array of expert ids ({shown(error, 200)})") from None
    return array


def _by_id(step: dict[str, float]) -> dict[int, float]:
    """The log-probs of one token, under "token_id:5" in the answer."""
    names = [name.removeprefix("token_id:") for name in step]
    if wrong := [name for name in names if not (name.isascii() and name.isdecimal() and len(name) < 10)]:
        raise RequestError(f"kept tokens called {wrong[0][:50]!r}, want token ids")
    return dict(zip(map(int, names), step.values(), strict=True))


def _largest_response(body: Json | None) -> int:
    """Bytes of a response that are read at most, so that a server cannot fill the trainer's memory."""
    given = body or {}
    sequences = given.get("n", 0)
    tokens, read = sequences * given.get("max_tokens", 0), sequences * len(given.get("prompt", ()))
    token_bytes = _TOKEN_BYTES + _LISTED_BYTES * int(given.get("logprobs", 0))
    return _RESPONSE_BYTES + token_bytes * int(tokens) + _EXPERT_BYTES * int(tokens + read)


async def _read(response: httpx.Response, path: str, *, limit: int) -> bytes:
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":  # a few bytes may expand to gigabytes
        raise RequestError(
            f"an answer from {path} with Content-Encoding {encoding[:50]!r}, though identity was asked for"
        )
    content = bytearray()
    async for piece in response.aiter_raw():
        content += piece
        if len(content) > limit:
            raise RequestError(f"an answer from {path} of more than {limit} bytes")
    return bytes(content)


async def _together(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all, in their order, or the first error; then the others have a second to end.

    A connection that is cancelled before its first step leaves a `RuntimeWarning` of anyio 4.16 behind.
    """
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        _, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        if unfinished:
            await asyncio.wait(unfinished, timeout=_GRACE)
        for ended in filter(asyncio.Future.done, tasks):
            ended.result()  # raises the error
        return [task.result() for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def parsed(kind: Any, value: Any, at: str) -> Any:
    """JSON as `kind`: a dataclass, list or dict of one kind, a plain type, object, or one of them or None."""
    outer, inner = get_origin(kind) or kind, get_args(kind)
    if outer is UnionType:
        return None if value is None else parsed(inner[0], value, at)
    if outer is float and type(value) is int and abs(value) < 1e300:
        return float(value)
    if outer is not object and type(value) is not (dict if is_dataclass(outer) else outer):
        raise ValueError(f"{at} is {type(value).__name__}, want {outer.__name__}")
    if outer is str:
        value.encode()  # a lone surrogate can be sent to no server and written to no file
    if is_dataclass(outer):
        hints = _hints(kind)
        if missing := [name for name in hints if name not in value and not hasattr(outer, name)]:  # without a default
            raise ValueError(f"{at} is without {missing[0]}")
        return kind(**{name: parsed(hints[name], value[name], f"{at}.{name}") for name in hints if name in value})
    # All at once where it can be: item by item takes half a second for a million.
    if outer is list and (inner[0] is str or set(map(type, value)) != {inner[0]}):
        return [parsed(inner[0], item, f"{at}[{index}]") for index, item in enumerate(value)]
    if outer is dict and set(map(type, value.values())) != {inner[1]}:
        return {name: parsed(inner[1], item, f"{at}[{name[:20]!r}]") for name, item in value.items()}
    return value


_hints = cache(get_type_hints)
