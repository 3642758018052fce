"""Ranks and totals are kept change by change, and equal those of a full count."""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from heapq import heapify, heappop, heappush
from math import log2

import pytest

from mlxcache.store import index
from mlxcache.store.eviction import (
    MOMENT_S,
    checkpoints_over_share,
    files_to_evict,
    ranked_files,
)
from mlxcache.store.folder import CHECKPOINT, KINDS, RUN
from mlxcache.store.index import MOST_REUSES, Row, Totals, read_totals
from mlxcache.store.store import Store
from tests.store.content import opened, put, snapshot, tokens

DISK = 10

# -- the order by its definition, from all files at once -------------------------------------------


def evicted_by_definition(
    rows: Sequence[Row],
    need: int,
    pinned: Collection[int],
    reuses: Mapping[int, int],
    *,
    partly: bool = False,
) -> list[Row] | None:
    """Choose the files to evict, in order, to free `need` bytes of disk space.

    The oldest come first; age counts from the last use, and is less for a file that was reused
    often (see `_ages`). Of equally old files, the one that ends last is evicted first, and the
    first checkpoint of a path, which new conversations share, last.

    Only files that no other file continues and that are not being written can be chosen. Evicting
    one may make the file before it eligible. Files with an id in `pinned` are chosen only when
    nothing else is left. If all eligible files free less than `need` bytes, they are returned if
    `partly`, otherwise None is returned. `reuses`: number of requests that reused each file, by id.
    """
    ages, by_id = _ages(rows, reuses), {row.id: row for row in rows}
    builds = Counter(row.parent for row in rows)

    def key(row: Row) -> tuple[bool, float, bool, int, int]:
        head = row.kind == CHECKPOINT and row.previous is None
        return (row.id in pinned, -ages[row.id], head, -row.stop, row.id)

    heap = [key(row) for row in rows if row.owner is None and not builds[row.id]]
    heapify(heap)
    chosen: list[Row] = []
    while need > 0:
        if not heap:
            return chosen if partly else None
        row = by_id[heappop(heap)[-1]]
        chosen.append(row)
        need -= row.disk
        parent = None if row.parent is None else by_id.get(row.parent)
        if parent is not None:
            builds[parent.id] -= 1
            if not builds[parent.id] and parent.owner is None:
                heappush(heap, key(parent))
    return chosen


def _ages(rows: Sequence[Row], reuses: Mapping[int, int]) -> dict[int, float]:
    """Return the age of each file, by id: seconds since its last use, divided by a weight.

    The file of the greatest age is evicted first. The weight grows by the same amount with each
    doubling of the file's reuses. A checkpoint is never older than a later one on its path. Times
    are those of the wall clock, because servers that share a folder have no other clock in common.
    """
    used, uses = last_uses(rows), _uses(rows, reuses)
    now = max(used.values(), default=0.0) + MOMENT_S
    ages = {
        row.id: (now - used[row.id]) / (1 + log2(1 + min(uses[row.id], MOST_REUSES)))
        for row in rows
    }
    for row in sorted(rows, key=lambda row: row.start, reverse=True):
        if row.previous in ages:
            ages[row.previous] = min(ages[row.previous], ages[row.id])
    return ages


def _uses(rows: Sequence[Row], reuses: Mapping[int, int]) -> dict[int, int]:
    heirs: dict[int | None, tuple[float, int]] = {}
    for row in rows:
        if row.kind != CHECKPOINT:
            heirs[row.parent] = max(heirs.get(row.parent, (0.0, 0)), (row.used, row.id))
    uses: dict[int, int] = {}
    for row in sorted(rows, key=lambda row: (row.start, row.kind == CHECKPOINT, row.id)):
        uses[row.id] = reuses.get(row.id, 0)
        heir = row.kind == CHECKPOINT or heirs.get(row.parent, (0.0, 0))[1] == row.id
        if row.parent in uses and heir:
            uses[row.id] = max(uses[row.id], uses[row.parent])
    return uses


def last_uses(rows: Sequence[Row]) -> dict[int, float]:
    """Return the time of the last use of each file, by id, in seconds since 1970.

    A checkpoint counts as used whenever a later one on its path was. A use of a path is not noted
    at all of its checkpoints, and a new conversation can start only from the first of them, which
    must therefore stay longest.
    """
    used = {row.id: row.used for row in rows}
    for row in sorted(rows, key=lambda row: row.start, reverse=True):
        if row.previous in used:
            used[row.previous] = max(used[row.previous], used[row.id])
    return used


# -- an index in memory ----------------------------------------------------------------------------


@contextmanager
def indexed(rows: Sequence[Row]) -> Iterator[sqlite3.Connection]:
    """Yield a connection to an index of these rows, which keep their ids and links."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("PRAGMA foreign_keys=ON")
    connection.executescript(index.SCHEMA)
    for row in rows:
        put_row(connection, row)
    try:
        yield connection
    finally:
        connection.close()


def put_row(connection: sqlite3.Connection, row: Row) -> None:
    """Insert a row with its id; its digests are made of the id."""
    digest = row.id.to_bytes(16, "big")
    named = replace(row, digest=digest, base=digest, key=digest)
    values = [getattr(named, name) for name in index.COLUMNS.split(", ")]
    connection.execute(f"INSERT INTO file VALUES ({', '.join('?' * len(values))})", values)


class Files:
    """A store's index in memory, changed at random by everything that a store does to it."""

    def __init__(self, connection: sqlite3.Connection, seed: int):
        self.connection = connection
        self.random = random.Random(seed)
        self.id = 0
        self.time = 1000.0

    def change(self) -> None:
        does = [self.add_run] * 4 + [self.add_checkpoint] * 4 + [self.touch] * 3 + [self.reuse] * 3
        does += [self.pin, self.unpin, self.finish, self.remove, self.remove_subtree, self.resize]
        self.random.choice(does)()

    def add_run(self) -> None:
        before = self.pick("kind = 'run'") if self.random.random() < 0.85 else None
        start = 0 if before is None else before.start + self.random.randint(1, 3)
        self._put(RUN, start, start + self.random.randint(1, 5), before, None)

    def add_checkpoint(self) -> None:
        run = self.pick("kind = 'run'")
        previous = self.pick("kind = 'checkpoint'") if self.random.random() < 0.8 else None
        start = 1 if run is None else run.start + 1
        if previous is not None:
            start = max(start, previous.start + 1)
        self._put(CHECKPOINT, start, start, run, previous)

    def touch(self) -> None:
        rows = self._rows("1")
        some = self.random.sample(rows, min(len(rows), 3))
        index.touch(self.connection, [(self._now(), row.id) for row in some])

    def reuse(self) -> None:
        row, ids = self.pick("1"), []
        while row is not None:
            ids.append(row.id)
            row = index.one(self.connection, "id = ?", row.parent)
        for _ in range(self.random.choice((1, 1, 4))):
            index.count_reuses(self.connection, ids)

    def pin(self) -> None:
        if row := self.pick("1"):
            values = (self.random.choice("ab"), row.id)
            self.connection.execute("INSERT OR IGNORE INTO pin VALUES (?, ?)", values)

    def unpin(self) -> None:
        self.connection.execute("DELETE FROM pin WHERE name = ?", (self.random.choice("ab"),))

    def finish(self) -> None:
        if row := self.pick("owner IS NOT NULL"):
            query = "UPDATE file SET owner = NULL, disk = ?, used = ? WHERE id = ?"
            self.connection.execute(query, (DISK, self._now(), row.id))

    def resize(self) -> None:
        if row := self.pick("1"):
            query = "UPDATE file SET disk = ? WHERE id = ?"
            self.connection.execute(query, (self.random.randint(1, 99), row.id))

    def remove(self) -> None:
        for row in files_to_evict(self.connection, self.random.choice((1, 25))) or ():
            index.delete(self.connection, row)

    def remove_subtree(self) -> None:
        if self.random.random() < 0.3 and (row := self.pick("1")):
            for gone in index.subtree(self.connection, row.id):
                index.delete(self.connection, gone)

    def pick(self, where: str) -> Row | None:
        rows = self._rows(where)
        return self.random.choice(rows) if rows else None

    def _rows(self, where: str) -> list[Row]:
        return index.rows(self.connection, where)

    def _now(self) -> float:
        self.time += self.random.choice((0.0, 0.0, 1.0, 100.0))
        return self.time

    def _put(
        self, kind: str, start: int, stop: int, parent: Row | None, previous: Row | None
    ) -> None:
        self.id += 1
        links = (parent.id if parent else None, previous.id if previous else None)
        owner = "x" if self.random.random() < 0.1 else None
        sizes = (1, DISK, self._now())
        put_row(
            self.connection, Row(self.id, kind, b"", b"", b"", start, stop, *sizes, *links, owner)
        )


@pytest.fixture(params=range(12))
def files(request) -> Iterator[Files]:
    with indexed([]) as connection:
        yield Files(connection, request.param)


def counted(connection: sqlite3.Connection) -> dict[str, Totals]:
    pinned = index.pinned(connection)
    found = {RUN: Totals(), CHECKPOINT: Totals()}
    for row in index.rows(connection):
        durable = row.owner is None
        sums = (1, int(durable), row.disk, row.disk * durable, row.disk * (row.id in pinned))
        both = zip(astuple(found[row.kind]), (*sums, row.stop - row.start), strict=True)
        found[row.kind] = Totals(*map(sum, both))
    return found


def share_order(connection: sqlite3.Connection) -> list[tuple[object, ...]]:
    """The places in order in which checkpoints leave their share, from all files at once."""
    rows = index.rows(connection, "kind = 'checkpoint' AND owner IS NULL")
    used = last_uses(index.rows(connection))
    followed = {row.previous for row in rows}
    pinned = index.pinned(connection)
    return sorted(
        (
            row.id in pinned,
            used[row.id],
            2 if row.previous is None else int(row.id not in followed),
            -row.start,
        )
        for row in rows
    )


def test_the_order_is_that_of_all_files_at_once(files):
    for _ in range(40):
        for _ in range(files.random.randint(1, 8)):
            files.change()
        rows = index.rows(files.connection)
        rules = (
            index.pinned(files.connection),
            dict(files.connection.execute("SELECT file, count FROM found")),
        )
        need = files.random.choice((1, 60, 10**6))
        wanted = evicted_by_definition(rows, need, *rules, partly=True)
        assert files_to_evict(files.connection, need, partly=True) == wanted


def test_ranks_that_cannot_be_brought_up_to_date_name_no_file_that_is_needed(files):
    for _ in range(15):
        for _ in range(8):
            files.change()
        wanted = files_to_evict(files.connection, 60)
        assert ranked_files(files.connection, 60) == wanted
        for _ in range(4):
            files.add_run()
            files.touch()
        gone: set[int] = set()
        for row in ranked_files(files.connection, 60) or []:
            continued = {one.id for one in index.rows(files.connection, "parent = ?", row.id)}
            assert row.owner is None
            assert continued <= gone
            gone.add(row.id)


def test_checkpoints_leave_their_share_in_the_order_of_all_at_once(files):
    for _ in range(15):
        for _ in range(8):
            files.change()
        chosen = checkpoints_over_share(files.connection, 10**9, 1)
        wanted = share_order(files.connection)
        pinned = index.pinned(files.connection)
        used = last_uses(index.rows(files.connection))
        assert [(row.id in pinned, used[row.id]) for row in chosen] == [one[:2] for one in wanted]
        assert [-row.start for row in chosen] == [one[3] for one in wanted]


def test_totals_are_those_of_a_count(files):
    for _ in range(60):
        for _ in range(4):
            files.change()
        assert {kind: read_totals(files.connection, kind) for kind in KINDS} == counted(
            files.connection
        )


def save(store: Store, seed: int) -> None:
    ids = tokens(400, seed)
    for start, stop in ((0, 192), (192, 320), (320, 400)):
        put(store, ids[:stop], start)
        store.write_checkpoint(ids[:stop], snapshot(ids[:stop]))


def test_no_query_reads_all_files(folder):
    seen: set[str] = set()
    with opened(folder) as store:
        save(store, 0)
        with store.database.read() as connection:
            connection.set_trace_callback(seen.add)
        save(store, 1)
        ids = tokens(400, 1)
        store.reused(store.find(ids), 400)
        store.note_uses()
        store.pin("a", [ids])
        store.stats()
        with store.database.write() as connection:
            checkpoints_over_share(connection, 10**9, 1)
            assert len(store.context.space.shrink(connection, 0)) > 1
            connection.set_trace_callback(None)
            plans = {
                str(step)
                for query in seen
                if query.startswith(("SELECT", "WITH", "UPDATE", "DELETE", "\nSELECT", "\nWITH"))
                for *_, step in connection.execute(f"EXPLAIN QUERY PLAN {query}")
            }
    assert len(seen) > 30
    assert not {step for step in plans if step.startswith("SCAN") and _is_of_files(step)}


def _is_of_files(step: str) -> bool:
    """Return whether a step of a query plan reads all of a table that grows with the files.

    A partial index has only the rows that its condition selects, and is read in its order.
    """
    table = step.split()[1]
    return table in ("file", "f", "rank", "tokens", "found", "pin") and "rank_" not in step
