"""Streaming chat client that measures times.

Uses only the standard library, so that no other HTTP client adds to the times.
Source: https://platform.openai.com/docs/api-reference/chat/streaming
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[Mapping[str, Any]]


class Refused(Exception):
    """Error of a server that answers with one, or closes the connection.

    `status` is 200 if the error came in the stream, 0 if the connection failed.
    """

    def __init__(self, status: int, text: str, retry_after: float | None = None):
        super().__init__(f"{status}: {text[:500]}")
        self.status = status
        self.retry_after = retry_after


@dataclass(frozen=True, slots=True)
class Reply:
    """Text, times and token counts of one streamed reply.

    Times are in seconds since the request was sent: `first_s` until the first text, thinking or
    tool call, `last_s` until the last, `total_s` until the end of the stream, which stands for the
    other two if there was none of these. `text` has no thinking. The counts are those that the
    server reported. Without them, `prompt_tokens` and `cached_tokens` are None, and
    `generated_tokens` is the number of events with text, thinking or a tool call. `request` is the
    request id, if the server sent one.
    """

    text: str
    first_s: float
    last_s: float
    total_s: float
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int
    request: str | None

    @property
    def fed_tokens(self) -> int | None:
        if self.prompt_tokens is None or self.cached_tokens is None:
            return None
        return self.prompt_tokens - self.cached_tokens

    @property
    def conversation_tokens(self) -> int:
        """Tokens whose KV was computed: all but the last generated one."""
        return (self.prompt_tokens or 0) + self.generated_tokens - 1

    @property
    def decode_rate(self) -> float | None:
        """Generated tokens per second after the first; None if all came in one event or none."""
        span = self.last_s - self.first_s
        return (self.generated_tokens - 1) / span if span > 0 else None


@dataclass(frozen=True, slots=True)
class Client:
    """Client of an OpenAI-compatible server on this machine. Thread-safe.

    `timeout` is the maximum time between two reads, in seconds.
    """

    port: int
    model: str
    timeout: float = 600.0

    def chat(self, messages: Messages, max_tokens: int) -> Reply:
        """Request one greedy reply of at most `max_tokens`, streamed. Blocks. Raises Refused."""
        body = json.dumps({
            "model": self.model,
            "messages": list(messages),
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }).encode()  # fmt: skip
        began = time.perf_counter()
        try:
            with self._send("POST", "/v1/chat/completions", body) as response:
                return _read_reply(response, began)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise Refused(0, f"{type(error).__name__}: {error}") from error

    def get(self, path: str) -> Any:
        """Fetch the JSON value at a URL path, or its text if it is not JSON. Raises Refused."""
        try:
            with self._send("GET", path, None) as response:
                text = response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException) as error:
            raise Refused(0, f"{type(error).__name__}: {error}") from error
        try:
            return json.loads(text)
        except ValueError:
            return text

    def _send(self, method: str, path: str, body: bytes | None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.timeout)
        headers = {"Content-Type": "application/json", "Connection": "close"}
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            with response:
                text = response.read().decode("utf-8", "replace")
            after = response.headers.get("Retry-After", "")
            raise Refused(response.status, text, float(after) if after.isdecimal() else None)
        return response


def _read_reply(response: http.client.HTTPResponse, began: float) -> Reply:
    pieces: list[str] = []
    times: list[float] = []
    usage: Mapping[str, Any] = {}
    for event in _events(response):
        if "error" in event:
            raise Refused(200, json.dumps(event["error"]))
        usage = event.get("usage") or usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            text = delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")
            if text or delta.get("tool_calls"):
                times.append(time.perf_counter() - began)
            pieces.append(delta.get("content") or "")
    total = time.perf_counter() - began
    first, last = (times[0], times[-1]) if times else (total, total)
    return Reply(
        text="".join(pieces),
        first_s=first,
        last_s=last,
        total_s=total,
        prompt_tokens=usage.get("prompt_tokens"),
        cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        generated_tokens=usage.get("completion_tokens") or len(times),
        request=response.headers.get("X-Mlxcache-Request"),
    )


def _events(response: http.client.HTTPResponse) -> Iterator[Mapping[str, Any]]:
    """Source: https://html.spec.whatwg.org/multipage/server-sent-events.html"""
    for line in response:
        if line.startswith(b"data:"):
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if isinstance(event, dict):
                yield event
