"""Replies that other servers and earlier runs wrote, passed on in the background.

Rendering needs them for exact replay and must not wait for a database: a thread of this module
reads the table, and what renders only looks into memory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence

from mlxcache.errors import StoreError
from mlxcache.store.session_rows import ReplyRow
from mlxcache.store.sessions import Sessions
from mlxcache.store.store import Store

log = logging.getLogger("mlxcache.engine")

Learn = Callable[[Mapping[str | None, Sequence[ReplyRow]]], None]
"""Takes new replies by owner, oldest first. Called on a worker thread."""

REFRESH_S = 0.25
"""Seconds between reads of the table; one without news takes 0.1 ms."""


class ReplyFeed:
    """Passes the rows of one namespace's replies on to `learn`: all once, then the new ones."""

    def __init__(self, sessions: Sessions, store: Store, learn: Learn):
        self._sessions, self._store, self._learn = sessions, store, learn
        self._last = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlxcache-replies", daemon=True)

    def start(self) -> None:
        """Pass on the replies that there are, then start the thread. Blocks on the database."""
        self._refresh()
        self._thread.start()

    def close(self) -> None:
        """Read no more. Returns at once."""
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(REFRESH_S):
            try:
                self._refresh()
            except Exception:
                log.exception("reading replies of other servers failed")

    def _refresh(self) -> None:
        if not self._store.database.is_there():
            return  # a read would make a removed folder again
        try:
            rows, self._last = self._sessions.replies(self._store.namespace, self._last)
        except StoreError as error:  # reported by those who write
            log.debug("replies on disk cannot be read: %s", error)
            return
        if rows and not self._stop.is_set():
            self._learn(rows)
