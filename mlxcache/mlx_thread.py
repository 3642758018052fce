"""The MLX thread, which runs all calls of MLX in order and reports its progress.

MLX streams belong to a thread, and arrays created lazily in one thread fail in another. A single
thread therefore makes every MLX call, and other threads only submit actions to it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from mlxcache.kernels import keep_kernels_private

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")


class Heartbeat:
    """Age of the step that the MLX thread is running, readable by other threads.

    The MLX thread calls `beat` before each step, which takes seconds at most, and `rest` before it
    waits.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._began_at: float | None = None

    def beat(self) -> None:
        self._began_at = self._clock()

    def rest(self) -> None:
        self._began_at = None

    @property
    def silent_s(self) -> float:
        """Seconds since the current step began, or 0 if there is none. Thread-safe."""
        at = self._began_at
        return 0.0 if at is None else max(0.0, self._clock() - at)


class MlxThread:
    """A thread that runs actions in order. `post`, `call` and `ask` may be called from any thread.

    An error of an action given to `call` or `ask` is raised in the caller, and that of a posted one
    is given to its `failed`. The thread goes on, unless the error concerns more than the action:
    one for which `is_ours` returns True, or a BaseException that is no Exception. It is raised on
    the thread then, which ends and calls `on_death(error)` first.
    """

    def __init__(
        self,
        on_death: Callable[[BaseException], None] | None = None,
        is_ours: Callable[[BaseException], bool] = lambda error: False,
    ):
        self.heartbeat = Heartbeat()
        self._is_ours = is_ours
        self._on_death = on_death
        self._inbox: SimpleQueue[tuple[Callable[[], None], Callable[[Exception], None]]]
        self._inbox = SimpleQueue()
        self._open: set[Future[Any]] = set()
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._ending = False
        self._thread = threading.Thread(target=self._main, name="mlxcache-mlx", daemon=True)

    # -- from any thread ---------------------------------------------------------------------------

    def start(self) -> None:
        keep_kernels_private()
        self._thread.start()

    def post(
        self,
        action: Callable[[], None],
        failed: Callable[[Exception], None] = lambda error: log.error(
            "posted action failed, the MLX thread goes on: %s", error, exc_info=error
        ),
    ) -> None:
        """Queue `action` to run on the thread after all earlier actions. Does not block."""
        self._inbox.put((action, failed))

    def wake(self) -> None:
        """Make `run_posted` return if it is waiting for an action."""
        self.post(_nothing)

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Queue `action` to run on the thread; return a future of its result or exception."""
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

        self.post(run)
        return answer

    async def ask(self, action: Callable[[], T]) -> T:
        """Run `action` on the thread and await its result.

        `action` runs even if the awaiting task is cancelled. After `fail(error)`, raises `error`.
        """
        return await asyncio.shield(asyncio.wrap_future(self.call(action)))

    def fail(self, error: BaseException) -> None:
        """Raise `error` in all present and future callers, because the thread has ended."""
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
        """End the thread after all actions queued so far. Does not block."""

        def stop() -> None:
            self._ending = True

        self.post(stop)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait at most `seconds` until the thread has ended, with what MLX keeps for it.

        Python before 3.13 returns from its own join before C++ destructors of the thread have run.
        MLX's take the interpreter's lock, and a process that is exiting by then would abort.
        """
        end = time.monotonic() + seconds
        if self._thread.is_alive():
            self._thread.join(seconds)
        while _has_native(self._thread) and time.monotonic() < end:
            time.sleep(0.001)

    # -- on the thread -----------------------------------------------------------------------------

    def _main(self) -> None:
        try:
            while not self._ending:
                self.run_posted(block=True)
        except BaseException as error:
            log.critical("MLX thread failed", exc_info=error)
            if self._on_death is not None:
                self._on_death(error)

    def run_posted(self, *, block: bool, wait_s: float | None = None) -> None:
        """Run all queued actions, with `block` after waiting for one, `wait_s` seconds at most."""
        if block:
            self.heartbeat.rest()
        try:
            posted = self._inbox.get(block, wait_s)
            while True:
                self.heartbeat.beat()
                self._run(*posted)
                posted = self._inbox.get_nowait()
        except Empty:
            self.heartbeat.beat()

    def _run(self, action: Callable[[], None], failed: Callable[[Exception], None]) -> None:
        try:
            action()
        except Exception as error:
            if self._is_ours(error):
                raise
            failed(error)

    @property
    def has_posted(self) -> bool:
        return not self._inbox.empty()


def _has_native(thread: threading.Thread) -> bool:
    """Return True while the operating system runs a started `thread`."""
    if sys.platform == "linux":
        return thread.native_id is not None and Path(f"/proc/self/task/{thread.native_id}").exists()
    if thread.ident is None:
        return False
    try:  # macOS looks the thread up first; glibc would follow a dangling pointer
        signal.pthread_kill(thread.ident, 0)
    except ProcessLookupError:
        return False
    return True


def _nothing() -> None: ...
