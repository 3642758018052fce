"""Delay of a service's start after runs that did not end cleanly.

launchd starts the service at each login, so also after a kernel panic, and 10 seconds after a
failure. If the server's own work brings the machine down, that must not become a loop.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxcache.disk_calls import sync
from mlxcache.private import create, make_folder

NOTE = "unclean-starts"
"""Name of a file in the cache folder: a byte for each start since the last clean end."""

SERVICE = "MLXCACHE_SERVICE"
"""Variable that examples/service/mlxcache.plist sets."""

FIRST_S, MOST_S = 30.0, 300.0
"""Seconds to wait after one unclean end; twice as long after each further one, up to the second."""

RECENT_S = 3600.0
"""Age in seconds from which starts are forgotten: the last one was not what ended the server."""

log = logging.getLogger("mlxcache.server")


@contextmanager
def backing_off(
    folder: Path, environ: Mapping[str, str], sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Wait if recent runs of the service did not end cleanly; note a clean end of the block.

    An end with an exception is not clean. `folder`: the cache folder. Does nothing without the
    variable `SERVICE` in `environ`.
    """
    if not environ.get(SERVICE):
        yield
        return
    note = folder / NOTE
    if unclean := _count_start(note):
        wait_s = min(FIRST_S * 2 ** min(unclean - 1, 9), MOST_S)
        log.warning(
            "start delayed by %.0f s: unclean ends of the service in a row: %d; "
            "mlxcache doctor tells whether the machine went down",
            *(wait_s, unclean),
        )
        sleep(wait_s)
    yield
    with suppress(OSError):  # nothing can be written, or nothing was
        note.unlink()


def _count_start(note: Path) -> int:
    """Add this start to those in the file `note`, durably; return how many there were recently."""
    try:
        make_folder(note.parent)
        starts = 0
        if note.exists() and time.time() - note.stat().st_mtime < RECENT_S:
            starts = note.stat().st_size
        with create(note) as file:
            file.write(b"." * (starts + 1))
            file.flush()
            sync(file.fileno())
    except OSError as error:
        log.warning("start not noted in %s: %s", note, error)
        return 0
    return starts
