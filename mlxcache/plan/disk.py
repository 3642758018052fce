"""The simulated disk tier: the store's own index, in memory, for files that are not written.

The functions of `mlxcache.store` decide what is found, what is reused, and what is evicted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from mlxcache.cache.capacity import TOKEN_BYTES, file_bytes
from mlxcache.cache.path_write import RUN_TOKENS, lacking_checkpoints
from mlxcache.cache.restore import MIN_GAIN
from mlxcache.errors import DiskFull
from mlxcache.model.kv import Layout
from mlxcache.store import index
from mlxcache.store.database import WAL_PAGES
from mlxcache.store.digests import BLOCK, Chain, Chains
from mlxcache.store.eviction import Space, checkpoints_over_share, surplus_checkpoints
from mlxcache.store.folder import CHECKPOINT, RUN, Folder
from mlxcache.store.index import Match, Row
from mlxcache.types import Tokens

NAMESPACE = "plan"
UNLIMITED = 1 << 60

_BLOCK_BYTES, _PAGE_BYTES = 4096, 4096
_BEING_WRITTEN = "plan"


class CountedFolder(Folder):
    """A store folder without files; `other_bytes()` are those of its index and its folders."""

    def __init__(self, other_bytes: Callable[[], int]):
        super().__init__(Path("/nonexistent/mlxcache-plan"))
        self._other_bytes = other_bytes

    def overhead(self) -> int:
        return self._other_bytes() + self.log_bytes()

    def log_bytes(self) -> int:
        return WAL_PAGES * _PAGE_BYTES

    def quarantined(self) -> list[tuple[Path, int]]:
        return []

    def free(self) -> int:
        return UNLIMITED

    def block_size(self) -> int:
        return _BLOCK_BYTES


class CountedDisk:
    """The simulated disk tier for KV of one layout, in a folder that may take `limit` bytes.

    Files are longer than a server's where `RUN_TOKENS` take much memory. `now()` returns the
    simulated time in seconds. `written`: bytes.
    """

    def __init__(self, layout: Layout, limit: int, now: Callable[[], float]):
        self.written = 0
        self._layout = layout
        self._limit = limit
        self._now = now
        self._chains = Chains(NAMESPACE)
        self._keys: set[bytes] = set()
        self._latest = 0.0
        self._folders: set[tuple[str, int]] = set()
        self._index = sqlite3.connect(":memory:", isolation_level=None)
        self._index.execute("PRAGMA foreign_keys = ON")
        self._index.executescript(index.SCHEMA)
        self._index.execute("PRAGMA journal_mode = OFF")
        self._index.execute("BEGIN")  # never ends: a transaction each would take half of the time
        self._space = Space(CountedFolder(self._other_bytes), limit, 0)

    def close(self) -> None:
        self._index.close()

    # -- reading -----------------------------------------------------------------------------------

    def look_up(self, ids: Tokens, known: int) -> tuple[int, int]:
        """Return how many leading tokens of `ids` a server would restore, and how many are on disk.

        `known`: leading tokens that are in RAM. The first result is 0 if restoring would gain too
        few tokens beyond them. Both leave out the last token, which is always computed. Sets the
        time of last use of the files found.
        """
        if not self._limit:
            return 0, 0
        match = self._find(ids)
        self._touch(match)
        most = len(ids) - 1
        shared = target = min(match.length, most)
        if self._layout.opaque:
            reach = target if self._layout.specs else most
            target = max((row.start for row in match.checkpoints if row.start <= reach), default=0)
        return (target if target - known >= MIN_GAIN else 0), shared

    def _find(self, ids: Tokens) -> Match:
        return self._lookup(self._chains.of(ids))

    def _lookup(self, chain: Chain) -> Match:
        known = sorted(self._keys.intersection(chain.whole))
        return index.lookup_among(self._index, chain, known)

    def _touch(self, match: Match) -> None:
        # the store's clock never stands still, so that uses are ordered
        self._latest = max(self._now(), self._latest + 1e-5)
        index.touch(self._index, [(self._latest, row.id) for row in match.rows])

    # -- writing -----------------------------------------------------------------------------------

    def write(self, ids: Tokens, reused: int, checkpoints: Sequence[int]) -> None:
        """Record files for the tokens of the path `ids` that are not on disk yet.

        `checkpoints`: positions of the path's checkpoints. `reused`: leading tokens that the
        request reused. If the disk is full, the rest is not recorded.
        """
        if not self._limit:
            return
        match = self._find(ids)
        counted = [row.id for row, start, _ in match.cover if start < reused]
        counted += [row.id for row in match.checkpoints if row.start <= reused]
        index.count_reuses(self._index, counted)
        self._touch(match)
        try:
            if self._layout.specs:
                match = self._write_runs(ids, match)
            if self._layout.opaque:
                present = [row.start for row in match.checkpoints]
                for at in sorted(lacking_checkpoints(list(checkpoints), present)):
                    self._write_checkpoint(self._chains.of(ids[:at]))
        except DiskFull:
            return

    def _write_runs(self, ids: Tokens, match: Match) -> Match:
        """Record the runs of `ids` that are missing on disk.

        `match`: the part of `ids` on disk before. Returns the part on disk afterwards, which only a
        layout with opaque slots needs. Raises DiskFull if a run does not fit.
        """
        start = match.length // BLOCK * BLOCK
        before, whole = match.run_before(start), self._chains.of(ids)
        parent = before.id if before is not None else None
        path = {row.id for row, _, _ in match.cover}
        while start < len(ids) and match.length < len(ids):
            stop = min(len(ids), start + RUN_TOKENS)
            chain = Chain(NAMESPACE, ids[:stop], whole.whole[: stop // BLOCK + 1])
            one = self._layout.bytes_per_token + TOKEN_BYTES
            row = self._row(RUN, chain, start, parent, None)
            parent, evicted = self._save(row, file_bytes((stop - start) * one))
            index.put_tokens(self._index, parent, ids[start:stop])
            for checkpoint in match.checkpoints:
                if checkpoint.parent is None and start < checkpoint.start <= stop:
                    self._index.execute(
                        "UPDATE file SET parent = ? WHERE id = ?", (parent, checkpoint.id)
                    )
            start = stop
            if evicted & path:
                break  # its beginning was evicted for its end
            path.add(parent)
        return self._find(ids) if self._layout.opaque else match

    def _write_checkpoint(self, chain: Chain) -> None:
        nbytes = self._layout.checkpoint_bytes
        match = self._lookup(chain)
        if match.cover:
            coming = self._space.estimate(nbytes, 0)
            rows = checkpoints_over_share(self._index, coming, self._limit)
            self._space.remove(self._index, rows)
            match = self._lookup(chain) if rows else match
        position = len(chain.ids)
        previous = match.checkpoints[-1].id if match.checkpoints else None
        before = match.run_before(position)
        parent = before.id if before is not None else None
        row = self._row(CHECKPOINT, chain, position, parent, previous)
        self._save(row, file_bytes(nbytes))
        path = self._lookup(chain)
        gone = surplus_checkpoints(self._index, NAMESPACE, chain.ids, path, self._limit)
        self._space.remove(self._index, gone)

    def _row(
        self, kind: str, chain: Chain, start: int, parent: int | None, previous: int | None
    ) -> Row:
        stop = len(chain.ids)
        base = chain.whole[start // BLOCK]
        key = base if kind == CHECKPOINT else chain.at(min(start + BLOCK, stop))
        place, links = (chain.at(stop), base, key, start, stop), (parent, previous)
        return Row(0, kind, *place, 1, 0, self._latest, *links, _BEING_WRITTEN)

    def _save(self, row: Row, nbytes: int) -> tuple[int, set[int]]:
        """Insert the row of a file of `nbytes` bytes; return its id, and those of files evicted.

        Raises DiskFull, without a new row, if the file does not fit.
        """
        self._index.execute(
            "DELETE FROM file WHERE kind = ? AND digest = ?", (row.kind, row.digest)
        )
        size = self._space.estimate(nbytes, row.stop - row.start)
        id = index.insert(self._index, replace(row, nbytes=nbytes, disk=size))
        try:
            evicted = {one.id for one in self._space.make_room(self._index, size, has_row=True)}
        except DiskFull:
            self._index.execute("DELETE FROM file WHERE id = ?", (id,))
            raise
        self._index.execute("UPDATE file SET owner = NULL, disk = ? WHERE id = ?", (nbytes, id))
        self.written += nbytes
        self._keys.add(row.key)
        self._folders.add((row.kind, row.digest[0]))
        return id, evicted

    def _other_bytes(self) -> int:
        (pages,) = self._index.execute("PRAGMA page_count").fetchone()
        return int(pages) * _PAGE_BYTES + len(self._folders) * _BLOCK_BYTES
