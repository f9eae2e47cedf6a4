"""One or several vLLM servers over HTTP: who is up, who gets the next request, what happens when one goes away.

All talk is in coroutines, and `Replicas.run` runs them under one deadline: nothing else needs a timeout of its own and
nothing can hang. At the deadline all that is in flight is cancelled, and vLLM drops requests whose client went away.

A server is not trusted either. A redirect is an error and never followed, an answer is read up to a size that fits what
was asked, and what it says is quoted in errors without the key that it was sent.

What a server says about itself is believed only if it carries the engine's tag. `load_weights` leaves a tag on each
server (vLLM's "weight version", a string that a restart forgets and another trainer's sync replaces), and `generate`
asks for it before and after. So a server that was killed and restarted, with the weights it was born with, is never
sampled from as if it were in step.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

import httpx

from fused_grpo.errors import InputError, UnavailableError
from fused_grpo.trainer.engines.server.urls import checked_url

T = TypeVar("T")
Json = dict[str, Any]

# Seconds before each time that one prompt is asked; and between two looks at a server that starts.
_PAUSES, _LOOK_AGAIN = (0.0, 0.1, 0.2, 0.4, 0.8), 0.5
# uvicorn closes idle connections after 5 s; one that we reuse in that moment would look like a server that died.
_KEEP_ALIVE = 2.0
# Of an answer: what any route but completions may send, and what a sampled token may take (its text, id and log-prob).
_ANSWER_BYTES, _TOKEN_BYTES = 16 << 20, 1 << 10

_log = logging.getLogger(__name__)


class RequestError(Exception):
    """One request to one server failed. `status` is None where no answer came.

    It and its cause may quote the server at any length: it is shown by way of `Replica.quoted`, and is nothing's cause.
    """

    def __init__(self, message: str, *, status: int | None = None, retry: bool = False) -> None:
        super().__init__(message)
        self.status, self.retry = status, retry


class Replica:
    """One server: where it is, how many requests of ours it is working on, what the last one that failed met."""

    def __init__(self, url: str, *, api_key: str | None = None) -> None:
        self.url, self._key = url, api_key
        self.in_flight = 0
        self.trouble = "no answer"
        self.has_checksums = True  # as far as is known

    def quoted(self, said: object, *, length: int = 1000) -> str:
        """What it said, for an error or a log: without the key that it was sent, and then not at any length."""
        text = said.decode(errors="replace") if isinstance(said, bytes) else str(said)
        return (text.replace(self._key, "...") if self._key else text)[:length]

    async def ask(self, client: httpx.AsyncClient, method: str, path: str, body: Json | None = None) -> Json:
        """The JSON object of the answer; an empty one where the answer is empty.

        Errors:
            RequestError: no answer, or one that says no. `retry` where another try may succeed.
        """
        self.in_flight += 1
        try:
            async with client.stream(method, self.url + path, json=body) as response:
                content = await _read(response, path, limit=_largest_answer(body))
        except httpx.HTTPError as error:
            self.trouble = f"{type(error).__name__} ({self.quoted(error) or 'connection lost'})"
            raise RequestError(self.trouble, retry=True) from error
        finally:
            self.in_flight -= 1
        if not response.is_success:
            status = response.status_code
            self.trouble = f"status {status} from {path}: {self.quoted(content, length=500)!r}"
            retry = status >= 500 or status == httpx.codes.TOO_MANY_REQUESTS
            raise RequestError(self.trouble, status=status, retry=retry)
        try:
            answer = json.loads(content) if content else {}
        except (ValueError, RecursionError) as error:
            said = self.quoted(content, length=200)
            raise RequestError(f"an answer from {path} that is not JSON: {said!r}") from error
        return answer if isinstance(answer, dict) else {"answer": answer}

    async def tag(self, client: httpx.AsyncClient) -> str | None:
        """The tag of its weights, None where it is too old to have one.

        Errors:
            RequestError: the server is down.
        """
        try:
            return str((await self.ask(client, "GET", "/weight_info")).get("weight_version"))
        except RequestError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return None
            raise

    async def carries(self, client: httpx.AsyncClient, tag: str) -> bool:
        """Whether the server is up, with the weights that were tagged so as far as it can tell."""
        try:
            return await self.tag(client) in (tag, None)
        except RequestError:
            return False


class Replicas:
    """All servers of an engine.

    Args:
        urls: "http://127.0.0.1:8000" and the like.
        allow_remote: take hosts that are not this machine.
        api_key: sent as a bearer token.
        max_concurrency: requests under way at a time.
        timeout: seconds in which each `run` ends.

    Errors:
        InputError: no URL, one that is none or holds more than an address, or a remote one without `allow_remote`.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        allow_remote: bool = False,
        api_key: str | None = None,
        max_concurrency: int = 256,
        timeout: float = 240.0,
    ) -> None:
        self.all = [Replica(checked_url(url, allow_remote=allow_remote), api_key=api_key) for url in urls]
        if len({replica.url for replica in self.all}) != len(urls) or not urls:
            shown = [replica.url for replica in self.all]
            raise InputError(f"got base_urls={shown}, want one URL or several different ones; fix: list each once")
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._max_concurrency, self.timeout = max_concurrency, timeout
        self._certificates = ssl.create_default_context()

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[T]], *, doing: str) -> T:
        """What `work` returns, within `timeout` seconds.

        Errors:
            UnavailableError: it took longer; names the servers and what they last said.
        """

        async def in_time() -> T:
            async with asyncio.timeout(self.timeout), self._session() as client:
                return await work(client)

        try:
            return _run_to_the_end(in_time())
        except TimeoutError as error:
            troubles = "; ".join(f"{replica.url}: {replica.trouble}" for replica in self.all)
            raise UnavailableError(
                f"got no end of {doing} within {self.timeout:g} s ({troubles}), want servers that answer; fix: start "
                "the server, look at its log, or raise vllm_server_timeout where it only needs longer"
            ) from error

    def post(self, path: str, body: Json | None = None, *, doing: str) -> None:
        """The same request to every server.

        Errors:
            UnavailableError: one refused it, or did not answer in time.
        """

        async def ask_all(client: httpx.AsyncClient) -> None:
            await self.on_each(lambda replica: replica.ask(client, "POST", path, body))

        self.run(ask_all, doing=doing)

    def _session(self) -> httpx.AsyncClient:
        """Connections for one call of the engine. Proxies of the environment are for the internet, not for these."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE)
        return httpx.AsyncClient(
            headers=self._headers,
            limits=limits,
            timeout=None,
            trust_env=False,
            follow_redirects=False,
            verify=self._certificates,
        )

    async def wait_until_ready(self, client: httpx.AsyncClient, replica: Replica) -> None:
        """Return once the server says that it is healthy."""
        while True:
            try:
                await replica.ask(client, "GET", "/health")
            except RequestError as error:
                if not error.retry:
                    raise
                await asyncio.sleep(_LOOK_AGAIN)
            else:
                return

    async def on_each(self, ask: Callable[[Replica], Awaitable[T]]) -> list[T]:
        """`ask` of every server, at the same time.

        Errors:
            UnavailableError: the first failure, naming the server.
        """

        async def asked(replica: Replica) -> T:
            try:
                return await ask(replica)
            except RequestError as error:
                raise UnavailableError(
                    f"got {replica.quoted(error)} at {replica.url}, want what was asked of it; fix: look at that "
                    "server's log"
                ) from None

        return await gathered([asked(replica) for replica in self.all])

    async def complete(
        self, client: httpx.AsyncClient, bodies: Sequence[Json], *, tag: str, read: Callable[[Json, Json], T]
    ) -> list[T]:
        """The answer to each body, from whichever server carries `tag`, in the order of `bodies`.

        A body is asked again, elsewhere if possible, when its server gives no answer or reports a failure of its own;
        also when its server, asked after all have been answered, does not say that it carries `tag` still. Exactly one
        answer to each is kept.

        Args:
            read: makes something useful of body and answer; it raises RequestError where it cannot.

        Errors:
            UnavailableError: no server is left, one refused a request, or a request failed too often.
        """
        live = list(self.all)
        await self._leave_out(client, live, among=self.all, tag=tag)
        turns = asyncio.Semaphore(self._max_concurrency)

        async def answered(body: Json) -> tuple[Replica, T]:
            async with turns:
                return await self._complete_one(client, body, live, tag=tag, read=read)

        answers: dict[int, tuple[Replica, T]] = {}
        while missing := [index for index in range(len(bodies)) if index not in answers]:
            answers |= zip(missing, await gathered([answered(bodies[index]) for index in missing]), strict=True)
            # All that answered, not only those that are left: one may have sampled from other weights before it went.
            givers = list({replica for replica, _ in answers.values()})
            unsure = await self._leave_out(client, live, among=givers, tag=tag)
            answers = {index: answer for index, answer in answers.items() if answer[0] not in unsure}
        return [answers[index][1] for index in range(len(bodies))]

    async def _leave_out(
        self, client: httpx.AsyncClient, live: list[Replica], *, among: Sequence[Replica], tag: str
    ) -> list[Replica]:
        """Which of `among` do not say that they carry `tag`. They are no longer in `live`."""
        carrying = await gathered([replica.carries(client, tag) for replica in among])
        lost = [replica for replica, carries in zip(among, carrying, strict=True) if not carries]
        live[:] = [replica for replica in live if replica not in lost]
        for replica in lost:
            _log.warning("%s is down or has other weights; sampling without it until the next sync", replica.url)
        return lost

    async def _complete_one(
        self, client: httpx.AsyncClient, body: Json, live: list[Replica], *, tag: str, read: Callable[[Json, Json], T]
    ) -> tuple[Replica, T]:
        """The answer, and who gave it."""
        last, tried = "none of them up with the weights of the last sync", list[Replica]()
        for pause in _PAUSES:
            await asyncio.sleep(pause)
            if not live:
                break
            # The least busy one may be least busy because it fails at once.
            replica = min(live, key=lambda replica: (tried.count(replica), replica.in_flight))
            tried.append(replica)
            try:
                answer = await replica.ask(client, "POST", "/v1/completions", body)
                with understood("/v1/completions"):
                    return replica, read(body, answer)
            except RequestError as error:
                last = f"{replica.quoted(error)} at {replica.url}"
                if not error.retry:
                    break
                if not await replica.carries(client, tag) and replica in live:
                    live.remove(replica)
                    _log.warning("%s: sampling without it until the next sync", last)
        raise UnavailableError(
            f"got {last}, want completions from {self}; fix: look at the server's log; one trainer per server; if it "
            "stopped, start it again and start the trainer from its last checkpoint"
        )

    def __str__(self) -> str:
        return ", ".join(replica.url for replica in self.all)


async def gathered(awaitables: Sequence[Awaitable[T]]) -> list[T]:
    """Their results, in order; at the first failure the others are cancelled and the failure is raised."""

    async def awaited(awaitable: Awaitable[T]) -> T:
        return await awaitable

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(awaited(awaitable)) for awaitable in awaitables]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from failures.exceptions[0].__cause__
    return [task.result() for task in tasks]


@contextmanager
def understood(path: str) -> Iterator[None]:
    """What is taken from an answer in here may not be there: that is the server's failure.

    Errors:
        RequestError: in place of the errors of looking something up.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError) as error:
        raise RequestError(
            f"an answer from {path} that vLLM does not give ({type(error).__name__}: {error})"
        ) from error


def _largest_answer(body: Json | None) -> int:
    """Bytes that may be read in answer to `body`, so that a server cannot fill the trainer's memory."""
    tokens = (body or {}).get("n", 0) * (body or {}).get("max_tokens", 0)
    return _ANSWER_BYTES + _TOKEN_BYTES * int(tokens)


async def _read(response: httpx.Response, path: str, *, limit: int) -> bytes:
    content = bytearray()
    async for piece in response.aiter_bytes():
        content += piece
        if len(content) > limit:
            raise RequestError(f"an answer from {path} of more than {limit} bytes")
    return bytes(content)


def _run_to_the_end(coroutine: Coroutine[Any, Any, T]) -> T:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    # In a notebook this thread has an event loop already, and it is busy calling us.
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
