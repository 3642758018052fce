"""HTTP on one connection, as uvicorn and h11 have it, with an end to waiting for a request.

Whoever opens connections and sends their requests a byte at a time would hold them all open.
"""

from __future__ import annotations

import asyncio
import json
import sys
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_SECONDS = 30.0
"""From a connection's start, or the first byte of a later request, to the end of its headers."""

NOT_HTTP = "This is no HTTP request that could be read."
TOO_SLOW = "The request's headers did not arrive in time."
TOO_LARGE = "The request's headers are too large."


class Protocol(H11Protocol):
    """One connection. Errors below the API are JSON that clients of both APIs can read."""

    head_seconds = HEAD_SECONDS
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def _watch(self) -> None:
        """Wait for the headers of a request that has begun; its body is the API's to wait for."""
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._stop_waiting()
        elif self._waiting is None and self.conn.trailing_data[0]:
            self._wait()

    def _wait(self) -> None:
        self._waiting = self.loop.call_later(self.head_seconds, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_slow(self) -> None:
        self._waiting = None
        if not self.transport.is_closing():
            if self.conn.trailing_data[0]:
                self._refuse(HTTPStatus.REQUEST_TIMEOUT, TOO_SLOW)
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What uvicorn calls where h11 could not read a request."""
        hint = getattr(sys.exception(), "error_status_hint", 400)
        large = hint == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
        status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE if large else HTTPStatus.BAD_REQUEST
        self._refuse(status, TOO_LARGE if large else NOT_HTTP)
        self.transport.close()

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            return  # a reply is on its way, which this would be taken for a part of
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
