"""Questions that the event loop has for the MLX thread."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from mlxcache.errors import MlxcacheError

T = TypeVar("T")


class Pulse:
    """The MLX thread calls `beat` between steps of seconds at most, and `rest` before it waits."""

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._beaten_at: float | None = None

    def beat(self) -> None:
        """A step begins."""
        self._beaten_at = self._clock()

    def rest(self) -> None:
        """Nothing is to be done: from now on silence means nothing."""
        self._beaten_at = None

    @property
    def silent_s(self) -> float:
        """Seconds since the step in hand began; 0 while there is none. In any thread."""
        at = self._beaten_at
        return 0.0 if at is None else max(0.0, self._clock() - at)


class Calls:
    """Actions that run on the MLX thread, between two of its ticks, and are waited for."""

    def __init__(self, inbox: SimpleQueue[Callable[[], None]]):
        self._inbox = inbox
        self._loop = asyncio.get_running_loop()
        self._open: set[asyncio.Future[Any]] = set()

    async def ask(self, action: Callable[[], T]) -> T:
        """The result of `action`. Raises what it raises, or what `fail` was given."""
        answer: asyncio.Future[T] = self._loop.create_future()

        def run() -> None:
            try:
                result = action()
            except BaseException as error:  # noqa: BLE001 - it is raised again where it is awaited
                self._tell(_fail, answer, error)
            else:
                self._tell(_settle, answer, result)

        self._open.add(answer)
        try:
            self._inbox.put(run)
            return await answer
        finally:
            self._open.discard(answer)

    def _tell(self, how: Callable[..., None], answer: asyncio.Future[Any], what: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(how, answer, what)

    def fail(self, error: MlxcacheError) -> None:
        """From the event loop: the thread will answer nobody any more."""
        for answer in self._open:
            _fail(answer, error)


def take_in(inbox: SimpleQueue[Callable[[], None]], pulse: Pulse, *, block: bool) -> None:
    """Run what has arrived, on the MLX thread; with `block` something has to arrive first."""
    if block:
        pulse.rest()
    try:
        action = inbox.get(block)
        while True:
            pulse.beat()
            action()
            action = inbox.get_nowait()
    except Empty:
        pulse.beat()


def _settle(answer: asyncio.Future[Any], result: object) -> None:
    if not answer.done():
        answer.set_result(result)


def _fail(answer: asyncio.Future[Any], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
