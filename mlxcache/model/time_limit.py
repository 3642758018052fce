"""Time limit for Python code, used because chat templates are programs that come with a model.

A thread cannot be killed, but Python can raise an exception in it:
https://docs.python.org/3/c-api/threads.html#c.PyThreadState_SetAsyncExc.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Overdue(BaseException):
    """Exception that is raised in a thread whose time limit has passed.

    It is not a subclass of Exception, so that no `except Exception` in a template's filters catches
    it.
    """


class _Watch:
    """A thread that raises `_Overdue` in threads whose time limit has passed.

    It sleeps until the next limit.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._due: dict[object, tuple[float, int]] = {}
        self._wakes = math.inf
        self._thread: threading.Thread | None = None

    def begin(self, seconds: float) -> object:
        """Raise `_Overdue` in the calling thread after `seconds`, unless `end` is called before.

        Returns the handle to pass to `end`.
        """
        handle, deadline = object(), time.monotonic() + seconds
        with self._lock:
            self._due[handle] = deadline, threading.get_ident()
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="mlxcache-time-limit", daemon=True
                )
                self._thread.start()
            elif deadline < self._wakes:
                self._changed.notify()
        return handle

    def end(self, handle: object) -> None:
        """Cancel the time limit that began with the call of `begin` that returned `handle`.

        `_Overdue` may still be raised during this call, but not after it.
        """
        with self._lock:
            self._due.pop(handle, None)

    def _run(self) -> None:
        with self._lock:
            while True:
                now = time.monotonic()
                for handle, (deadline, thread) in list(self._due.items()):
                    if deadline <= now:
                        del self._due[handle]
                        _interrupt(thread)
                self._wakes = min((due for due, _ in self._due.values()), default=math.inf)
                self._changed.wait(None if self._wakes == math.inf else self._wakes - now)


def _interrupt(thread: int) -> None:
    overdue = ctypes.py_object(_Overdue)
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), overdue)


_watch = _Watch()


def run_limited(work: Callable[[], T], seconds: float) -> T:
    """Run `work` and return its result. Raises TimeoutError if it takes longer than `seconds`.

    Only Python code is interrupted: a call into C, such as a long regular expression, ends first.
    """
    try:
        handle = _watch.begin(seconds)
        try:
            return work()
        finally:
            _watch.end(handle)
    except _Overdue:
        raise TimeoutError(f"not done after {seconds:g} s") from None
