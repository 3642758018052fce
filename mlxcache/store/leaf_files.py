"""Which files hold the leaves of sessions: looked up once, and again only if the index changed."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlxcache.lru import LRU
from mlxcache.store import index
from mlxcache.store.digests import BLOCK, Chain
from mlxcache.store.index import Match
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Held

MOST_LEAVES_KNOWN = 20_000
"""Most leaves whose files are remembered, twice the sessions that a table has."""

MOST_ADDED = 1_000
"""Most new files that remembered leaves are compared with; after more, nothing is remembered."""

_MARK = 4
"""Bytes that are kept of a digest: if two digests begin alike, a leaf is looked up needlessly."""

LookUp = Callable[[LeafRow], tuple[Chain, Match, int]]
"""Look up a leaf in the index; return its digests, its files, and how many tokens are durable."""


@dataclass(slots=True)
class _Known:
    """Result of a lookup: number of durable `tokens`, and row ids of the `files` that hold them.

    `marks`: the first bytes of the digest before each block. `compared`: how many of the files
    added since were compared with it.
    """

    tokens: int
    files: tuple[int, ...]
    marks: bytes
    compared: int


class LeafFiles:
    """Remembers the files of the leaves that were measured. Thread-safe.

    A lookup of a leaf finds what it found before as long as all these files are in the index, and
    none was added whose `base` is the digest before one of the leaf's blocks. So a leaf is measured
    again without its token ids, whichever process added or removed other files.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._forget(0, set())

    def _forget(self, newest: int, unfinished: set[int]) -> None:
        self._known: LRU[LeafRow, _Known] = LRU(MOST_LEAVES_KNOWN)
        self._added: list[tuple[int, bytes]] = []
        self._newest, self._unfinished = newest, unfinished

    def measure(
        self,
        connection: sqlite3.Connection,
        groups: Sequence[Sequence[LeafRow]],
        look_up: LookUp,
    ) -> list[Held]:
        """Return, for each group of leaves, the durable tokens of each and the bytes of all files.

        `connection`: in a transaction that has read nothing yet. `look_up` uses it too.
        """
        with self._lock:
            self._note_added(connection)
            known = [one for group in groups for leaf in group if (one := self._known.get(leaf))]
            sizes = index.sizes(connection, {id for one in known for id in one.files})
            found = []
            for group in groups:
                own = [self._find(leaf, sizes, look_up) for leaf in group]
                files = {id for one in own for id in one.files}
                held = Held(tuple(one.tokens for one in own), sum(sizes[id] for id in files))
                found.append(held)
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
        self._added += [(r.start // BLOCK, r.base[:_MARK]) for r in rows if r.owner is None]

    def _find(self, leaf: LeafRow, sizes: dict[int, int], look_up: LookUp) -> _Known:
        """Return what is known of a leaf; if that may be wrong now, look it up.

        `sizes`: bytes of the known files that are in the index, by row id; those found are added.
        """
        known = self._known.get(leaf)
        if known is not None and self._holds(known, sizes):
            known.compared = len(self._added)
            return known
        chain, match, tokens = look_up(leaf)
        files = [*(row for row, _, _ in match.cover), *match.checkpoints]
        sizes |= {row.id: row.nbytes for row in files}
        marks = b"".join(digest[:_MARK] for digest in chain.whole)
        known = _Known(tokens, tuple(row.id for row in files), marks, len(self._added))
        self._known.put(leaf, known)
        return known

    def _holds(self, known: _Known, sizes: dict[int, int]) -> bool:
        return all(id in sizes for id in known.files) and not any(
            known.marks[block * _MARK : (block + 1) * _MARK] == mark
            for block, mark in self._added[known.compared :]
        )
