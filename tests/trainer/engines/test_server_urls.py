"""The server URLs that a trainer calls, and the parts of a URL that errors show."""

import asyncio
import ssl
from types import SimpleNamespace

import httpx
import pytest

from fused_grpo.errors import InputError
from fused_grpo.trainer.engines.engine_choice import server_urls
from fused_grpo.trainer.engines.server.replicas import Replica, Replicas, RequestError, checked_url, checked_urls


@pytest.mark.parametrize(
    ("url", "called"),
    [
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("http://localhost:8000/v1/", "http://localhost:8000"),
        ("https://[::1]:8443/behind/a/proxy", "https://[::1]:8443/behind/a/proxy"),
        ("HTTP://127.8.9.10", "http://127.8.9.10"),
    ],
)
def test_loopback_is_called(url, called) -> None:
    assert checked_url(url, allow_remote=False) == called


@pytest.mark.parametrize(
    "url",
    [
        "http://192.168.1.7:8000",
        "http://gpu-node:8000",
        "http://0.0.0.0:8000",
        "http://127.0.0.1.example.com",
        "http://localhost.example.com",
        "http://[::ffff:192.168.1.7]:8000",
    ],
)
def test_another_machine_needs_consent(url) -> None:
    with pytest.raises(InputError, match=r"not on this machine.*fix:.*allow_remote=True"):
        checked_url(url, allow_remote=False)
    assert checked_url(url, allow_remote=True) == url


@pytest.mark.parametrize(
    "url",
    [
        "http://user:hunter2@127.0.0.1:8000",
        "http://127.0.0.1:8000@hunter2.example.com",
        "http://127.0.0.1:8000/?key=hunter2",
        "http://127.0.0.1:8000/#hunter2",
        r"http://127.0.0.1\hunter2@example.com",
        "user:hunter2@127.0.0.1:8000",
        "ftp://127.0.0.1/hunter2",
        "http://",
        "http://127.0.0.1:0/hunter2",
        "http://127.0.0.1:65536/hunter2",
        "http://127.0.0.1:8000,http://hunter2:8001",
    ],
)
@pytest.mark.parametrize("allow_remote", [False, True])
def test_more_or_less_than_an_address_is_refused_and_not_repeated(url, allow_remote) -> None:
    with pytest.raises(InputError, match="fix:") as refused:
        checked_url(url, allow_remote=allow_remote)
    assert "hunter2" not in str(refused.value).replace("hunter2.example.com", "")  # a host, and no secret


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_a_host_may_be_an_address_of_ipv6(host) -> None:
    args = SimpleNamespace(vllm_server_base_url=None, vllm_server_host=host, vllm_server_port=8000)
    assert checked_urls(server_urls(args), allow_remote=False) == ["http://[::1]:8000"]


@pytest.mark.parametrize("urls", [[], ["http://127.0.0.1:80", "http://127.0.0.1/v1"]])
def test_no_url_and_one_twice_are_refused(urls) -> None:
    given = SimpleNamespace(vllm_server_base_url=urls, vllm_server_host="127.0.0.1", vllm_server_port=8000)
    with pytest.raises(InputError, match=r"^got base_urls=\[.*fix: "):
        checked_urls(server_urls(given), allow_remote=False)


@pytest.mark.parametrize("key", ["", "hunter2\n", "hunter 2", "hünter2"])
def test_a_key_that_no_header_can_have_is_refused_and_not_repeated(key) -> None:
    with pytest.raises(InputError, match=r"^got an api_key that .*fix: ") as refused:
        Replicas(["http://127.0.0.1:8000"], api_key=key)
    assert "nter" not in str(refused.value)


def test_the_certificates_of_the_machine_are_loaded_for_https_alone(monkeypatch) -> None:
    loaded = []
    empty = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr(ssl, "create_default_context", lambda: loaded.append("certificates") or empty)
    Replicas(["http://127.0.0.1:8000", "http://127.0.0.1:8001"])
    assert not loaded
    Replicas(["http://127.0.0.1:8000", "https://127.0.0.1:8001"])
    assert loaded == ["certificates"]


@pytest.mark.parametrize(
    ("reason", "is_final"),
    [("CERTIFICATE_VERIFY_FAILED", True), ("WRONG_VERSION_NUMBER", True), ("UNEXPECTED_EOF_WHILE_READING", False)],
)
def test_a_server_that_is_not_trusted_is_not_waited_for(reason, is_final) -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        cause = ssl.SSLError(1, reason)
        cause.reason = reason
        raise httpx.ConnectError("all attempts failed") from cause

    async def ask() -> object:
        async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as client:
            return await Replica("https://gpu-node", None).request(client, "GET", "/health")

    with pytest.raises(RequestError, match=reason) as refused:
        asyncio.run(ask())
    assert refused.value.retry is not is_final
    assert ("SSL_CERT_FILE" in str(refused.value)) is is_final
