"""Durability and read-ahead of the store, with the calls of macOS."""

from __future__ import annotations

import errno

import pytest

from mlxcache.store import index
from mlxcache.store.database import Database
from tests.mac_disk import MacDisk
from tests.store.content import opened, put, tokens


def test_a_run_is_on_the_disk_before_the_index_names_it(folder, monkeypatch):
    """The file with its content, then its name: each leaves the drive's cache."""
    with opened(folder) as store:
        mac = MacDisk(monkeypatch)
        put_tokens = index.put_tokens

        def note(*call):
            mac.steps.append("row")
            put_tokens(*call)

        monkeypatch.setattr(index, "put_tokens", note)
        put(store, tokens(100))
    assert mac.steps[-4:] == ["F_FULLFSYNC file", "rename", "F_FULLFSYNC folder", "row"]


def test_a_share_without_full_sync_is_written(folder, monkeypatch):
    mac = MacDisk(monkeypatch)
    mac.refuses = errno.ENOTSUP
    ids = tokens(200)
    with opened(folder) as store:
        put(store, ids)
        assert store.find(ids).length == 200
    assert {"fsync file", "fsync folder"} <= set(mac.steps)


@pytest.mark.parametrize("pragma", ["fullfsync", "checkpoint_fullfsync"])
def test_the_index_empties_the_drives_cache(folder, pragma):
    """Set on each connection; SQLite uses F_FULLFSYNC on macOS only."""
    folder.mkdir()
    database = Database.open(folder)
    with database.read() as first, database.read() as second:
        for connection in (first, second):
            assert connection.execute(f"PRAGMA {pragma}").fetchone() == (1,)
    database.close()


def test_a_file_on_a_mac_is_read_ahead_once(folder, monkeypatch):
    ids = tokens(3000)
    with opened(folder) as store:
        put(store, ids)
        (piece,) = store.find(ids).pieces
        mac = MacDisk(monkeypatch)
        store.read_ahead(piece)
        store.verify(piece, ids)
    assert mac.advised == [(0, piece.nbytes)]
