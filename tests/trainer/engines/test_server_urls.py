"""The server URLs that a trainer calls, and the parts of a URL that errors show."""

import asyncio
import ssl
from types import SimpleNamespace

import httpx
import pytest

from fused_grpo.errors import InputError
from fused_grpo.trainer.engines.engine_choice import server_urls
from fused_grpo.trainer.engines.server.replicas import Replica, Replicas, RequestError
from fused_grpo.trainer.engines.server.urls import checked_url, checked_urls


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
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    loaded = []
    empty = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    monkeypatch.setattr(ssl, "create_default_context", lambda: loaded.append("certificates") or empty)
    Replicas(["http://127.0.0.1:8000", "http://127.0.0.1:8001"])
    assert not loaded
    Replicas(["http://127.0.0.1:8000", "https://127.0.0.1:8001"])
    assert loaded == ["certificates"]


def asked(path: str, error: Exception) -> RequestError:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise error

    async def ask() -> object:
        async with httpx.AsyncClient(transport=httpx.MockTransport(refuse)) as client:
            url, _, route = path.rpartition("/")
            return await Replica(url, None).request(client, "GET", f"/{route}")

    with pytest.raises(RequestError) as refused:
        asyncio.run(ask())
    return refused.value


@pytest.mark.parametrize(
    ("reason", "code", "advice"),
    [
        ("CERTIFICATE_VERIFY_FAILED", 18, "; SSL_CERT_FILE names"),
        ("CERTIFICATE_VERIFY_FAILED", 20, "; SSL_CERT_FILE names"),
        ("CERTIFICATE_VERIFY_FAILED", 64, ""),  # of another host, which it says
        ("WRONG_VERSION_NUMBER", None, "; http:// is for a server without TLS"),
        ("UNEXPECTED_EOF_WHILE_READING", None, None),
    ],
)
def test_a_server_that_is_not_trusted_is_not_waited_for(reason, code, advice) -> None:
    cause = ssl.SSLError(1, reason)
    cause.reason, cause.verify_code = reason, code
    outer = httpx.ConnectError("all attempts failed")
    outer.__cause__ = cause
    refused = asked("https://gpu-node/health", outer)
    assert f"{reason}{advice or ''}" in str(refused).replace(")", "")
    assert ("SSL_CERT_FILE" in str(refused)) == ("SSL_CERT_FILE" in (advice or ""))
    assert refused.retry == (advice is None)


@pytest.mark.parametrize(
    ("path", "is_advised"),
    [("http://gpu-node/health", True), ("https://gpu-node/health", False), ("http://gpu-node/version", False)],
)
def test_a_server_that_hangs_up_before_it_is_up_may_have_tls(path, is_advised) -> None:
    refused = asked(path, httpx.RemoteProtocolError("Server disconnected"))
    assert ("https:// is for a server with TLS" in str(refused)) == is_advised
    assert refused.retry


@pytest.mark.parametrize("content", [None, "no certificate"])
def test_a_file_without_certificates_is_not_passed_over(tmp_path, monkeypatch, content) -> None:
    file = tmp_path / "server.pem"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("SSL_CERT_FILE", str(file))
    Replicas(["http://127.0.0.1:8000"])
    with pytest.raises(InputError, match=rf"^got SSL_CERT_FILE='{file}' and .*, want .* PEM .*fix: that of the server"):
        Replicas(["https://127.0.0.1:8000"])
