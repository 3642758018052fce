"""The reply feed: makes replies from the table of replies available for replay.

They were stored by other servers, or by this one before a restart. Rendering uses only replies in
memory. A thread of this module reads the table when a prompt is about to be rendered; the prompt
waits for it only briefly.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from mlxcache.errors import StoreError
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.store.sessions import Sessions
from mlxcache.store.store import Store

log = logging.getLogger("mlxcache.engine")

Learn = Callable[[Mapping[str | None, Sequence[ReplyRow]]], None]
"""Callable that gets new replies by owner, oldest first. It is called on a worker thread."""

WAIT_S = 0.05
"""Most seconds that a request waits for reading the table. A read usually takes under 1 ms."""


class ReplyFeed:
    """Passes the stored replies of one namespace to the callable `learn`.

    `learn` gets a mapping from owners (None: no owner) to their replies, oldest first. `start`
    passes all stored replies, and each `refresh` those stored since the last read of the table.
    `refresh` calls `learn` on a worker thread. `label`: that of the model, for the log.
    """

    def __init__(self, sessions: Sessions, store: Store, learn: Learn, *, label: str = "unnamed"):
        self._label = label
        self._sessions, self._store, self._learn = sessions, store, learn
        self._last = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-replies")
        self._reading: asyncio.Future[None] | None = None

    def start(self) -> None:
        """Pass all stored replies to `learn`. Blocks on the database. Call before `refresh`."""
        self._read()

    async def refresh(self) -> None:
        """Pass replies stored since the last read to `learn`, waiting at most `WAIT_S` seconds.

        A read that takes longer continues in its thread. Errors of the table are only logged. Use
        from one event loop, and not after `close`.
        """
        if self._reading is None or self._reading.done():
            self._reading = asyncio.wrap_future(self._pool.submit(self._read))
        await asyncio.wait({self._reading}, timeout=WAIT_S)

    def close(self) -> None:
        """Stop reading replies; a read that has begun ends in its thread. Returns at once."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _read(self) -> None:
        if not self._store.database.is_there():
            return  # a read would create a removed folder again
        try:
            rows, self._last = self._sessions.replies(self._store.namespace, self._last)
        except StoreError as error:  # reported where the table is written
            log.debug(
                "model %s: cannot read the replies on disk that are kept for replay: %s",
                *(self._label, error),
            )
            return
        except Exception:  # a prompt is rendered without them
            log.exception(
                "model %s: reading the replies on disk failed, they are not replayed", self._label
            )
            return
        if rows:
            self._learn(rows)
