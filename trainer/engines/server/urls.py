"""The URLs at which a trainer calls servers, and why one of them cannot be reached."""

from __future__ import annotations

import ipaddress
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress

import httpx

from fused_grpo.errors import InputError, shown

_PROXY_ADVICE = {
    413: "a proxy before it takes no body of that size (nginx: client_max_body_size)",
    504: "a proxy before it waits no longer for an answer (nginx: proxy_read_timeout)",
}
# Codes of OpenSSL: self-signed, alone or at the end of a chain, and issuers that are not there.
_UNKNOWN_ISSUER = (18, 19, 20, 21)


def checked_urls(urls: Sequence[str], *, allow_remote: bool) -> list[str]:
    """All of them, as `checked_url` has them; InputError where there is none, or one twice."""
    checked = [checked_url(url, allow_remote=allow_remote) for url in urls]
    if len(set(checked)) != len(checked) or not checked:
        raise InputError(f"got base_urls={checked}, want one URL or several different ones; fix: list each once")
    return checked


def checked_url(url: str, *, allow_remote: bool) -> str:
    """The URL that routes are appended to: without "/v1" and without what may not be logged; else an InputError."""
    # Parsed by the library that sends the requests: two parsers may find two hosts in one string.
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, ValueError, TypeError):
        parts = httpx.URL()
    has_port = parts.port is None or 0 < parts.port < 65536  # None: that of the scheme
    if parts.scheme not in ("http", "https") or not parts.host or not has_port:
        raise InputError(
            "got a server URL without scheme, host, or a port that there is, want one such as "
            "'http://127.0.0.1:8000' or 'http://[::1]:8000'; fix: give all, and several URLs as a list"
        )
    shown = f"{parts.scheme}://{parts.netloc.decode()}"  # without the user
    if parts.userinfo or parts.query or parts.fragment:
        raise InputError(
            f"got more than an address in the server URL {shown}/..., want no user, password, query or fragment, "
            "because URLs are logged; fix: leave it out; VLLMServerEngine takes an api_key"
        )
    if not (allow_remote or is_loopback(parts.host)):
        raise InputError(
            f"got server URL {shown!r}, which is not on this machine, want 127.0.0.1 or localhost: weight sync needs "
            "the server's development mode, which any client that reaches it controls; fix: a loopback address, or "
            "vllm_server_allow_remote=True (allow_remote) on a network that you trust"
        )
    return (shown + parts.path).rstrip("/").removesuffix("/v1")


def is_loopback(host: str) -> bool:
    """Whether the host is a loopback address, or localhost where that resolves to nothing else."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    if host != "localhost":
        return False
    with suppress(OSError):  # it does not resolve
        return all(is_loopback(str(address[4][0])) for address in socket.getaddrinfo(host, None))
    return True


def certificates() -> ssl.SSLContext:
    """Those that servers of https are compared with: this machine's, or those in the file that SSL_CERT_FILE names.

    InputError for a file that OpenSSL would pass over, as if it had no certificates.
    """
    if file := os.environ.get("SSL_CERT_FILE"):
        try:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(file)
        except OSError as error:
            raise InputError(
                f"got SSL_CERT_FILE={file!r} and {error}, want a file with certificates in PEM for a server of https; "
                "fix: that of the server (--ssl-certfile), or leave the variable out"
            ) from error
    return ssl.create_default_context()


def unreachable(error: httpx.HTTPError, url: str) -> tuple[str, bool]:
    """Why a request to `url` had no response, with what to do about it; and whether waiting may help."""
    cause = innermost(error)
    reason, advice = getattr(cause, "reason", None), ""
    if reason == "WRONG_VERSION_NUMBER":
        advice = "; http:// is for a server without TLS"
    elif getattr(cause, "verify_code", None) in _UNKNOWN_ISSUER:  # else OpenSSL says what else is wrong with it
        advice = "; SSL_CERT_FILE names a file of certificates that this machine does not have"
    elif isinstance(error, httpx.RemoteProtocolError) and url.startswith("http:") and url.endswith("/health"):
        advice = "; https:// is for a server with TLS"  # which closes the connection; one that starts refuses it
    text = f"{type(error).__name__} ({str(cause)[:500] or 'connection lost'}{advice})"
    return text, reason not in ("CERTIFICATE_VERIFY_FAILED", "WRONG_VERSION_NUMBER")


def refused(response: httpx.Response, text: str, *, has_key: bool) -> str:
    """What to do about an error status with that body; "": it says it, if anything does."""
    if "Out of range float values" in text:  # of Python's json, from a server whose answer has them
        return "; it has log-probs that are not finite, as with NaN in its weights or logits"
    if advice := _PROXY_ADVICE.get(response.status_code):
        return f"; {advice}"
    if response.status_code == httpx.codes.UNAUTHORIZED:
        missing = "VLLMServerEngine has an api_key for a server with --api-key"
        return "; its --api-key is not the api_key of this VLLMServerEngine" if has_key else f"; {missing}"
    if target := response.headers.get("Location", "") * response.is_redirect:
        return f" (its redirect to {shown(target, 200)} is not followed)"
    return ""


def innermost(error: BaseException) -> BaseException:
    """What an error comes from: refused, no such host, too many open files, where httpx says that no attempt worked."""
    while inner := [*getattr(error, "exceptions", ()), error.__cause__ or error.__context__][0]:
        error = inner
    return error
