"""The index of the store at a million files: how long a start, a lookup and an eviction take.

`python -m tests.proofs.index_scale` writes an index of synthetic runs and checkpoints that have no
ranks yet, with empty files of the right sizes, and prints medians. It ends with status 1 if a bound
is missed.
"""

from __future__ import annotations

import os
import sqlite3
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Annotated

import numpy as np
import typer

from mlxcache.store import index
from mlxcache.store.database import Database
from mlxcache.store.digests import BLOCK, block_digests, root_digest
from mlxcache.store.eviction import MARGIN, Space
from mlxcache.store.folder import CHECKPOINT, RUN, Folder, blocks
from mlxcache.store.store import Store
from mlxcache.types import NO_TOKENS, Tokens, join_ids, token_ids
from tests.store.content import kv

NAMESPACE = "index-scale"
LIMIT = 10**15
HEAD_RUNS, HEAD_SHARE = 8, 200
"""Runs of a system prompt, and the number of conversations that share one."""

TURNS, FORK_SHARE, CHECKPOINT_SHARE = 40, 10, 4
"""Runs of a conversation; one in so many conversations forks; one run in so many has a checkpoint.
"""

RUN_TOKENS, RUN_BYTES, CHECKPOINT_BYTES = 2 * BLOCK, 400_000, 900_000
DAY_S = 86_400.0
NOW = 1.79e9
BATCH = 20_000

BOUNDS = {"start_s": 10.0, "lookup_ms": 5.0, "figures_ms": 50.0, "evict_ms": 20.0, "evict_mb": 50.0}
"""Upper bounds of the figures: medians, and the most memory that one eviction adds."""

FileRow = tuple[object, ...]


class Rows:
    """Rows of conversations that share system prompts, fork, and are reused; ids count from 1."""

    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)
        self._id = 0
        self._head: list[tuple[int, bytes, Tokens]] = []
        self.prompts: list[Tokens] = []
        self.found: list[tuple[int, int]] = []
        self.tokens: list[tuple[int, bytes]] = []

    def files(self) -> Iterator[FileRow]:
        """Yield rows of `file` without end, conversation by conversation."""
        number = 0
        while True:
            used = NOW - float(self._random.exponential(10 * DAY_S))
            if number % HEAD_SHARE == 0:
                self._head = [(0, root_digest(NAMESPACE), NO_TOKENS)]
                yield from self._runs(self._head, HEAD_RUNS, NOW, HEAD_SHARE)
            path = list(self._head)
            yield from self._runs(path, TURNS, used, 0)
            if number % 97 == 0:
                self.prompts.append(join_ids(*(ids for _, _, ids in path)))
            if number % FORK_SHARE == 0:
                del path[HEAD_RUNS + TURNS // 2 :]
                yield from self._runs(path, TURNS // 2, used + 60, 0)
            number += 1

    def _runs(
        self, path: list[tuple[int, bytes, Tokens]], count: int, used: float, reuses: int
    ) -> Iterator[FileRow]:
        """Yield runs and checkpoints that continue `path`, and append the runs to it."""
        previous: int | None = None
        for turn in range(count):
            parent, base, _ = path[-1]
            start = (len(path) - 1) * RUN_TOKENS
            ids = token_ids(self._random.integers(0, 50_000, RUN_TOKENS, dtype=np.int32))
            key, digest = block_digests(base, ids)
            self._id += 1
            run = self._id
            places = (start, start + RUN_TOKENS, RUN_BYTES, RUN_BYTES)
            yield (run, RUN, digest, base, key, *places, used, parent or None, None, None)
            self.tokens.append((run, ids.tobytes()))
            if counted := max(reuses, count - turn - 1):
                self.found.append((run, counted))
            path.append((run, digest, ids))
            if turn % CHECKPOINT_SHARE == CHECKPOINT_SHARE - 1:
                self._id += 1
                stop = start + RUN_TOKENS
                sizes = (stop, stop, CHECKPOINT_BYTES, CHECKPOINT_BYTES)
                state = (self._id, CHECKPOINT, digest, digest, digest)
                yield (*state, *sizes, used, run, previous, None)
                previous = self._id


def fill(folder: Path, count: int) -> list[Tokens]:
    """Write an index of `count` files, and the files; return the prompts of some conversations."""
    place, made = Folder(folder), Rows(7)
    place.make()
    with closing(Database.open(folder)) as database:
        database.create(index.SCHEMA)
        files = made.files()
        for _ in range(0, count, BATCH):
            batch = list(islice(files, min(BATCH, count)))
            with database.write() as connection:
                _insert(connection, batch, made)
            for row in batch:
                _make_file(place, str(row[1]), row[2], int(str(row[7])))
        database.empty_log()
    return made.prompts


def _insert(connection: sqlite3.Connection, batch: list[FileRow], made: Rows) -> None:
    connection.executemany(f"INSERT INTO file VALUES ({', '.join('?' * 13)})", batch)
    connection.executemany("INSERT INTO tokens VALUES (?, ?)", made.tokens)
    connection.executemany("INSERT INTO found VALUES (?, ?)", made.found)
    made.tokens.clear()
    made.found.clear()


def _make_file(place: Folder, kind: str, digest: object, size: int) -> None:
    """Create a file of `size` bytes without content, which takes no space."""
    assert isinstance(digest, bytes)
    path = place.file(kind, digest)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    os.ftruncate(fd, size)
    os.close(fd)


def opened(folder: Path) -> tuple[Store, float]:
    began = time.perf_counter()
    store = Store.open(folder, NAMESPACE, LIMIT, free_floor=-LIMIT)
    return store, time.perf_counter() - began


def times_ms(call: Callable[[int], object], count: int) -> list[float]:
    found = []
    for number in range(count):
        began = time.perf_counter()
        call(number)
        found.append((time.perf_counter() - began) * 1e3)
    return found


def evict(store: Store, nbytes: int) -> int:
    folder = store.context.folder
    with store.database.write() as connection:
        kept = max(0, MARGIN - blocks(folder.reserve)) + folder.log_bytes()
        limit = store.context.space.used(connection) + kept - nbytes
        return len(Space(folder, limit, -LIMIT).make_room(connection, 0, has_row=False))


def peak_growth_mb(call: Callable[[], object]) -> float:
    """Return by how many MB a call raises the process's resident memory at most. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_mb("VmRSS")
    call()
    return _status_mb("VmHWM") - before


def _status_mb(name: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) / 1024
    raise ValueError(f"no {name} in /proc/self/status")


def measure(folder: Path, prompts: list[Tokens], show: Callable[[str, float], None]) -> None:
    store, seconds = opened(folder)
    show("first_start_s", seconds)
    store.close()
    store, seconds = opened(folder)
    show("start_s", seconds)
    random = np.random.default_rng(1)
    more = [token_ids(random.integers(0, 50_000, 150, dtype=np.int32)) for _ in range(300)]

    def continued(number: int) -> None:
        ids = prompts[number % len(prompts)]
        found = store.find(join_ids(ids, more[number]), touch=False)
        assert found.length >= len(ids)

    def begun(number: int) -> None:
        head = prompts[number % len(prompts)][: HEAD_RUNS * RUN_TOKENS]
        found = store.find(join_ids(head, more[number]), touch=False)
        assert found.length >= len(head)

    def save(number: int) -> None:
        ids = join_ids(prompts[number % len(prompts)], more[number][:100])
        begin = len(ids) - 100
        store.write_run(ids, begin, kv(ids, begin))

    show("lookup_ms", median(times_ms(continued, 300)))
    show("lookup_new_ms", median(times_ms(begun, 300)))
    show("figures_ms", median(times_ms(lambda _: store.stats(), 9)))
    show("save_ms", median(times_ms(save, 60)))
    show("evict_first_ms", times_ms(lambda _: evict(store, 1), 1)[0])
    show("evict_ms", median(times_ms(lambda _: evict(store, 1), 9)))
    show("evict_mb", peak_growth_mb(lambda: evict(store, 1)))
    hundred: list[int] = []
    show("evict_100_ms", times_ms(lambda _: hundred.append(evict(store, 4 * 10**7)), 1)[0])
    show("evict_100_files", hundred[0])
    began = time.perf_counter()
    store.close()
    show("close_s", time.perf_counter() - began)


def main(
    count: Annotated[int, typer.Option(help="Files in the index.")] = 1_000_000,
    folder: Annotated[Path | None, typer.Option(help="Default: a temporary folder.")] = None,
) -> None:
    """Write an index of COUNT files and print how long a store takes with it."""
    missed = []

    def show(name: str, figure: float) -> None:
        bound = BOUNDS.get(name)
        if bound is not None and figure >= bound:
            missed.append(name)
        print(f"{name:16} {figure:10.2f}" + (f"   (bound: {bound:g})" if bound else ""), flush=True)

    with tempfile.TemporaryDirectory(dir=folder) as made:
        place = Path(made) / "store"
        began = time.perf_counter()
        prompts = fill(place, count)
        show("files", len(os.listdir(place)) and count)
        show("fill_s", time.perf_counter() - began)
        show("index_mb", (place / "index.sqlite").stat().st_size / 1e6)
        measure(place, prompts, show)
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


if __name__ == "__main__":
    typer.run(main)
