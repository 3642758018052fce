"""Figures of an engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxcache.bench.checks import Check, Measured
from mlxcache.bench.inside import running_inside
from mlxcache.bench.prove.context import FULL, QUICK
from mlxcache.bench.prove.report import Findings
from mlxcache.bench.prove.within import DISK, disk, peak_memory, split_at
from mlxcache.model import kv
from mlxcache.model.load import Loaded
from tests.toys.toy import make_toy


def test_a_pause_is_found_beside_the_token_at_which_growth_was_seen() -> None:
    """Steps are pipelined; what lies farther off is an interval like any other."""
    assert split_at([1, 2, 9, 3, 4], [3]) == ([9], [1, 2])
    assert split_at([7, 1, 1], [0]) == ([7], [1])
    assert split_at([1, 5], [1]) == ([5], [])


class Holding:
    """A model of which somebody reads the KV of the first layer during each step."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, tokens: mx.array, *, cache: Any, **inputs: Any) -> Any:
        offset = cache[0].offset
        held = [array[..., :offset, :] for array in kv.arrays_of(cache[0])] if offset else []
        mx.eval(held)
        logits = self.model(tokens, cache=cache, **inputs)
        mx.eval(logits, kv.arrays_of(cache[0]))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_a_decode_that_copies_its_kv_is_told(tmp_path: Path) -> None:
    """A slice that is held during a step makes MLX copy the buffer."""
    model = make_toy(tmp_path / "model", hidden=64, layers=2, heads=8, kv_heads=8, head_dim=64)
    scale = replace(QUICK, deep=3_000)

    def held(loaded: Loaded) -> Loaded:
        return replace(loaded, model=Holding(loaded.model))

    async def note(name: str, prepare: Callable[[Loaded], Loaded]) -> str:
        found = Findings("peak_memory", "m")
        async with running_inside(model, tmp_path / name, "auto", prepare) as inside:
            await peak_memory(inside, scale, found)
        return found.notes[0].partition(": ")[2]

    assert asyncio.run(note("plain", lambda loaded: loaded)) == "no copy of the KV."
    assert asyncio.run(note("held", held)).endswith("times the KV of one layer: a copy.")


def test_disk_figures_have_units_and_bounds_only_where_they_show_something() -> None:
    """What was not dropped from the page cache says nothing about the disk."""
    figures = {
        "bytes": 2e9, "plain_bytes_s": 1e9, "plain_s": [2.0, 3.0], "ratio": 0.8, "store": [1.0],
        "page_cache": "dropped by x",
    }  # fmt: skip
    found = Findings("restore_speed", "m")
    disk("restore_speed", Measured(figures, [Check("r", 0.8, 0.7, least=True)]), FULL, found)
    row = found.tables[DISK]["restore_speed"]
    assert {name: figure.unit for name, figure in row.items()} == {
        "size": "bytes", "plain": "bytes/s", "plain, time": "s", "ratio": "",
    }  # fmt: skip
    assert row["plain, time"].samples == [2.0, 3.0]
    assert (found.notes, len(found.checks)) == (["page cache dropped by x"], 1)
    for scale, checks in ((FULL, []), (QUICK, [Check("r", 0.8, 0.7, least=True)])):
        found = Findings("restore_speed", "m")
        disk("restore_speed", Measured(figures, checks), scale, found)
        assert found.checks == []
        assert len(found.unchecked) == 1
