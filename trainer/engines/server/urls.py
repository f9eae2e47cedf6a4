"""Which server URLs a trainer calls: loopback unless told otherwise, and nothing in them but an address.

Weight sync needs a server's development mode, in which whoever reaches the server controls it, so calling another
machine is a choice that somebody has to make in so many words.
"""

from __future__ import annotations

import ipaddress
import socket

import httpx

from fused_grpo.errors import InputError


def checked_url(url: str, *, allow_remote: bool) -> str:
    """The URL that routes are appended to: without "/v1" and without anything that may not be logged.

    Errors:
        InputError: no URL, one with a user, password, query or fragment, or another machine's without `allow_remote`.
    """
    # Parsed by the library that makes the requests: two parsers may find two hosts in one string.
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
    if not (allow_remote or _is_this_machine(parts.host)):
        raise InputError(
            f"got server URL {shown!r}, which is not on this machine, want 127.0.0.1 or localhost: weight sync needs "
            "the server's development mode, and whoever reaches that controls it; fix: a loopback address, or "
            "vllm_server_allow_remote=True (allow_remote) on a network that you trust"
        )
    return (shown + parts.path).rstrip("/").removesuffix("/v1")


def is_this_machine(url: str) -> bool:
    """Whether a URL that was checked leads to loopback."""
    return _is_this_machine(httpx.URL(url).host)


def _is_this_machine(host: str) -> bool:
    """Loopback by its address. Of names only localhost, whose meaning nobody on the network decides."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" and all(map(_is_this_machine, _addresses(host)))


def _addresses(host: str) -> set[str]:
    try:
        return {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return set()
