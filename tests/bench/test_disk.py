"""Measurements of the disk tier with an engine in this process."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from mlxcache.bench import prove_engine as disk
from mlxcache.bench.context import Scale
from mlxcache.bench.findings import Findings, NotApplicable
from mlxcache.bench.prove_engine import (
    BY_MSYNC,
    CACHED_BYTES_S,
    DISK,
    Scenario,
    drop,
    note_restored,
    read,
    restore_speed,
    write_behind,
)
from tests.proofs.models import light, recurrent

TOTAL = 12_000_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """2 KB of KV per token."""
    return light(tmp_path_factory.mktemp("light") / "model")


def test_a_file_is_forgotten_and_read_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where not all may be dropped, each file is; where neither can be done, that is told."""
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(b"x" * 9_000_000)
    assert read(files) == 18_000_000
    monkeypatch.setattr(disk, "EVERYTHING", tmp_path / "absent" / "drop_caches")
    if hasattr(os, "posix_fadvise"):
        assert drop(files) == "posix_fadvise"
        monkeypatch.delattr(os, "posix_fadvise")
    assert drop(files) is None


def test_on_a_mac_files_are_invalidated_and_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also an empty one, which cannot be mapped."""
    files = [tmp_path / "a", tmp_path / "empty"]
    files[0].write_bytes(b"x" * 100_000)
    files[1].touch()
    monkeypatch.setattr(disk, "EVERYTHING", tmp_path / "absent" / "drop_caches")
    monkeypatch.setattr("sys.platform", "darwin")
    assert drop(files) == BY_MSYNC
    assert files[0].read_bytes() == b"x" * 100_000


def test_a_speed_of_the_page_cache_is_no_bound_on_the_disk() -> None:
    """Where the pages were to be dropped by msync, and were not; nor is that of a quick run."""

    def noted(plain: float, how: str | None, *, quick: bool = False) -> Findings:
        found = Findings("restore_speed", "m")
        nbytes = int(2 * CACHED_BYTES_S)
        note_restored(found, [nbytes], [(plain, 1.25 * plain)], how, quick=quick)
        return found

    assert len(noted(1.0, BY_MSYNC).unchecked) == len(noted(4.0, "x", quick=True).unchecked) == 1
    found = noted(4.0, BY_MSYNC)
    (check,) = found.checks
    assert (check.measured, check.ok) == (0.8, True)
    assert found.notes == ["page cache dropped by msync"]
    units = {name: figure.unit for name, figure in found.tables[DISK]["restore_speed"].items()}
    assert units == {
        "size": "bytes", "files": "", "plain": "bytes/s", "restored": "bytes/s", "ratio": "",
        "plain, time": "s", "restored, time": "s",
    }  # fmt: skip


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
def test_restoring_that_skips_a_file_is_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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
