"""Clients that disconnect, flood, stall or send no HTTP: the server keeps serving."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.server.api import CHAT, MESSAGES, Api, read_all, request, user

BODY: dict[str, Any] = {"model": "m", "messages": [user("Hi")], "max_tokens": 2}
CLOSE = "Connection: close"
CHUNKED = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(autouse=True)
def goes_on(llama: Api) -> Iterator[None]:
    """After each test the server still answers, quietly."""
    yield
    assert llama.message([user("Hi")], tokens=2).generated == 2
    assert "Traceback" not in llama.served.output


def test_pipelined_requests_are_answered_in_order(llama: Api) -> None:
    """Also behind a stream."""
    first = request(CHAT, BODY | {"stream": True})
    with llama.raw(first + request(MESSAGES, BODY) + request(CHAT, BODY, CLOSE)) as sock:
        got = read_all(sock)
    assert got.count(b"HTTP/1.1 200") == 3
    assert got.index(b"[DONE]") < got.index(b'"type":"message"') < got.index(b'"chat.completion"')


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize("cut", ["headers", "body", "chunk", "nothing"])
def test_a_socket_that_is_half_closed(llama: Api, path: str, cut: str) -> None:
    """A client that closes its end has left; whoever is cut off gets no reply for a half body."""
    whole = request(path, BODY)
    sent = {
        "headers": whole[:40],
        "body": whole[:-5],
        "chunk": CHUNKED + b"50\r\n" + whole[-20:],
        "nothing": b"",
    }[cut]
    with llama.raw(sent) as sock:
        sock.shutdown(1)
        assert b"200 OK" not in read_all(sock)


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x00\xc8\x01\x00\x00\xc4\x03\x03" + bytes(200),
        os.urandom(3000) + b"\r\n\r\n",
        CHUNKED + b"zz\r\n{}\r\n",
        CHUNKED + b"-1\r\n{}\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1" + b"0" * 30 + b"\r\n\r\n{}",
        CHUNKED.replace(b"Host: x", b"Host: x\r\nContent-Length: 5")
        + b"0\r\n\r\n"
        + request(CHAT, BODY),
        b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 1_000_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 100_000,
    ],
    ids=["tls", "noise", "size", "negative", "length", "long", "ambiguous", "header", "flood"],
)
def test_what_is_not_http(llama: Api, data: bytes) -> None:
    """An error that clients of both APIs can read, and the end of the connection."""
    with llama.raw() as sock:
        try:
            sock.sendall(data)
            got = sock.recv(65536)
        except TimeoutError:
            raise
        except OSError:
            return  # it closed before all was sent, for which macOS has EPROTOTYPE, too
        assert got.startswith((b"HTTP/1.1 400", b"HTTP/1.1 431"))
        said = json.loads(got.partition(b"\r\n\r\n")[2])
        assert said["type"] == "error"
        assert said["error"]["message"]


def test_a_large_body_is_refused_before_it_is_sent(llama: Api) -> None:
    """A client that asks first is told at once."""
    head = b"POST /v1/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000000\r\n"
    with llama.raw(head + b"Expect: 100-continue\r\n\r\n") as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 413")


def test_two_hundred_idle_connections(llama: Api) -> None:
    """Half of them in the middle of a request."""
    with ExitStack() as stack:
        for i in range(200):
            sent = b"" if i % 2 else request(MESSAGES, BODY)[:-5]
            stack.enter_context(llama.raw(sent))
        assert llama.chat([user("Hi")], tokens=2).generated == 2


def test_a_web_page_is_not_let_in(llama: Api) -> None:
    """Neither by a name of its own that points here, nor from its own origin."""
    for header in ("Host: evil.example", "Origin: https://evil.example"):
        data = request(CHAT, BODY, header, CLOSE)
        if header.startswith("Host"):
            data = data.replace(b"Host: x\r\n", b"", 1)
        with llama.raw(data) as sock:
            got = read_all(sock)
        assert got.startswith(b"HTTP/1.1 403")
        assert b"access-control" not in got.lower()
