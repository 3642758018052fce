"""HTTP/1.1 on one connection: uvicorn's h11 protocol with a timeout for request headers.

Without the timeout, clients that send their headers byte by byte could occupy all connections.
"""

from __future__ import annotations

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any

import h11
from h11._connection import DEFAULT_MAX_INCOMPLETE_EVENT_SIZE
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0
"""Timeout for headers, from the connection's start or from the first byte of a later request."""

NOT_HTTP = "The request is not valid HTTP"
TOO_SLOW = "The request's headers did not arrive in time."
TOO_LARGE = "The request's headers are too large."


MOST_REASON = 100
"""Most characters of h11's reason in an answer; it may quote what the client sent."""


class Connection(h11.Connection):
    """Refuses a request of which two HTTP parsers could read different lengths (RFC 9112, 6.3)."""

    def next_event(self) -> Any:
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if names >= {b"content-length", b"transfer-encoding"}:
                raise h11.RemoteProtocolError("both Content-Length and Transfer-Encoding headers")
        return event


class Protocol(H11Protocol):
    """One HTTP connection with a timeout for headers.

    Invalid requests are answered in JSON that clients of both APIs can read.
    """

    head_seconds = HEAD_SECONDS
    _timeout: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = Connection(h11.SERVER, DEFAULT_MAX_INCOMPLETE_EVENT_SIZE)
        self._start_timeout()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._update_timeout()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_timeout()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timeout()
        super().connection_lost(exc)

    def _update_timeout(self) -> None:
        """Time the headers of a request, and not its body, which the API limits."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_timeout()
        elif self._timeout is None and self.conn.trailing_data[0]:
            self._start_timeout()

    def _start_timeout(self) -> None:
        self._timeout = self.loop.call_later(self.head_seconds, self._too_slow)

    def _stop_timeout(self) -> None:
        if self._timeout is not None:
            self._timeout.cancel()
            self._timeout = None

    def _too_slow(self) -> None:
        self._timeout = None
        if not self.transport.is_closing():
            if self.conn.trailing_data[0]:
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, TOO_SLOW)
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer a request that h11 could not parse: 431 for too large headers, else 400."""
        hint = getattr(sys.exception(), "error_status_hint", 400)
        large = hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if large else HTTPStatus.BAD_REQUEST
        reason = str(sys.exception())[:MOST_REASON]
        self._refuse(status, TOO_LARGE if large else f"{NOT_HTTP}: {reason}")
        self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return  # a reply is being sent, and the client would read this as a part of it
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = json.dumps({"type": "error", "error": error}).encode()
        headers: list[tuple[Any, Any]] = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        phrase = status.phrase.encode()
        events = (
            h11.Response(status_code=status, headers=headers, reason=phrase),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        self.transport.write(b"".join(self.conn.send(event) or b"" for event in events))
