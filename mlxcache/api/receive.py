"""A request's body as it arrives: within its limit, and within its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress

from starlette.exceptions import HTTPException
from starlette.requests import Request

from mlxcache.errors import TooLarge

BODY_PAUSE, BODY_SECONDS = 30.0, 600.0
"""How long the next byte of a body may take, and all of one that is held in memory."""

_DRAIN_BYTES = 256 << 20
_DRAIN_SECONDS = 10.0


async def read_body(
    request: Request, limit: int, *, pause: float = BODY_PAUSE, seconds: float = BODY_SECONDS
) -> bytes:
    """The whole body, at most `limit` bytes.

    Raises TooLarge by the announced length or as soon as more arrives, HTTPException as `arriving`
    does, and starlette's ClientDisconnect if the client goes away first.
    """
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > limit:
        await _drain(request)
        raise _too_large(limit)
    chunks: list[bytes] = []
    size = 0
    async for chunk in arriving(request, pause, seconds):
        size += len(chunk)
        if size > limit:
            chunks.clear()
            await _drain(request)
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


async def arriving(
    request: Request, pause: float = BODY_PAUSE, seconds: float | None = None
) -> AsyncIterator[bytes]:
    """A body's parts. Raises HTTPException (408) where none comes for `pause` seconds, or where
    not all have come after `seconds`; and ClientDisconnect."""
    end = None if seconds is None else time.monotonic() + seconds
    async with aclosing(request.stream()) as parts:
        while True:
            left = pause if end is None else min(pause, end - time.monotonic())
            try:
                async with asyncio.timeout(left):
                    part = await anext(parts, None)
            except TimeoutError as error:
                raise HTTPException(
                    408, "the request's body did not arrive in time", {"Connection": "close"}
                ) from error
            if part is None:
                return
            yield part


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"The request body is larger than this server's limit of {limit} bytes.")


async def _drain(request: Request) -> None:
    """Read on for a while and forget it.

    A connection closed on unread data is reset, and the client would see that, not the answer.
    """
    if "100-continue" in request.headers.get("expect", "").lower():
        return
    left = _DRAIN_BYTES
    with suppress(TimeoutError):
        async with asyncio.timeout(_DRAIN_SECONDS):
            while left > 0:
                message = await request.receive()
                left -= len(message.get("body", b""))
                if message["type"] != "http.request" or not message.get("more_body"):
                    return
