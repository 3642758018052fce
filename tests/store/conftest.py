"""Fixtures: a folder, and an open store in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxcache.store.store import Store
from tests.store.content import opened


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(folder: Path) -> Iterator[Store]:
    with opened(folder) as opened_store:
        yield opened_store
