"""The MLX thread: one inbox, one way to call and await, one heartbeat.

MLX streams belong to a thread, and arrays made lazily in one thread fail in another, so a single
thread does every MLX call. This is the only way onto it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")


class Heartbeat:
    """The age of the step in progress, as other threads see it.

    The MLX thread calls `beat` between steps of seconds at most, and `rest` before it waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began_at: float | None = None

    def beat(self) -> None:
        """Note that a step begins."""
        self._began_at = self._clock()

    def rest(self) -> None:
        """Mark the thread as idle: `silent_s` is 0 until the next `beat`."""
        self._began_at = None

    @property
    def silent_s(self) -> float:
        """Seconds since the step in progress began; 0 if there is none. Any thread."""
        at = self._began_at
        return 0.0 if at is None else max(0.0, self._clock() - at)


class MlxThread:
    """Runs actions in order on one thread. `post`, `call` and `ask` may be called on any thread.

    `on_death(error)` is called on the thread when a posted action raises, which ends it: its state
    cannot be trusted afterwards. An action of `call` or `ask` raises in the caller instead; if
    `is_ours(error)`, `run_posted` raises it too, because it is about more than that action.
    """

    def __init__(
        self,
        on_death: Callable[[BaseException], None] | None = None,
        is_ours: Callable[[BaseException], bool] = lambda error: False,
    ):
        self.heartbeat = Heartbeat()
        self._is_ours = is_ours
        self._on_death = on_death
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._open: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._main, name="mlxcache-mlx", daemon=True)

    # -- from any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def post(self, action: Callable[[], None]) -> None:
        """Run `action` on the thread after all earlier actions. Does not block."""
        self._inbox.put(action)

    def wake(self) -> None:
        """Wake the loop if it waits for an action."""
        self._inbox.put(_nothing)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` on the thread; the future has its result or its exception.

        After `fail(error)`, every future has `error`.
        """
        answer: Future[T] = Future()
        with self._lock:
            if self._failure is not None:
                answer.set_exception(self._failure)
                return answer
            self._open.add(answer)

        def run() -> None:
            try:
                result = action()
            except BaseException as error:  # raised again in the caller
                self._settle(answer, error=error)
                if self._is_ours(error):
                    raise
            else:
                self._settle(answer, result=result)

        self._inbox.put(run)
        return answer

    async def ask(self, action: Callable[[], T]) -> T:
        """Run `action` on the thread and await its result; see `call`.

        `action` runs even if the waiting task is cancelled.
        """
        return await asyncio.shield(asyncio.wrap_future(self.call(action)))

    def fail(self, error: BaseException) -> None:
        """Raise `error` in every caller, waiting or later: the thread has ended."""
        with self._lock:
            self._failure = error
            answers = list(self._open)
        for answer in answers:
            self._settle(answer, error=error)

    def _settle(
        self, answer: Future[T], *, result: T | None = None, error: BaseException | None = None
    ) -> None:
        with self._lock:
            if answer not in self._open:
                return
            self._open.discard(answer)
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(result)  # type: ignore[arg-type]

    def end(self) -> None:
        """End the thread once everything posted so far has run."""

        def stop() -> None:
            self._ending = True

        self._inbox.put(stop)

    @property
    def alive(self) -> bool:
        """True while the thread runs. Any thread."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for the end of the thread, for at most `seconds`."""
        if self._thread.is_alive():
            self._thread.join(seconds)

    # -- on the thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._ending:
                self.run_posted(block=True)
        except BaseException as error:
            log.critical("MLX thread failed", exc_info=error)
            if self._on_death is not None:
                self._on_death(error)

    def run_posted(self, *, block: bool) -> None:
        """Run what was posted; with `block`, wait for at least one action. On the thread.

        Raises what a posted action raises.
        """
        if block:
            self.heartbeat.rest()
        try:
            action = self._inbox.get(block)
            while True:
                self.heartbeat.beat()
                action()
                action = self._inbox.get_nowait()
        except Empty:
            self.heartbeat.beat()

    @property
    def has_posted(self) -> bool:
        """True if an action waits to be run."""
        return not self._inbox.empty()


def _nothing() -> None:
    """The action of `wake`."""
