"""How the MLX thread ends, by order or by a fault: what it has computed goes to disk first."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxcache.engine.runtime import Core
from mlxcache.engine.scheduler import Scheduler

if TYPE_CHECKING:
    from mlxcache.sessions.book import SessionBook

log = logging.getLogger("mlxcache.engine")

FLUSH_S = 5.0
"""Seconds for which what is not on disk yet is written at the end."""


def end(core: Core, book: SessionBook | None, *, died: bool) -> None:
    """Write what was committed, for at most `FLUSH_S`, and let everything go.

    A thread that `died` may have left anything behind: what fails of this is logged, and the rest
    is done all the same.
    """
    steps: list[Callable[[], None]] = [lambda: core.close(FLUSH_S)]
    if book is not None:
        steps.insert(0, book.close)  # before the database that it writes to
    if died:
        steps.insert(0, lambda: salvage(core.scheduler))
    for step in steps:
        try:
            step()
        except Exception:
            log.exception("an end of the MLX thread's failed")


def salvage(scheduler: Scheduler) -> None:
    """Have written what was committed of requests that were running."""
    disk = scheduler.disk
    if disk is None:
        return
    decoding = [task for lane in scheduler.lanes.all for task in lane.tasks]
    for task in [*scheduler.prefilling, *decoding]:
        if task.lease is not None and not task.restoring:
            disk.ended(task.lease, task.tokens())
