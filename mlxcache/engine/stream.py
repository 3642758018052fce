"""One reader's stream of a reply: a bounded queue of events on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable

from mlxcache.errors import MlxcacheError
from mlxcache.prompt.canonical.uuids import ReplyRestorer
from mlxcache.types import Admitted, Event, Finished, Progress, RequestRecord, Text, Thinking

BACKLOG = 256
"""Number of unread events above which further text is merged with the last event."""


GRACE_S = 1.0
"""Seconds to wait before a reader that seems stalled is cancelled."""


class Stream:
    """Events of a reply in progress: Admitted, Progress and pieces, then Finished.

    From `BACKLOG` unread events on, consecutive texts are merged and Progress is dropped. If the
    reader takes none of the waiting events for `stall_s` seconds, `cancel()` is called: it cancels
    the request, or removes only this reader if the request has other ones. `reply` replaces names
    that the model was shown instead of the client's, such as stable UUIDs, by the client's.
    """

    def __init__(
        self,
        record: RequestRecord,
        cancel: Callable[[], None],
        stall_s: float,
        reply: ReplyRestorer | None = None,
    ):
        self.record = record
        self._loop = asyncio.get_running_loop()
        self._cancel = cancel
        self._reply = reply or ReplyRestorer({})
        self._stall_s = stall_s
        self._queue: deque[Event | BaseException] = deque()
        self._wake = asyncio.Event()
        self._admitted = asyncio.Event()
        self._admission: Admitted | None = None
        self._read_at = time.monotonic()
        self._taken = 0
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    def push(self, event: Event | BaseException) -> None:
        """Add an event, or an error that ends the stream, from any thread. Returns at once."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.put, event)

    def put(self, event: Event | BaseException) -> None:
        """Add an event, or an error that ends the stream. Call on the event loop."""
        if self._over:
            return
        if isinstance(event, Admitted):
            self._admission = event
            self._admitted.set()
        if isinstance(event, Finished | BaseException):
            self._over = True
            self._admitted.set()
            if self._timer is not None:
                self._timer.cancel()
        if not self._queue:
            self._read_at = time.monotonic()
        if len(self._queue) < BACKLOG or not self._merged(event):
            self._queue.append(event)
        self._wake.set()
        if not self._over and time.monotonic() - self._read_at > self._stall_s:
            self._loop.call_later(min(GRACE_S, self._stall_s), self._give_up, self._taken)

    def _give_up(self, taken: int) -> None:
        """Call `cancel()` of the class if no event was read since this call was scheduled."""
        if not self._over and self._taken == taken:
            self._cancel()

    def _merged(self, event: Event | BaseException) -> bool:
        last = self._queue[-1]
        if isinstance(event, Progress):
            return True
        if isinstance(event, Thinking) and isinstance(last, Thinking):
            self._queue[-1] = Thinking(last.text + event.text)
            return True
        if isinstance(event, Text) and isinstance(last, Text):
            self._queue[-1] = Text(last.text + event.text, last.logprobs + event.logprobs)
            return True
        return False

    async def admitted(self, seconds: float) -> Admitted | None:
        """Wait until the request is admitted; return None if `seconds` pass before.

        It is admitted when its memory is reserved and its cached tokens are known. Also returns
        None if it was cancelled before. Raises its error if it failed before.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._admitted.wait()
        except TimeoutError:
            return None
        if self._admission is None:
            for event in self._queue:
                if isinstance(event, BaseException):
                    raise event
        return self._admission

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Yield events up to Finished. Raises MlxcacheError if the request failed."""
        while True:
            while not self._queue:
                self._wake.clear()
                await self._wake.wait()
            event = self._queue.popleft()
            self._taken += 1
            self._read_at = time.monotonic()
            if isinstance(event, BaseException):
                for rest in self._reply.flush():
                    yield rest
                raise event
            for shown in self._reply.events(event):
                yield shown
            if isinstance(event, Finished):
                return

    async def aclose(self) -> None:
        """Call `cancel()` of the class unless Finished or an error was added. Idempotent.

        The KV that the request has computed stays in the cache.
        """
        if not self._over:
            self._cancel()

    def fail(self, error: MlxcacheError) -> None:
        """End the stream with `error`. Call on the event loop."""
        self.put(error)

    def expires(self, timer: asyncio.TimerHandle) -> None:
        """Take over the timer of the request's time limit: cancel it when the reply ends."""
        self._timer = timer
        if self._over:
            timer.cancel()

    @property
    def over(self) -> bool:
        """True once Finished or an error was added, even if the reader has not taken it yet."""
        return self._over

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
