"""A folder removed under an open store, and a disk that is full or gone."""

from __future__ import annotations

import shutil
import time

import pytest

from mlxcache.errors import DiskFull, StoreError, Vanished
from mlxcache.store.leaves import conversation_key_tokens
from mlxcache.store.sessions import Sessions, Turn
from tests.small_disk import mount
from tests.store.content import assert_right, opened, put, snapshot, tokens, turns


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxcache.store.recovery.MISSING_S", 0.0)


def test_nothing_is_made_while_a_folder_is_being_removed(folder, monkeypatch):
    """A removal in progress would find new files in it."""
    monkeypatch.setattr("mlxcache.store.recovery.MISSING_S", 0.2)
    with opened(folder) as store:
        put(store, tokens(300))
        shutil.rmtree(folder)
        with pytest.raises(Vanished, match="was removed"):
            store.find(tokens(300))
        assert not folder.exists()
        time.sleep(0.2)
        assert store.find(tokens(300)).length == 0
        assert folder.exists()


def test_a_removed_folder_is_made_again(folder):
    ids = tokens(1000)
    with opened(folder) as one, opened(folder) as two:
        sessions = Sessions(one.database)
        turns(one, ids, 300, 1000)
        shutil.rmtree(folder)
        assert one.find(ids).length == 0
        assert sessions.all() == []
        put(one, ids)
        one.write_checkpoint(ids, snapshot(ids))
        turn = Turn("model-a", "a", ids, 900, conversation_key_tokens((), 900), 0, 1.0, label="x")
        sessions.record_turn(turn)
        for store in (one, two):
            assert assert_right(store, ids).length == 1000
            assert store.check() == []
        assert len(Sessions(two.database).all()) == 1
    with opened(folder) as store:
        assert assert_right(store, ids).length == 1000


def test_a_folder_whose_disk_is_gone_is_not_made_elsewhere(folder, monkeypatch):
    ids = tokens(1000)
    with opened(folder) as store:
        put(store, ids[:640])
        folder.rename(folder.with_name("unplugged"))
        store.context.folder.device = -1
        for action in (lambda: put(store, ids), lambda: store.find(ids), store.stats, store.check):
            with pytest.raises(Vanished, match="is missing"):
                action()
        assert not folder.exists()
        folder.with_name("unplugged").rename(folder)
        assert assert_right(store, ids).length == 640
        put(store, ids)
        assert assert_right(store, ids).length == 1000


def test_folders_that_are_removed_one_by_one_are_made_again(folder):
    ids, others = tokens(1000), tokens(700, 1)
    with opened(folder) as store:
        put(store, ids)
        for path in (folder / "runs", folder / "quarantine"):
            shutil.rmtree(path)
        store.stats()
        put(store, others)
        assert assert_right(store, others).length == 700
        store.prune()
        assert store.check() == []
        put(store, ids)
        assert assert_right(store, ids).length == 1000


def test_a_file_system_that_is_full_refuses_and_recovers(disk):
    ids = tokens(20_000)
    with opened(disk / "store", free_floor=-(10**9)) as store:
        put(store, ids[:1280])
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(shutil.disk_usage(disk).free))
        with pytest.raises(DiskFull):
            put(store, ids, 1280, row=10)
        assert assert_right(store, ids).length == 1280
        ballast.unlink()
        assert store.check() == []
        put(store, ids[:6400], 1280)
        assert assert_right(store, ids).length == 6400


def test_a_file_system_that_is_read_only_is_read(disk):
    ids = tokens(2000)
    with opened(disk / "store") as store:
        put(store, ids[:1280])
    shutil.copytree(disk / "store", disk / "copy")
    with opened(disk / "copy") as store:
        store.database.drop_pool()  # what holds a file open keeps its disk from being remounted
        store.context.lock.release()
        mount(disk, "remount,ro")
        with pytest.raises(StoreError):
            put(store, ids)
        assert assert_right(store, ids).length == 1280
        mount(disk, "remount,rw")
        put(store, ids)
        assert assert_right(store, ids).length == 2000
