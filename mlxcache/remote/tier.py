"""The remote tier of one namespace: fetches before a request, uploads after it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import BoundedSemaphore
from typing import Any

from mlxcache.errors import StoreError
from mlxcache.remote.exchange import Exchange, Shape
from mlxcache.remote.fetch import PARALLEL, Fetcher, PrefillSeconds
from mlxcache.remote.objects import Objects
from mlxcache.remote.records import SharedReplies, SharedSessions
from mlxcache.remote.upload import Uploader
from mlxcache.store.found import Found
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.store.store import Store
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.engine")

LOOKUPS = 8
"""Most lookups at once; each waits for the remote on a thread of its own."""

REPLIES_SHARE = 0.03
"""Share of a prompt's whole prefill that looking up its replies may take."""

MOST_REPLIES_S = 1.0
"""Most seconds for looking up the replies of a prompt."""

CLOSE_S = 1.0
"""Most seconds for uploads when the server stops, and again for the object in progress."""


class RemoteTier:
    """Exchange of one model's KV, replies and session records with other servers. Thread-safe.

    `objects`: the remote. `store`: that of the model's namespace; the caller closes both.
    `seconds(start, stop)` estimates the time for computing the prompt tokens [start, stop).
    `vocab_size`: number of token ids. Only `replies_to` and `close` block.
    """

    def __init__(
        self,
        objects: Objects,
        store: Store,
        shape: Shape,
        seconds: PrefillSeconds,
        vocab_size: int,
        *,
        label: str = "unnamed",
    ):
        exchange = Exchange(objects, store, shape, label)
        self._label, self._objects, self._counts = label, objects, exchange.counts
        self._seconds = seconds
        self._reading = ThreadPoolExecutor(2 * PARALLEL, thread_name_prefix="mlxcache-fetch")
        self._lookups = ThreadPoolExecutor(LOOKUPS, thread_name_prefix="mlxcache-lookup")
        self._places = BoundedSemaphore(LOOKUPS)
        # apart, because no request waits for it
        self._behind = ThreadPoolExecutor(1, thread_name_prefix="mlxcache-session")
        self.fetcher = Fetcher(exchange, seconds, self._reading)
        self.uploader = Uploader(exchange)
        self.sessions = SharedSessions(exchange, self.uploader, self._behind.submit)
        self._replies = SharedReplies(exchange, self.uploader, vocab_size)

    def look_up(
        self,
        ids: Tokens,
        known: int,
        found: Found,
        then: Callable[[], None],
        dropped: Callable[[], bool],
    ) -> bool:
        """Begin to fetch the KV of a prompt that other servers computed, into the store.

        `known`: number of leading tokens that can be reused from RAM. `found`: the part on disk.
        Returns False, and does nothing, if a lookup is not worthwhile or too many are in progress.
        Otherwise `then()` is called on another thread at the end, whether something was fetched or
        not. `dropped()` returns True once nobody waits for the result.
        """
        if not self.fetcher.wanted(ids, known, found) or not self._places.acquire(blocking=False):
            return False
        began = time.monotonic()

        def run() -> None:
            try:
                self.fetcher.fetch(ids, known, began, dropped)
            except StoreError as error:
                log.debug(
                    "model %s: fetching KV from the remote failed: local store: %s",
                    *(self._label, error),
                )
            except Exception:
                log.exception(
                    "model %s: remote lookup failed, fetching nothing: prompt of %d tokens",
                    *(self._label, len(ids)),
                )
            finally:
                self._places.release()
                then()

        try:
            self._lookups.submit(run)
        except RuntimeError:  # the server is stopping
            return False
        return True

    def share(self, ids: Tokens) -> None:
        self.uploader.add_path(ids)

    def share_reply(self, owner: str | None, asked: bytes, row: ReplyRow) -> None:
        self._replies.offer(owner, asked, row)

    def replies_to(self, owner: str | None, asked: Sequence[bytes], tokens: int) -> list[ReplyRow]:
        """Return the replies of a conversation that the remote has, for replay.

        `asked`: as in `SharedReplies.fetch`. `tokens`: length of the conversation. Blocks for at
        most `REPLIES_SHARE` of the estimated seconds for computing it.
        """
        if not asked or not self._objects.available:
            return []
        whole = self._seconds(0, tokens)
        return self._replies.fetch(owner, asked, min(MOST_REPLIES_S, REPLIES_SHARE * whole))

    def figures(self) -> dict[str, Any]:
        return {**self._counts.figures(), "waiting": self.uploader.waiting}

    def close(self, seconds: float = CLOSE_S) -> None:
        """Upload what is queued, for at most `seconds`, then end the threads of this object."""
        self._lookups.shutdown(wait=False, cancel_futures=True)
        self._behind.shutdown(wait=False, cancel_futures=True)
        self._reading.shutdown(wait=False, cancel_futures=True)
        if self._objects.writable:
            self.uploader.wait(seconds)
        left = self.uploader.close(seconds)
        if left:
            log.info(
                "model %s: shutdown: %d uploads (KV of a conversation, or a reply) not done",
                *(self._label, left),
            )
