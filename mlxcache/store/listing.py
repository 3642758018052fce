"""A session as it is listed: its row, its leaves, and how much of them each tier holds.

What is on disk is looked up once, and again only if the index changed.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxcache.lru import LRU
from mlxcache.store import index
from mlxcache.store.digests import BLOCK, Chain, partial_digest
from mlxcache.store.folder import RUN
from mlxcache.store.index import Match, Row
from mlxcache.store.leaves import LeafRow
from mlxcache.store.session_rows import Session, SessionFigures
from mlxcache.types import Tokens

Tier = Literal["ram", "disk", "both", "mixed"]
NO_FIGURES = SessionFigures()


@dataclass(frozen=True, slots=True)
class Held:
    tokens: tuple[int, ...]
    nbytes: int

    @classmethod
    def nothing(cls, leaves: Sequence[LeafRow]) -> Held:
        return cls((0,) * len(leaves), 0)

    def joined(self, other: Held) -> Held:
        most = tuple(map(max, self.tokens, other.tokens))
        return Held(most, self.nbytes + other.nbytes)


@dataclass(frozen=True, slots=True)
class Listed:
    session: Session
    leaves: tuple[LeafRow, ...]
    ram: Held
    disk: Held
    figures: SessionFigures = NO_FIGURES

    @property
    def tier(self) -> Tier | None:
        """The tier that holds tokens of the session; None if neither RAM nor disk does.

        `both` if each tier holds all of the session, and `mixed` if both hold tokens but at least
        one of them lacks some.
        """
        lengths = tuple(leaf.tokens for leaf in self.leaves)
        ram, disk = any(self.ram.tokens), any(self.disk.tokens)
        if ram and disk:
            return "both" if self.ram.tokens == self.disk.tokens == lengths else "mixed"
        return "ram" if ram else "disk" if disk else None

    def as_object(self, *, leaves: bool = False) -> dict[str, Any]:
        """Return the session's JSON object in `GET /v1/sessions`.

        `tokens` and `durable_tokens` count only the main leaf; the bytes are those of all leaves.
        """
        session, main = self.session, slice(0, 1)
        found: dict[str, Any] = {
            "id": session.id,
            "object": "session",
            "name": session.name,
            "title": session.title,
            "label": session.label,
            "model": session.model,
            "namespace": session.namespace,
            "client": session.client,
            "agents": sum(leaf.kind == "agent" for leaf in self.leaves),
            "tokens": sum(leaf.tokens for leaf in self.leaves[main]),
            "durable_tokens": sum(self.disk.tokens[main]),
            "turns": session.turns,
            "ram_bytes": self.ram.nbytes,
            "disk_bytes": self.disk.nbytes,
            "tier": self.tier,
            "pinned": session.pinned,
            "figures": self.figures.as_object(),
            "created_at": session.created_at,
            "last_used_at": session.last_used_at,
        }
        if leaves:
            found["leaves"] = [
                _leaf_object(leaf, ram, disk)
                for leaf, ram, disk in zip(
                    self.leaves, self.ram.tokens, self.disk.tokens, strict=True
                )
            ]
        return found


def related_objects(sessions: Sequence[Session]) -> list[dict[str, Any]]:
    return [
        {"id": one.id, "model": one.model, "turns": one.turns, "last_used_at": one.last_used_at}
        for one in sessions
    ]


def _leaf_object(leaf: LeafRow, ram_tokens: int, durable_tokens: int) -> dict[str, Any]:
    return {
        "kind": leaf.kind,
        "tokens": leaf.tokens,
        "prompt_tokens": leaf.prompt_tokens,
        "ram_tokens": ram_tokens,
        "durable_tokens": durable_tokens,
        "turns": leaf.turns,
        "last_used_at": leaf.last_used_at,
    }


MOST_LEAVES_KNOWN = 20_000
"""Most leaves whose files are remembered, twice the sessions that a table has."""

MOST_ADDED = 1_000
"""Most new files that remembered leaves are compared with; after more, nothing is remembered."""

_MARK = 4
"""Bytes that are kept of a digest: if two digests begin alike, a leaf is looked up needlessly."""

ReadIds = Callable[[LeafRow], Tokens]

LookUp = Callable[[Tokens], tuple[Chain, Match]]


def durable_tokens(length: int, checkpoints: Sequence[int], *, needed: bool) -> int:
    """Return how many tokens of a prefix on disk a server started now could continue from.

    `length`: tokens of the prefix whose KV is on disk; 0 in a model that has only checkpoints. A
    model that needs checkpoints (`needed`) continues from the last one whose KV is on disk too, so
    KV before the first does not count.
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
        """Return the durable tokens of each leaf, and the bytes of all files of each group."""
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
        known = self._known.get(leaf)
        if (
            known is None
            or not sizes.keys() >= set(known.files)
            or known.finds(self._added[known.compared :], lambda: ids(leaf))
        ):
            chain, match = look_up(ids(leaf))
            sizes |= {row.id: row.nbytes for row in match.rows}
            marks = b"".join(digest[:_MARK] for digest in chain.whole)
            gap = match.length // BLOCK if match.length < leaf.tokens else -1
            saved = tuple(row.start for row in match.checkpoints)
            known = _Known(match.length, saved, tuple(row.id for row in match.rows), marks, gap, 0)
            self._known.put(leaf, known)
        known.compared = len(self._added)
        return known
