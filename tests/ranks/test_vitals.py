"""Rank 0 knows the state of the other ranks' machines, and the one that is worst off decides."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mlxcache.config.memory import NO_PRESSURE, MemoryPressure, PressureLevel
from mlxcache.ranks import operations as op
from mlxcache.ranks.group import Place, Watch
from mlxcache.ranks.rank_zero import RankZero
from mlxcache.ranks.setup import VitalsReader
from mlxcache.store.store import Store
from tests.ranks.test_group import Asked


def test_a_rank_reads_the_state_of_its_own_machine(tmp_path: Path):
    """Its memory, and its disk if it has one."""
    pressed = MemoryPressure(PressureLevel.WARNING, "tasks wait for memory")
    store = Store.open(tmp_path, "n", 10**9)
    found = VitalsReader(lambda: store, lambda: pressed, lambda: 123).read()
    assert (found.pressure, found.why, found.footprint_bytes) == (1, pressed.why, 123)
    assert found.disk_used_bytes == store.stats().used_bytes
    assert found.disk_limit_bytes == 10**9
    store.close()
    assert VitalsReader(lambda: store, lambda: pressed, lambda: 123).read().disk_used_bytes is None
    assert VitalsReader(lambda: None, lambda: pressed).read().footprint_bytes > 10**6


def fail(why: str) -> None:
    raise AssertionError(why)


def test_the_worst_pressure_of_all_ranks_counts(monkeypatch: pytest.MonkeyPatch):
    """With the rank at which it is."""
    vitals = op.Vitals(2, "no memory is left", 5, 6, 7)
    calm, pressed = op.Answer(), op.Answer(1.0, vitals=vitals)
    watch = Watch(Asked([calm, *[pressed] * 1000]), lambda: 0.0, fail, every_s=0.01)
    deadline = time.monotonic() + 5
    while watch.worst_pressure().level is PressureLevel.NORMAL and time.monotonic() < deadline:
        time.sleep(0.01)
    assert watch.worst_pressure().level is PressureLevel.CRITICAL
    assert watch.worst_pressure().why == "rank 1: no memory is left"
    (figures,) = watch.figures()
    assert figures["pressure"] == "critical"
    assert (figures["footprint_bytes"], figures["disk_used_bytes"]) == (5, 6)
    monkeypatch.setattr("mlxcache.ranks.rank_zero.read_pressure", lambda: NO_PRESSURE)
    assert RankZero(Place(0, "127.0.0.1"), lambda: 0.0, fail).read_pressure() is NO_PRESSURE
    watch.close()
