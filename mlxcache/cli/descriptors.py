"""File descriptors: as many as the system gives, and few words where there are none left."""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import time
from contextlib import suppress
from typing import Any

log = logging.getLogger("mlxcache.server")

WANTED = 16_384
"""Descriptors are cheap; 256, a Mac's default, are few beside files, models and connections."""

TELL_S = 30.0
"""How often it is told that no connection can be accepted; asyncio tries each second."""

_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def raise_limit() -> None:
    """Let this process have up to `WANTED` descriptors, where the system allows it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # the old limit does
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def tell_rarely(loop: asyncio.AbstractEventLoop) -> None:
    """Have `loop` tell in a line now and then that it cannot accept, and all else as before.

    It tries again each second as often as its backlog is long, with a traceback each time.
    """
    told_at = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal told_at
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NONE_LEFT):
            loop.default_exception_handler(context)
        elif time.monotonic() - told_at > TELL_S:
            told_at = time.monotonic()
            log.error("no new connection can be accepted now: %s", error.strerror)

    loop.set_exception_handler(handle)
