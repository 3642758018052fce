"""The application over HTTP: limits, timeouts and broken connections."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from mlxcache.api.http import ApiSettings
from tests.api.conftest import FakeEngine, eventually, reply

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
MESSAGE: dict[str, Any] = CHAT | {"model": "m", "max_tokens": 5}
CHAT_PATH, MESSAGE_PATH = "/v1/chat/completions", "/v1/messages"
BOTH = pytest.mark.parametrize(
    ("path", "body"), [(CHAT_PATH, CHAT), (MESSAGE_PATH, MESSAGE)], ids=["openai", "anthropic"]
)


@contextlib.contextmanager
def connected(url: str, receive_buffer: int | None = None) -> Iterator[socket.socket]:
    """Open a raw connection to the server at `url`."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.socket() as connection:
        if receive_buffer:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        connection.settimeout(5)
        connection.connect((host, int(port)))
        yield connection


def raw(path: str, body: Any) -> bytes:
    """Encode an HTTP request with `body` as JSON."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    return head.encode() + content


def alive(url: str) -> bool:
    return httpx.get(f"{url}/health").status_code == 200


class TestLimit:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(max_body_bytes=1000)

    @BOTH
    async def test_a_body_beyond_the_limit_is_a_413(
        self, client: httpx.AsyncClient, path: str, body: Any
    ) -> None:
        content = json.dumps(body | {"padding": "x" * 1000})
        response = await client.post(path, content=content)
        assert response.status_code == 413
        assert "1000 bytes" in response.json()["error"]["message"]

        async def chunks() -> Any:
            yield content[:500].encode()
            yield content[500:].encode()

        assert (await client.post(path, content=chunks())).status_code == 413


class TestSockets:
    """Disconnects and stalls on a real socket."""

    @BOTH
    def test_a_client_that_leaves_cancels_its_streamed_reply(
        self, live: str, engine: FakeEngine, path: str, body: Any
    ) -> None:
        engine.script = [*reply("Hello")[:2], 60.0]
        with httpx.stream("POST", live + path, json=body | {"stream": True}) as response:
            lines = response.iter_lines()
            assert any("Hello" in line for line in lines)
            assert not engine.streams[0].closed.is_set()
        assert engine.streams[0].closed.wait(5)
        assert engine.streams[0].cancelled

    @BOTH
    def test_a_client_that_leaves_cancels_its_whole_reply(
        self, live: str, engine: FakeEngine, path: str, body: Any
    ) -> None:
        engine.script = [60.0]
        with connected(live) as connection:
            connection.sendall(raw(path, body))
            eventually(lambda: engine.streams)
        assert engine.streams[0].closed.wait(5)
        assert engine.streams[0].cancelled
        assert alive(live)

    @BOTH
    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_while_it_waits_in_the_queue_is_cancelled(
        self, live: str, engine: FakeEngine, path: str, body: Any, stream: bool
    ) -> None:
        engine.queue_s = 60.0
        with connected(live) as connection:
            connection.sendall(raw(path, body | {"stream": stream}))
            eventually(lambda: engine.streams)
        assert engine.streams[0].closed.wait(5)


class TestImpatience:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(ping_seconds=0.1, send_timeout=0.3, queue_grace=0.2)

    def test_openais_silence_is_filled_with_progress(self, live: str, engine: FakeEngine) -> None:
        engine.script = [*reply("x")[:1], 0.25, *reply("Hello")[1:]]
        text = httpx.post(live + CHAT_PATH, json=CHAT | {"stream": True}).text
        assert ": prefill 0/3\n\n" in text.partition("Hello")[0]

    def test_anthropics_silence_is_filled_with_ping_events(
        self, live: str, engine: FakeEngine
    ) -> None:
        engine.script = [*reply("x")[:1], 0.35, *reply("Hello")[1:]]
        text = httpx.post(live + MESSAGE_PATH, json=MESSAGE | {"stream": True}).text
        before = text.partition("Hello")[0]
        assert before.count('event: ping\ndata: {"type":"ping"}\n\n') >= 2

    @BOTH
    def test_a_stream_that_waits_in_the_queue_begins_after_the_grace(
        self, live: str, engine: FakeEngine, path: str, body: Any
    ) -> None:
        engine.queue_s = 60.0
        began = time.monotonic()
        with httpx.stream("POST", live + path, json=body | {"stream": True}) as response:
            assert response.status_code == 200
            assert time.monotonic() - began >= 0.2
            lines = response.iter_lines()
            assert any(line in ("event: ping", ": queued") for line in lines)
        assert engine.streams[0].closed.wait(5)

    @BOTH
    def test_a_stream_that_waited_longer_than_the_grace_ends_well(
        self, live: str, engine: FakeEngine, path: str, body: Any
    ) -> None:
        engine.queue_s = 0.5
        response = httpx.post(live + path, json=body | {"stream": True})
        assert "world" in response.text
        assert not engine.streams[0].cancelled


SERVER = """
import sys, uvicorn
from mlxcache.api.app import create_app
from tests.api.conftest import FakeEngine, reply
from tests.api.fake import OneModel
engine = FakeEngine()
engine.script = [*reply("Hello")[:2], 60.0]
uvicorn.run(create_app(OneModel(engine)), port=int(sys.argv[1]), timeout_graceful_shutdown=5)
"""


def test_sigterm_ends_streams_with_an_error_event() -> None:
    """One of each API."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stderr=subprocess.PIPE)
    try:
        eventually(lambda: reachable(url), 90)
        with contextlib.ExitStack() as stack:
            streams = []
            for path, body in ((CHAT_PATH, CHAT), (MESSAGE_PATH, MESSAGE)):
                asked = httpx.stream("POST", url + path, json=body | {"stream": True})
                streams.append(stack.enter_context(asked).iter_lines())
                assert any("Hello" in line for line in streams[-1])
            server.terminate()
            for lines in streams:
                assert "the server is stopping" in "".join(lines)
        _, log = server.communicate(timeout=10)
        assert b"Traceback" not in log
    finally:
        server.kill()
        server.wait()


def reachable(url: str) -> bool:
    try:
        return alive(url)
    except httpx.TransportError:
        return False
