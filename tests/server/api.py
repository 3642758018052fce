"""A client of a real server for tests, and readers of its answers."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.served import Served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
END_IDS = {"0": -100, "1": -100, "2": -100}
"""A bias that keeps a toy from ending its turn."""


@dataclass(frozen=True)
class Answer:
    """A reply, whichever API it came by: its text, and its counts in tokens."""

    text: str
    prompt: int
    cached: int
    generated: int
    id: str

    @property
    def fed(self) -> int:
        return self.prompt - self.cached


class Api:
    def __init__(self, served: Served):
        self.served = served
        self.url = served.url
        self.http = httpx.Client(base_url=self.url, timeout=120)

    def post(self, path: str, body: Any, **headers: str) -> httpx.Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(path, content=data, headers=headers)

    def chat(self, messages: list[dict[str, Any]], tokens: int = 24, **extra: Any) -> Answer:
        """A greedy chat completion."""
        body = {"messages": messages, "max_tokens": tokens, "temperature": 0} | extra
        response = self.post(CHAT, body)
        assert response.status_code == 200, response.text
        reply = response.json()
        usage = reply["usage"]
        return Answer(
            reply["choices"][0]["message"]["content"],
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
            usage["completion_tokens"],
            response.headers["x-mlxcache-request"],
        )

    @contextmanager
    def replying(self, text: str, **extra: Any) -> Iterator[None]:
        """Meanwhile a long reply to a person's message is streamed; then its client leaves."""
        body = {"messages": [user(text)], "max_tokens": 7000, "stream": True} | extra
        stop = threading.Event()

        def read() -> None:
            asked = body | {"logit_bias": END_IDS}
            with self.http.stream("POST", CHAT, json=asked) as response:
                for _ in response.iter_bytes():
                    if stop.is_set():
                        return

        reading = threading.Thread(target=read)
        reading.start()
        try:
            yield
        finally:
            stop.set()
            reading.join(60)

    def message(self, messages: list[dict[str, Any]], tokens: int = 24, **extra: Any) -> Answer:
        """A greedy message."""
        body = {"model": "m", "messages": messages, "max_tokens": tokens, "temperature": 0} | extra
        response = self.post(MESSAGES, body)
        assert response.status_code == 200, response.text
        reply = response.json()
        usage = reply["usage"]
        read = usage["cache_read_input_tokens"]
        return Answer(
            "".join(block.get("text", "") for block in reply["content"]),
            usage["input_tokens"] + usage["cache_creation_input_tokens"] + read,
            read,
            usage["output_tokens"],
            response.headers["x-mlxcache-request"],
        )

    def count(self, **body: Any) -> int:
        response = self.post(COUNT, {"model": "m"} | body)
        assert response.status_code == 200, response.text
        return int(response.json()["input_tokens"])

    def record(self, id: str) -> dict[str, Any]:
        return dict(self.http.get(f"/v1/requests/{id}").json())

    def finished(self, id: str) -> dict[str, Any]:
        until(lambda: self.record(id)["status"] == "done", 10, lambda: str(self.record(id)))
        return self.record(id)

    def record_of(self, session: str) -> dict[str, Any]:
        """Return the newest record of a session."""
        for record in self.http.get("/v1/requests?limit=1000").json()["data"]:
            if record["session"] == session:
                return dict(record)
        return {"status": "unknown"}

    def wait(self, session: str, *states: str, seconds: float = 30) -> dict[str, Any]:
        """The newest record of a session once it is in one of `states`."""
        record: dict[str, Any] = {}

        def there() -> bool:
            record.update(self.record_of(session))
            return record["status"] in states

        until(there, seconds, lambda: f"{session}: {record}")
        return record

    @contextmanager
    def raw(self, data: bytes = b"", *, buffer: int | None = None) -> Iterator[socket.socket]:
        """A connection on which `data` was sent."""
        address = urlsplit(self.url)
        with socket.socket() as sock:
            if buffer is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
            sock.settimeout(30)
            sock.connect((address.hostname, address.port))
            sock.sendall(data)
            yield sock


def until(
    done: Callable[[], bool], seconds: float, what: Callable[[], str], every: float = 0.02
) -> None:
    """Wait for `done`, asked every so many seconds.

    Raises AssertionError, saying `what`, if it takes too long.
    """
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, what()
        time.sleep(every)


def request(path: str, body: Any, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data


def read_all(sock: socket.socket) -> bytes:
    out = bytearray()
    while piece := sock.recv(65536):
        out += piece
    return bytes(out)


def events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    """Each event's name and data; a comment comes as ("comment", its text)."""
    name = ""
    for line in response.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, value if value == "[DONE]" else json.loads(value)
            name = ""
        elif line.startswith(":"):
            yield "comment", line[1:].strip()


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def words(seed: int, n: int) -> str:
    """`n` words that other seeds do not share, about 3 tokens each."""
    return f"Story {seed}. " + " ".join(f"w{(seed * 7919 + i * 31) % 997}" for i in range(n))
