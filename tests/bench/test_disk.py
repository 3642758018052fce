"""Measurements of the disk tier with an engine in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from mlxcache.bench import prove_engine as disk
from mlxcache.bench.context import Scale
from mlxcache.bench.findings import Findings, NotApplicable
from mlxcache.bench.prove_engine import (
    BY_MSYNC,
    DISK,
    Scenario,
    drop,
    restore_speed,
    write_behind,
)
from tests.proofs.models import light, recurrent

TOTAL = 12_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 KB of KV per token."""
    return light(tmp_path_factory.mktemp("light") / "model")


def test_on_a_mac_files_are_invalidated_and_unchanged(tmp_path, monkeypatch):
    """Also an empty one, which cannot be mapped."""
    files = [tmp_path / "a", tmp_path / "empty"]
    files[0].write_bytes(b"x" * 100_000)
    files[1].touch()
    monkeypatch.setattr(disk, "EVERYTHING", tmp_path / "absent" / "drop_caches")
    monkeypatch.setattr("sys.platform", "darwin")
    assert drop(files) == BY_MSYNC
    assert files[0].read_bytes() == b"x" * 100_000


def play(scenario: Scenario, model: Path, folder: Path, runs: int) -> Findings:
    found = Findings(scenario.__name__, "m")
    asyncio.run(scenario(model, folder, Scale(runs=runs, disk_bytes=TOTAL), found))
    return found


def test_restoring_is_timed_beside_reading(model: Path, tmp_path: Path) -> None:
    """Each time all of it comes from disk, and both took time; the bound is on their ratio."""
    found = play(restore_speed, model, tmp_path, 2)
    row = found.tables[DISK]["restore_speed"]
    assert row["size"].median > TOTAL
    times = row["plain, time"].samples + row["restored, time"].samples
    assert len(times) == 4
    assert min(times) > 0
    measured = [one.measured for one in found.checks] + [one.measured for one in found.unchecked]
    assert measured == [row["ratio"].median]
    assert measured > [0]


@pytest.mark.slow
def test_restoring_that_skips_a_file_is_an_error(model, tmp_path, monkeypatch):
    """Else less would be read, and that sooner."""
    dropped = disk.drop

    def damaging(files: list[Path]) -> str | None:
        with files[-1].open("r+b") as file:
            file.seek(-20, 2)
            file.write(b"wrong")
        return dropped(files)

    monkeypatch.setattr(disk, "drop", damaging)
    with pytest.raises(ValueError, match="on disk were restored"):
        play(restore_speed, model, tmp_path, 1)


@pytest.mark.slow
def test_a_reply_is_timed_beside_both_writers(model: Path, tmp_path: Path) -> None:
    """As many bytes each, in files of the same sizes, and nothing of the plain ones is left."""
    found = play(write_behind, model, tmp_path, 2)
    row = found.tables[DISK]["write_behind"]
    assert row["size"].median > TOTAL
    paces = row["beside store"].samples + row["beside plain"].samples
    assert len(paces) == 4
    assert min(paces) >= 0
    assert row["alone"].median > 0
    assert [check.least for check in found.checks] == [True]
    assert list((tmp_path / "plain").iterdir()) == []


def test_a_model_whose_kv_is_not_all_is_refused(tmp_path: Path) -> None:
    """Random KV without the states between would restore to nothing."""
    model = recurrent(tmp_path / "model")
    with pytest.raises(NotApplicable, match="more than KV"):
        play(restore_speed, model, tmp_path / "cache", 1)
