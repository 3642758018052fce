"""The figures of several models as those of one server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlxcache.engine.figures import Disk, Figures, Memory, NoDisk, Ram, TokenCounts, add_up

OPEN = Disk(70, 100, 40, 4, 1, 0, {}, 3, "ok", None)
NONE = NoDisk(reason="its folder cannot be opened")
MEMORY = Memory(1, 9, 8, {})


def figures(disk: Disk | NoDisk) -> Figures:
    ram, tokens = Ram(used_bytes=5, limit_bytes=6), TokenCounts(cached=10)
    return Figures(ram=ram, sessions=3, segments=2, tokens=tokens, disk=disk)


@pytest.mark.parametrize("disks", [(OPEN, NONE), (NONE, OPEN)])
def test_a_model_without_a_disk_tier_hides_that_of_no_other(disks: tuple[Disk | NoDisk, ...]):
    """The folder of one model could not be opened."""
    found = add_up([figures(one) for one in disks], MEMORY, {})
    assert found.disk == replace(OPEN, written_per_cached_token=2.0)


def test_what_each_model_has_is_added_and_what_they_share_is_not():
    stopped = replace(OPEN, state="suspended", reason="the disk is full")
    found = add_up([figures(OPEN), figures(stopped)], MEMORY, {"withheld": 2})
    assert found.disk == replace(
        stopped, written_bytes=80, written_tokens=8, evicted_files=2, written_per_cached_token=4.0
    )
    assert found.ram == Ram(10, 9, 8, 2, kinds={"withheld": 2})
    assert (found.segments, found.sessions, found.tokens.cached) == (4, 3, 20)
    assert add_up([figures(NONE)] * 2, MEMORY, {}).disk == NONE
