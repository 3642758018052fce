"""The scenario of injected device errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mlxcache.bench import equality as module
from mlxcache.bench.context import QUICK
from mlxcache.bench.device_faults import FailingDevice
from mlxcache.bench.equality import ERRORS_TITLE, Unequal, device_error
from mlxcache.bench.findings import Findings, Rows
from mlxcache.bench.random_model import make_random


def play(tmp_path: Path, runs: int = 2) -> Rows:
    model, found = make_random(tmp_path / "model", "tiny"), Findings("device_error", "")
    scale = replace(QUICK, runs=runs)
    asyncio.run(device_error(model, tmp_path / "cache", scale, found))
    return found.tables[ERRORS_TITLE]


def test_every_reply_is_right_or_ends_in_an_error(tmp_path: Path) -> None:
    """Eight evaluations fail, one in each request; then the conversation goes on."""
    (row,) = play(tmp_path).values()
    assert row["errors"].median >= 7
    assert row["wrong replies"].median == 0
    assert row["right replies"].median + row["replies that ended in an error"].median == 16
    assert row["right replies"].median >= 8


def test_an_engine_that_trusts_the_device_is_told(tmp_path, monkeypatch):
    """Here the error is never raised, so that wrong numbers are taken for right ones."""
    monkeypatch.setattr(FailingDevice, "_raise_parked", lambda *_, **__: None)
    with pytest.raises(Unequal, match=r"evaluation \d+ fails: \d\.\d+ apart"):
        play(tmp_path)


def test_without_a_failure_nothing_is_shown(tmp_path, monkeypatch):
    """A run in which nothing failed must not look like a proof."""
    monkeypatch.setattr(module, "spread", lambda *_: [10_000])
    with pytest.raises(ValueError, match="no evaluation failed"):
        play(tmp_path)
