"""Fixtures: a folder, an open store in it, and a disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcache.store.database import TemporaryDatabase
from mlxcache.store.sessions import Sessions
from mlxcache.store.store import Store
from tests.small_disk import small_disk
from tests.store.content import opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with opened(folder) as opened_store:
        yield opened_store


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A separate file system of 8 MB."""
    with small_disk(tmp_path / "disk", 8) as place:
        yield place


@pytest.fixture
def sessions() -> Sessions:
    return Sessions(TemporaryDatabase())
