"""Which server URLs are allowed: loopback unless the user allows others, and an address without a password or query.

Weight sync needs a server's development mode, in which any client that reaches the server controls it. So a server on
another machine needs an explicit option.
"""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

import httpx

from fused_grpo.errors import InputError


def checked_url(url: str, *, allow_remote: bool) -> str:
    """The URL that routes are appended to: without "/v1" and without anything that may not be logged.

    Raises:
        InputError: not a URL, one with a user, password, query or fragment, or another machine's without
            `allow_remote`.
    """
    # Parsed by the library that sends the requests: two parsers may find two hosts in one string.
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, ValueError, TypeError):
        parts = httpx.URL()
    if parts.scheme not in ("http", "https") or not parts.host:
        raise InputError(
            "got a server URL without scheme and host, want one such as 'http://127.0.0.1:8000'; fix: give both"
        )
    port = "" if parts.port is None else f":{parts.port}"
    shown = f"{parts.scheme}://{f'[{parts.host}]' if ':' in parts.host else parts.host}{port}"
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
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" and all(map(is_loopback, _addresses(host)))


def _addresses(host: str) -> set[str]:
    with suppress(OSError):
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    return set()
