"""Requests over HTTP, by chat completions or Anthropic's messages, read to the end or cut off."""

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
"""Timeout of each read: the server sends at least a ping every ten seconds."""

LONGEST_S = 300.0
"""Timeout of a whole request: all of them are short."""

RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Disconnect:
    """When and how the client disconnects: after `seconds` without reading, or after `pieces`.

    A piece is one delta of text. `reset`: by a TCP reset instead of an orderly close. `pause`:
    seconds to wait after each piece.
    """

    seconds: float | None = None
    pieces: int | None = None
    reset: bool = False
    pause: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A chat request, decoded greedily. `tokens` is its `max_tokens`."""

    messages: tuple[Mapping[str, Any], ...]
    tokens: int
    label: str
    api: Literal["chat", "messages"] = "chat"
    stream: bool = True

    def encoded(self) -> tuple[str, bytes]:
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
    """Outcome of a request. `status` 0: the connection failed.

    `disconnected`: the client disconnected on purpose. `error`: of the server or the socket.
    `timed_out`: nothing came within `SILENT_S`, or the reply took longer than `LONGEST_S`.
    """

    status: int = 0
    text: str = ""
    prompt: int = 0
    cached: int = 0
    finish: str | None = None
    error: str = ""
    retry_after: str | None = None
    request_id: str | None = None
    disconnected: bool = False
    timed_out: bool = False
    seconds: float = 0.0
    body: bytes = b""
    pieces: int = field(default=0)

    @property
    def complete(self) -> bool:
        return self.status == 200 and self.finish is not None and not self.error

    def add_body(self, body: bytes, *, is_reply: bool) -> None:
        """Add a body that is not streamed; `is_reply`: that of a chat request."""
        self.body = body
        if self.status not in (200, 201):
            self.error = body.decode("utf-8", "replace")[:500]
        elif is_reply:
            self._add_reply(json.loads(body))

    def add_event(self, event: dict[str, Any]) -> None:
        if event.get("error"):
            self.error = json.dumps(event["error"])
            return
        self._add_usage(event.get("usage") or (event.get("message") or {}).get("usage") or {})
        for choice in event.get("choices") or ():
            self._add_text((choice.get("delta") or {}).get("content"))
            self.finish = choice.get("finish_reason") or self.finish
        delta = event.get("delta") or {}
        self._add_text(delta.get("text"))
        self.finish = delta.get("stop_reason") or self.finish

    def _add_reply(self, reply: dict[str, Any]) -> None:
        self._add_usage(reply["usage"])
        for choice in reply.get("choices") or ():
            self._add_text(choice["message"]["content"])
            self.finish = choice["finish_reason"]
        if "stop_reason" in reply:
            for block in reply["content"]:
                self._add_text(block.get("text"))
            self.finish = reply["stop_reason"]

    def _add_text(self, text: str | None) -> None:
        if text:
            self.text += text
            self.pieces += 1

    def _add_usage(self, usage: Mapping[str, Any]) -> None:
        if "prompt_tokens" in usage:
            self.prompt = usage["prompt_tokens"]
            self.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        elif "cache_read_input_tokens" in usage:
            self.cached = usage["cache_read_input_tokens"]
            made = usage.get("cache_creation_input_tokens", 0)
            self.prompt = usage["input_tokens"] + made + self.cached


class _TooSlow(Exception):
    """The reply took longer than `LONGEST_S`."""


def ask(port: int, request: Request, disconnect: Disconnect | None = None) -> Outcome:
    path, body = request.encoded()
    sent = ("POST", path, body, {"X-Session-Id": request.label})
    return _send(port, sent, disconnect or Disconnect(), request)


def call(port: int, method: str, path: str, body: bytes | None = None) -> Outcome:
    """Send a request about sessions or the cache; the response is in `Outcome.body`."""
    return _send(port, (method, path, body, {}), Disconnect(), None)


def _send(
    port: int,
    sent: tuple[str, str, bytes | None, Mapping[str, str]],
    disconnect: Disconnect,
    request: Request | None,
) -> Outcome:
    out, began = Outcome(), time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SILENT_S)
    method, path, body, more = sent
    headers = {"Content-Type": "application/json", "Connection": "close", **more}
    try:
        connection.request(method, path, body, headers)
        sock = connection.sock  # the connection drops it when the response takes it over
        if disconnect.seconds is not None:
            select.select([sock], [], [], disconnect.seconds)
            out.disconnected = True
        else:
            _read(connection.getresponse(), request, disconnect, out, began)
        if out.disconnected and disconnect.reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    except (OSError, http.client.HTTPException, ValueError, _TooSlow) as error:
        out.timed_out = isinstance(error, TimeoutError | _TooSlow)
        out.status = out.status if out.timed_out else 0
        out.error = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    out.seconds = time.monotonic() - began
    return out


def _read(
    response: http.client.HTTPResponse,
    request: Request | None,
    disconnect: Disconnect,
    out: Outcome,
    began: float,
) -> None:
    out.status = response.status
    out.retry_after = response.headers.get("Retry-After")
    out.request_id = response.headers.get("X-Mlxcache-Request")
    if request is None or response.status != 200 or not request.stream:
        out.add_body(response.read(), is_reply=request is not None)
        return
    for event in _events(response):
        out.add_event(event)
        if time.monotonic() - began > LONGEST_S:
            raise _TooSlow(f"not over after {LONGEST_S:.0f} s, {out.pieces} pieces came")
        if disconnect.pieces is not None and out.pieces >= disconnect.pieces:
            out.disconnected = True
            return
        if disconnect.pause:
            time.sleep(disconnect.pause)
    if not ((out.finish and out.prompt) or out.error):  # the usage comes last
        raise http.client.IncompleteRead(out.text.encode())


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    for line in response:
        if line.startswith(b"data:") and (data := line[5:].strip()) != b"[DONE]":
            yield json.loads(data)
