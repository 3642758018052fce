"""One request to a server, of either API: read to its end, slowly, or left at a chosen moment."""

from __future__ import annotations

import http.client
import json
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SILENT_S = 150.0
"""Longer than this no read may wait: the server says something every ten seconds."""

LONGEST_S = 300.0
"""Longer than this no request may take: they are all short."""

RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Leave:
    """When a client goes: after so many seconds without reading, or after so many pieces of text.

    `reset`: by a reset, and not by an orderly end. `pause`: seconds before each piece that is read.
    """

    seconds: float | None = None
    pieces: int | None = None
    reset: bool = False
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A greedy request. `api` is `chat` or `messages`."""

    messages: tuple[Mapping[str, Any], ...]
    tokens: int
    label: str
    api: Literal["chat", "messages"] = "chat"
    stream: bool = True

    def encoded(self) -> tuple[str, bytes]:
        """The path and the body."""
        messages: Any = list(self.messages)
        body: dict[str, Any] = {
            "model": "soak", "max_tokens": self.tokens, "temperature": 0, "stream": self.stream,
        }  # fmt: skip
        if self.api == "chat":
            if self.stream:
                body["stream_options"] = {"include_usage": True}
            return "/v1/chat/completions", json.dumps(body | {"messages": messages}).encode()
        if messages[0]["role"] == "system":
            body["system"] = messages[0]["content"]
            messages = messages[1:]
        return "/v1/messages", json.dumps(body | {"messages": messages}).encode()


@dataclass(slots=True)
class Outcome:
    """What came of a request. `status` 0: the connection failed; `left`: the client went.

    `error` is told by the server, or by the socket. `hang`: nothing came for too long.
    """

    status: int = 0
    text: str = ""
    prompt: int = 0
    cached: int = 0
    finish: str | None = None
    error: str = ""
    retry_after: str | None = None
    request: str | None = None
    left: bool = False
    hang: bool = False
    seconds: float = 0.0
    body: bytes = b""
    pieces: int = field(default=0)

    @property
    def whole(self) -> bool:
        """Whether a reply came to its end."""
        return self.status == 200 and self.finish is not None and not self.error


class _Hang(Exception):
    """Nothing came for too long."""


def ask(port: int, asked: Asked, leave: Leave | None = None) -> Outcome:
    """Send one request and read what the client means to read of the answer."""
    path, body = asked.encoded()
    sent = _Sent("POST", path, body, {"X-Session-Id": asked.label})
    return _send(port, sent, leave or Leave(), asked)


def call(port: int, method: str, path: str, body: bytes | None = None) -> Outcome:
    """A request of no reply: its answer is in `body`."""
    return _send(port, _Sent(method, path, body), Leave(), None)


@dataclass(frozen=True, slots=True)
class _Sent:
    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str] = field(default_factory=dict)


def _send(port: int, sent: _Sent, leave: Leave, asked: Asked | None) -> Outcome:
    out, began = Outcome(), time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SILENT_S)
    headers = {"Content-Type": "application/json", "Connection": "close", **sent.headers}
    try:
        connection.request(sent.method, sent.path, sent.body, headers)
        sock = connection.sock  # which the response has for its own later
        if leave.seconds is not None:
            select.select([sock], [], [], leave.seconds)
            out.left = True
        else:
            _read(connection.getresponse(), asked, leave, out, began)
        if out.left and leave.reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    except (TimeoutError, _Hang) as error:
        out.hang, out.error = True, f"{type(error).__name__}: {error}"
    except (OSError, http.client.HTTPException, ValueError) as error:
        out.status, out.error = 0, f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    out.seconds = time.monotonic() - began
    return out


def _read(
    response: http.client.HTTPResponse,
    asked: Asked | None,
    leave: Leave,
    out: Outcome,
    began: float,
) -> None:
    out.status = response.status
    out.retry_after = response.headers.get("Retry-After")
    out.request = response.headers.get("X-Mlxcache-Request")
    if asked is None or response.status != 200 or not asked.stream:
        out.body = response.read()
        if response.status not in (200, 201):
            out.error = out.body.decode("utf-8", "replace")[:500]
        elif asked is not None:
            _take_whole(json.loads(out.body), out)
        return
    for event in _events(response):
        _take(event, out)
        if time.monotonic() - began > LONGEST_S:
            raise _Hang(f"not over after {LONGEST_S:.0f} s, {out.pieces} pieces came")
        if leave.pieces is not None and out.pieces >= leave.pieces:
            out.left = True
            return
        if leave.pause:
            time.sleep(leave.pause)
    if not (out.finish or out.error):
        raise http.client.IncompleteRead(out.text.encode())


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)


def _take(event: dict[str, Any], out: Outcome) -> None:
    """One event of a stream of either API."""
    if event.get("error"):
        out.error = json.dumps(event["error"])
        return
    _usage(event.get("usage") or (event.get("message") or {}).get("usage") or {}, out)
    for choice in event.get("choices") or ():
        _add((choice.get("delta") or {}).get("content"), out)
        out.finish = choice.get("finish_reason") or out.finish
    delta = event.get("delta") or {}
    _add(delta.get("text"), out)
    out.finish = delta.get("stop_reason") or out.finish


def _add(text: str | None, out: Outcome) -> None:
    if text:
        out.text += text
        out.pieces += 1


def _take_whole(reply: dict[str, Any], out: Outcome) -> None:
    """A reply that is not streamed."""
    _usage(reply["usage"], out)
    for choice in reply.get("choices") or ():
        _add(choice["message"]["content"], out)
        out.finish = choice["finish_reason"]
    if "stop_reason" in reply:
        for block in reply["content"]:
            _add(block.get("text"), out)
        out.finish = reply["stop_reason"]


def _usage(usage: Mapping[str, Any], out: Outcome) -> None:
    if "prompt_tokens" in usage:
        out.prompt = usage["prompt_tokens"]
        out.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    elif "cache_read_input_tokens" in usage:
        out.cached = usage["cache_read_input_tokens"]
        made = usage.get("cache_creation_input_tokens", 0)
        out.prompt = usage["input_tokens"] + made + out.cached
