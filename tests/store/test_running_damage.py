"""Damage of the index while a store is open."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from mlxcache.errors import StoreError
from tests.store.content import assert_right, opened, put, tokens, turns


@pytest.mark.parametrize("where", [slice(0, 4096), slice(4096, None)], ids=["head", "tables"])
def test_an_index_that_is_damaged_under_an_open_store_is_made_again_by_the_next(
    folder: Path, where: slice
) -> None:
    ids = tokens(1000)
    with opened(folder) as store:
        turns(store, ids, 300, 1000)
        store.database.empty_log(shrink=True)
        index = folder / "index.sqlite"
        data = bytearray(index.read_bytes())
        data[where] = bytes(len(data[where]))
        with index.open("r+b") as file:
            file.write(data)
        store.database.drop_pool()
        with pytest.raises(StoreError):
            put(store, tokens(500, 3))
        with contextlib.suppress(StoreError):
            assert store.find(ids).length in (0, 1000)
    with opened(folder) as store:
        assert assert_right(store, ids).length == 1000
        put(store, tokens(500, 3))
        assert store.check() == []
