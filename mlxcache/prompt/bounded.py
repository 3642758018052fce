"""An end to work that does not end by itself: chat templates are programs, of whoever made a model.

A thread cannot be killed, but Python can be made to raise an exception in it:
https://docs.python.org/3/c-api/threads.html#c.PyThreadState_SetAsyncExc.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class _Overdue(BaseException):
    """No Exception, so that nothing in a template's filters takes it for an error of its own."""


def bounded(work: Callable[[], T], seconds: float) -> T:
    """The result of `work`, which is Python code. Raises TimeoutError once it takes too long.

    Work that never returns to Python, such as one long call into C, is not interrupted.
    """
    lock, over = threading.Lock(), False
    thread = ctypes.c_ulong(threading.get_ident())

    def interrupt() -> None:
        with lock:
            if not over:
                overdue = ctypes.py_object(_Overdue)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, overdue)

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    try:
        timer.start()
        try:
            return work()
        finally:
            with lock:  # from here on nothing is raised any more
                over = True
            timer.cancel()
    except _Overdue:
        raise TimeoutError(f"not done after {seconds:g} s") from None
