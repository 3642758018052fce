"""The disk tier: a store with its queue of writes, its restores and its figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxcache.cache.kv_io import KVFiles
from mlxcache.cache.restore import Restorer
from mlxcache.cache.write_behind import WriteBehind
from mlxcache.errors import StoreError
from mlxcache.store.found import StoreStats
from mlxcache.store.store import Store
from mlxcache.tree.prefix_tree import PrefixTree

if TYPE_CHECKING:
    from mlxcache.remote.tier import RemoteTier

COPY_SHARE = 0.05
"""Share of the MLX thread's time that copies for the disk may take while replies are decoded."""

END_S = 1.0
"""Seconds, of those that `close` may take, in which it only waits for the write in progress."""

FIGURES_S = 0.5
"""Seconds for which the store's figures are reused."""


class DiskTier:
    """The disk tier of one namespace: its store, which it owns, pending writes and restores.

    `pending_limit`: maximum bytes of copies that wait to be written. `wake()` is called from other
    threads when there is work for the MLX thread. `remote` is closed with the tier. MLX thread
    only, except `stats`.
    """

    def __init__(
        self,
        store: Store,
        files: KVFiles,
        tree: PrefixTree,
        pending_limit: int,
        wake: Callable[[], None],
        *,
        remote: RemoteTier | None = None,
        label: str = "unnamed",
    ):
        self.store = store
        self.remote = remote
        on_durable = remote.share if remote is not None else None
        self.write_behind = WriteBehind(
            files, tree, store, pending_limit, wake, on_durable=on_durable, label=label
        )
        self.restorer = Restorer(store, files, wake, remote, label=label)
        self._stats: StoreStats | None = None
        self._stats_at = 0.0
        self._next_copy_at = 0.0

    def pump(self, *, decoding: bool) -> None:
        """Apply the results of finished writes, and give the writer at most one more job."""
        began = time.monotonic()
        if decoding and began < self._next_copy_at:
            self.write_behind.collect()
        elif self.write_behind.pump():
            self._next_copy_at = began + (time.monotonic() - began) / COPY_SHARE

    def stats(self) -> StoreStats:
        """Return the figures of the store, at most `FIGURES_S` seconds old. Any thread."""
        if self._stats is None or time.monotonic() - self._stats_at > FIGURES_S:
            try:
                self._stats = self.store.stats()
            except StoreError as error:  # the folder was removed or cannot be read
                self._stats = self.store.nothing(str(error))
            self._stats_at = time.monotonic()
        return self._stats

    def close(self, seconds: float) -> int:
        """Write pending data, then close the store. Blocks for about `seconds` at most.

        Returns an upper bound of the number of tokens that were not written.
        """
        deadline = time.monotonic() + seconds
        left = self.write_behind.drain(seconds - min(END_S, seconds / 2))
        self.restorer.close()
        self.write_behind.close(max(0.0, deadline - time.monotonic()))
        if self.remote is not None:
            self.remote.close()
        self.store.close()
        return left
