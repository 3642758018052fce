"""Measurements of the disk tier with an engine in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcache.bench import disk
from mlxcache.bench.disk import (
    BY_MSYNC,
    CACHED_BYTES_S,
    drop,
    read,
    restore_figures,
    restore_speed,
    write_beside,
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
    import os

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
    """Where the pages were to be dropped by msync, and were not."""
    nbytes = int(2 * CACHED_BYTES_S)
    assert restore_figures(nbytes, 1, [1.0], [2.0], BY_MSYNC).checks == []
    (check,) = restore_figures(nbytes, 1, [4.0], [5.0], BY_MSYNC).checks
    assert (check.measured, check.ok) == (0.8, True)


def test_restoring_is_timed_beside_reading(model: Path, tmp_path: Path) -> None:
    """Each time all of it comes from disk, and both took time; the bound is on their ratio."""
    held = restore_speed(model, tmp_path, 2, lambda _: None, TOTAL)
    figures = held.figures
    assert figures["bytes"] > TOTAL
    assert len(figures["plain_s"]) == len(figures["restored_s"]) == 2
    assert min(figures["plain_s"] + figures["restored_s"]) > 0
    assert figures["page_cache"].startswith(("dropped by", "not dropped"))
    for check in held.checks:
        assert check.measured == figures["ratio"] > 0


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
        restore_speed(model, tmp_path, 1, lambda _: None, TOTAL)


@pytest.mark.slow
def test_a_reply_is_timed_beside_both_writers(model: Path, tmp_path: Path) -> None:
    """As many bytes each, in files of the same sizes, and nothing of the plain ones is left."""
    held = write_beside(model, tmp_path, 2, lambda _: None, TOTAL)
    figures = held.figures
    assert figures["bytes"] > TOTAL
    assert len(figures["store"]) == len(figures["plain"]) == 2
    assert min(figures["store"] + figures["plain"]) >= 0
    assert figures["alone_tokens_s"] > 0
    assert [check.least for check in held.checks] == [True]
    assert list((tmp_path / "plain").iterdir()) == []


def test_a_model_whose_kv_is_not_all_is_refused(tmp_path: Path) -> None:
    """Random KV without the states between would restore to nothing."""
    model = recurrent(tmp_path / "model")
    with pytest.raises(ValueError, match="more than KV"):
        restore_speed(model, tmp_path / "cache", 1, lambda _: None, TOTAL)
