"""Checkpoints on disk: the newest one is written once its conversation rests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mlxcache.cache import path_write, write_behind
from mlxcache.cache.disk import DiskTier
from mlxcache.tree.thinning import NEWEST
from tests.scheduled import Bench, admitted

HEAD, NEW, TURNS = 300, 4, 5
FIRST = 2
"""Checkpoints that a first turn writes at once: the first and the newest one."""


def checkpoints(disk: DiskTier) -> int:
    return len([*(disk.store.folder / "checkpoints").rglob("*.safetensors")])


def until(bench: Bench, disk: DiskTier, met: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline
        bench.scheduler.kv.pump(decoding=False)
        time.sleep(0.01)


def talk(bench: Bench, disk: DiskTier, rng: np.random.Generator, turns: int) -> list[int]:
    """A conversation, whose runs are on disk after each turn; the tokens of all of it."""
    ids = rng.integers(10, 400, HEAD).tolist()
    for _ in range(turns):
        task = bench.ask(ids, tokens=2)
        until(bench, disk, lambda: not disk.write_behind.busy)
        ids = [*ids, *task.out, *rng.integers(10, 400, NEW).tolist()]
    return ids


@pytest.fixture
def recurrent(toy_paths: dict[str, Path]) -> Bench:
    return Bench(toy_paths["qwen3_5"])


def test_a_conversation_that_goes_on_writes_few_checkpoints(
    recurrent: Bench, rng: np.random.Generator, tmp_path: Path
) -> None:
    """The newest is written before the process ends, and the next turn continues from it."""
    disk = recurrent.open_disk(tmp_path, pending=1 << 22)
    ids = talk(recurrent, disk, rng, TURNS)
    assert checkpoints(disk) == FIRST
    assert disk.write_behind.drain(20.0) == 0
    assert FIRST < checkpoints(disk) <= FIRST + NEWEST
    recurrent.kv.close(5.0)
    disk = recurrent.open_disk(tmp_path, pending=1 << 22)
    task = recurrent.ask(ids, tokens=2)
    assert admitted(task).cached_tokens >= len(ids) - NEW - 1
    recurrent.kv.close(5.0)


def test_the_newest_checkpoint_is_written_once_the_conversation_rests(
    recurrent: Bench, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or at once, where many tokens would have to be computed again without it."""
    disk = recurrent.open_disk(tmp_path, pending=1 << 22)
    monkeypatch.setattr(write_behind, "REST_S", 0.2)
    talk(recurrent, disk, rng, 2)
    until(recurrent, disk, lambda: not disk.write_behind.pending_paths)
    assert FIRST < checkpoints(disk) <= FIRST + NEWEST
    before = checkpoints(disk)
    monkeypatch.setattr(write_behind, "REST_S", 3600.0)
    monkeypatch.setattr(path_write, "UNWRITTEN", NEW)
    talk(recurrent, disk, rng, 2)
    assert not disk.write_behind.pending_paths
    assert checkpoints(disk) == 2 * before
    recurrent.kv.close(5.0)


def test_what_rests_is_written_where_memory_is_short(
    recurrent: Bench, rng: np.random.Generator, tmp_path: Path
) -> None:
    disk = recurrent.open_disk(tmp_path, pending=1 << 22)
    talk(recurrent, disk, rng, 2)
    assert disk.write_behind.pending_paths == 1
    assert disk.write_behind.wait_for_one()
    assert disk.write_behind.pending_paths == 0
    recurrent.kv.close(5.0)
