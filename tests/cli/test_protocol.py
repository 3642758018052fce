"""Connections with slow, missing or invalid request headers."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator

import pytest
import uvicorn

from mlxcache.api.app import create_app
from mlxcache.cli.protocol import NOT_HTTP, TOO_LARGE, TOO_SLOW, Protocol
from tests.api.conftest import FakeEngine, eventually
from tests.api.fake import OneModel

GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


class Impatient(Protocol):
    head_seconds = 0.5


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A server with a timeout of half a second for headers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(
            create_app(OneModel(FakeEngine())),  # type: ignore[arg-type]
            http=Impatient,
            log_level="error",
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            eventually(lambda: server.started)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(10)


def talk(port: int, *sent: bytes) -> bytes:
    """Return all bytes until the server closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        for data in sent:
            sock.sendall(data)
        got = bytearray()
        while piece := sock.recv(65536):
            got += piece
        return bytes(got)


def said(got: bytes) -> str:
    body = json.loads(got.partition(b"\r\n\r\n")[2])
    assert body["type"] == "error"
    return str(body["error"]["message"])


def test_incomplete_headers_are_answered_408(port: int) -> None:
    got = talk(port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Slow")
    assert got.startswith(b"HTTP/1.1 408 ")
    assert said(got) == TOO_SLOW


def test_headers_sent_byte_by_byte_time_out(port: int) -> None:
    """A byte does not restart the timeout."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\n")
        sock.settimeout(0.05)
        got = b""
        for _ in range(400):
            try:
                sock.sendall(b"X")
                got = sock.recv(65536)
                break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            pytest.fail("the timeout did not apply")
    assert not got or got.startswith(b"HTTP/1.1 408 ")


def test_a_connection_without_a_request_is_closed(port: int) -> None:
    assert talk(port) == b""


def test_a_second_incomplete_request_times_out(port: int) -> None:
    """The first is answered; the timeout starts with the second."""
    got = talk(port, GET + b"GET /v1/mod")
    first, _, second = got.partition(b"HTTP/1.1 408 ")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert TOO_SLOW.encode() in second


def test_a_complete_request_keeps_its_connection(port: int) -> None:
    """Also after it was idle for longer than the timeout."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.connect()
    first = connection.sock
    for _ in range(2):
        connection.request("GET", "/v1/models")
        assert json.loads(connection.getresponse().read())["object"] == "list"
        threading.Event().wait(0.8)
    assert connection.sock is first
    connection.close()


def test_the_timeout_does_not_apply_to_a_body(port: int) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        sock.sendall(head + b"Connection: close\r\n\r\n{")
        threading.Event().wait(0.8)
        sock.sendall(b"}")
        assert sock.recv(65536).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    ("sent", "status", "why"),
    [
        (b"\x16\x03\x01 what\r\n\r\n", b"400", NOT_HTTP),
        (b"GET / HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000, b"431", TOO_LARGE),
    ],
)
def test_invalid_headers_are_answered_with_an_error(
    port: int, sent: bytes, status: bytes, why: str
) -> None:
    try:
        got = talk(port, sent)
    except ConnectionError:
        return  # closed while it was still sending
    assert got.startswith(b"HTTP/1.1 " + status)
    assert said(got).startswith(why)


LENGTH, CHUNKED = b"Content-Length: 5", b"Transfer-Encoding: chunked"


@pytest.mark.parametrize(
    "headers",
    [
        (LENGTH, CHUNKED),
        (CHUNKED, LENGTH),
        (LENGTH, b"TRANSFER-ENCODING: Chunked"),
        (LENGTH, b"Content-Length: 6"),
        (b"Content-Length: 5, 6",),
        (b"Transfer-Encoding: chunked, chunked",),
        (CHUNKED, CHUNKED),
        (b"Transfer-Encoding: xchunked",),
        (LENGTH, b"Transfer-Encoding: identity"),
        (b"Transfer-Encoding : chunked",),
    ],
    ids=lambda headers: b"+".join(headers).decode(),
)
def test_a_body_of_ambiguous_length_ends_the_connection(
    port: int, headers: tuple[bytes, ...]
) -> None:
    """The request that hides behind the body, whichever way it is read, is not answered."""
    head = b"\r\n".join([b"POST /v1/chat/completions HTTP/1.1", b"Host: x", *headers])
    got = talk(port, head + b"\r\n\r\n0\r\n\r\n" + GET)
    assert got.startswith(b"HTTP/1.1 400 ")
    assert got.count(b"HTTP/1.1 ") == 1
    assert said(got).startswith(NOT_HTTP)
