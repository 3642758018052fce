"""Which files hold the leaves of sessions: looked up once, and again only if the index changed."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from mlxcache.lru import LRU
from mlxcache.store import index
from mlxcache.store.digests import BLOCK, Chain, partial_digest
from mlxcache.store.folder import RUN
from mlxcache.store.index import Match, Row
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Held
from mlxcache.types import Tokens

MOST_LEAVES_KNOWN = 20_000
"""Most leaves whose files are remembered, twice the sessions that a table has."""

MOST_ADDED = 1_000
"""Most new files that remembered leaves are compared with; after more, nothing is remembered."""

_MARK = 4
"""Bytes that are kept of a digest: if two digests begin alike, a leaf is looked up needlessly."""

ReadIds = Callable[[LeafRow], Tokens]
"""Return the token ids of a leaf, int32 of shape (n,)."""

LookUp = Callable[[Tokens], tuple[Chain, Match]]
"""Look up token ids in the index: return their digests and their files."""


def durable_tokens(length: int, checkpoints: Sequence[int], *, needed: bool) -> int:
    """Return how many tokens of a prefix on disk a server started now could continue from.

    `length`: tokens of the prefix whose KV is on disk; 0 in a model that has only checkpoints.
    `checkpoints`: positions of the checkpoints after parts of the prefix. A model that needs them
    (`needed`) continues from the last one whose KV is on disk too, so KV before the first does not
    count.
    """
    if not checkpoints:
        return 0 if needed else length
    return max((one for one in checkpoints if one <= length or not length), default=0)


@dataclass(slots=True)
class _Known:
    """Result of a lookup: `length` tokens and the states at `checkpoints` are in `files` (row ids).

    `marks`: the first bytes of the digest before each block. `gap`: number of the block in which
    the KV on disk ends, -1 if all is on disk. `compared`: how many of the files added since were
    compared with it.
    """

    length: int
    checkpoints: tuple[int, ...]
    files: tuple[int, ...]
    marks: bytes
    gap: int
    compared: int

    def finds(self, added: Iterable[Row], ids: Callable[[], Tokens]) -> bool:
        """Return whether a lookup would find one of the files `added`, or may do."""
        return any(self._finds(row, ids) for row in added)

    def _finds(self, row: Row, ids: Callable[[], Tokens]) -> bool:
        block = row.start // BLOCK
        if row.kind == RUN and self._passes(block + 1, row.key):
            return True
        if not self._passes(block, row.base):
            return False
        if row.kind == RUN:
            return block == self.gap
        return partial_digest(row.base, ids()[block * BLOCK : row.start]) == row.digest

    def _passes(self, block: int, digest: bytes) -> bool:
        return self.marks[block * _MARK : (block + 1) * _MARK] == digest[:_MARK]


class LeafFiles:
    """Remembers the files of the leaves that were measured. Thread-safe.

    A leaf is looked up again if one of its files was removed, or one was added that the lookup
    would find; by which process does not matter. Otherwise its token ids are not read.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget(0, set())

    def _forget(self, newest: int, unfinished: set[int]) -> None:
        self._known: LRU[LeafRow, _Known] = LRU(MOST_LEAVES_KNOWN)
        self._added: list[Row] = []
        self._newest, self._unfinished = newest, unfinished

    def measure(
        self,
        connection: sqlite3.Connection,
        groups: Sequence[Sequence[LeafRow]],
        ids: ReadIds,
        look_up: LookUp,
        *,
        needed: bool,
    ) -> list[Held]:
        """Return, for each group of leaves, the durable tokens of each and the bytes of all files.

        `connection`: in a transaction that has read nothing yet; `look_up` uses it too. `needed`:
        the model needs checkpoints.
        """
        with self._lock:
            self._note_added(connection)
            known = [one for group in groups for leaf in group if (one := self._known.get(leaf))]
            sizes = index.sizes(connection, {id for one in known for id in one.files})
            found = []
            for group in groups:
                own = [self._find(leaf, sizes, ids, look_up) for leaf in group]
                files = {id for one in own for id in one.files}
                durable = (durable_tokens(x.length, x.checkpoints, needed=needed) for x in own)
                found.append(Held(tuple(durable), sum(sizes[id] for id in files)))
            return found

    def _note_added(self, connection: sqlite3.Connection) -> None:
        """Append the files that became durable since the last call to those to compare with."""
        newest = index.newest(connection)
        if not 0 < self._newest <= newest or len(self._added) > MOST_ADDED:
            rows = index.rows(connection, "owner IS NOT NULL")
            self._forget(newest, {row.id for row in rows})
            return
        places = ", ".join("?" * len(self._unfinished))
        where = f"id > ? OR id IN ({places})"
        rows = index.rows(connection, where, self._newest, *self._unfinished)
        self._newest = newest
        self._unfinished = {row.id for row in rows if row.owner is not None}
        self._added += [row for row in rows if row.owner is None]

    def _find(self, leaf: LeafRow, sizes: dict[int, int], ids: ReadIds, look_up: LookUp) -> _Known:
        """Return what is known of a leaf; if that may be wrong now, look it up.

        `sizes`: bytes of the known files that are in the index, by row id; those found are added.
        """
        known = self._known.get(leaf)
        if (
            known is None
            or not sizes.keys() >= set(known.files)
            or known.finds(self._added[known.compared :], lambda: ids(leaf))
        ):
            chain, match = look_up(ids(leaf))
            files = [*(row for row, _, _ in match.cover), *match.checkpoints]
            sizes |= {row.id: row.nbytes for row in files}
            marks = b"".join(digest[:_MARK] for digest in chain.whole)
            gap = match.length // BLOCK if match.length < leaf.tokens else -1
            saved = tuple(row.start for row in match.checkpoints)
            known = _Known(match.length, saved, tuple(row.id for row in files), marks, gap, 0)
            self._known.put(leaf, known)
        known.compared = len(self._added)
        return known
