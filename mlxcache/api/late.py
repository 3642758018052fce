"""Streamed replies whose model is still being loaded when the response begins."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, TypeVar

from mlxcache.errors import NotReady
from mlxcache.types import Arrival, RequestRecord

T = TypeVar("T")


class LateReply(Generic[T]):
    """A reply that begins once its model is loaded.

    `begin` loads the model, submits the request and returns an object for the reply that has begun.
    `arrival`: the object that `begin` passes to `Deps.of`; its `record` is set while the request
    waits for its model. `close(result)` is called with the result of `begin` to close the streams
    of the reply.
    """

    def __init__(
        self,
        begin: Coroutine[Any, Any, T],
        arrival: Arrival,
        close: Callable[[T], Awaitable[None]],
    ):
        self.record = RequestRecord(arrival.id, None, arrival.api, None, "queued", 0.0)
        self._task = asyncio.ensure_future(begin)
        self._arrival, self._close = arrival, close

    async def begun(self, seconds: float) -> T | None:
        """Return the result of `begin`, or None if the model is still being loaded after `seconds`.

        If the request waits for something else by then, such as its turn, waits for the result
        without a limit. Raises the errors of `begin`. If the call is cancelled, so is the request.
        """
        try:
            await asyncio.wait({self._task}, timeout=seconds)
            if not self._task.done() and self._arrival.record is not None:
                return None
            return await self._task
        except asyncio.CancelledError:
            await self.aclose()
            raise

    async def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the reply to begin; return whether it has, or has failed."""
        await asyncio.wait({self._task}, timeout=seconds)
        return self._task.done()

    async def get(self) -> T:
        """Wait for the result of `begin` and return it.

        Raises the errors of `begin`, and NotReady if `aclose` cancelled the request.
        """
        await asyncio.wait({self._task})
        if self._task.cancelled():
            raise NotReady("The server is stopping.", retry_after=5.0)
        return self._task.result()

    async def aclose(self) -> None:
        """Cancel the request, or close the streams of a reply that has begun. Idempotent."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled() and self._task.exception() is None:
            await self._close(self._task.result())
