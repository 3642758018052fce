"""A folder on a full disk, whose space commands free, and on one that cannot be written."""

from __future__ import annotations

import os
import shutil
from contextlib import closing
from pathlib import Path

import pytest

from mlxcache.cli.offline import Offline
from mlxcache.errors import StoreError
from mlxcache.store import recovery
from mlxcache.store.database import Unwritable, connect, list_session_names
from mlxcache.store.folder import RESERVE_BYTES, SMALL_BYTES, Folder
from mlxcache.store.leaves import conversation_key_tokens
from mlxcache.store.lock import servers, serving
from mlxcache.store.sessions import Sessions, Turn
from tests.small_disk import fill, mount
from tests.store.content import NAMESPACE, assert_right, opened, put, tokens

LIMIT = 4_000_000
NO_FLOOR = -1
ROW = 20
"""320 KB of KV in each session."""


def make_sessions(folder: Path, count: int = 3, limit: int = LIMIT) -> None:
    with opened(folder, limit, free_floor=NO_FLOOR) as made:
        sessions = Sessions(made.database)
        for seed in range(count):
            ids = tokens(2000, seed)
            put(made, ids, row=ROW)
            sessions.record_turn(_turn(ids, f"x{seed}"))


def _turn(ids, label: str) -> Turn:
    key = conversation_key_tokens((), 1900)
    return Turn(NAMESPACE, "a", ids, 1900, key, 0, 1.0, label=label, title=label)


def without_reserve(folder: Path) -> None:
    """Leave the folder as a command without a server does."""
    (folder / "reserve").unlink()


def with_a_log(folder: Path) -> None:
    """Leave the folder as a killed server does, with transactions in the log alone."""
    with opened(folder, LIMIT, free_floor=NO_FLOOR) as made:
        sessions = Sessions(made.database)
        sessions.record_turn(_turn(tokens(2000, 0), "x0"))
        names = ("index.sqlite", "index.sqlite-wal")
        held = {name: (folder / name).read_bytes() for name in names}
    for name, content in held.items():
        (folder / name).write_bytes(content)


def listed(folder: Path) -> dict[str, tuple[int, int]]:
    return {
        str(path.relative_to(folder)): (path.lstat().st_size, path.lstat().st_mtime_ns)
        for path in folder.rglob("*")
    }


def no_step(done: int, total: int) -> None:
    """Ignore progress."""


@pytest.mark.parametrize("left", [None, without_reserve, with_a_log])
def test_commands_free_the_space_of_a_full_disk(disk, left):
    """They are the way to get space back, so they need none: also in a folder without a reserve."""
    make_sessions(disk / "store")
    if left is not None:
        left(disk / "store")
    ballast, offline = fill(disk), Offline(disk)
    before = listed(disk / "store")
    found = {one["label"]: one["id"] for one in offline.sessions()}
    assert set(found) == {"x0", "x1", "x2"}
    assert offline.session(found["x0"])["durable_tokens"] == 2000
    assert offline.stats()["disk"]["files"] == 3
    assert offline.check(no_step) == []
    assert {id for id, _ in list_session_names(disk / "store")} == set(found.values())
    assert listed(disk / "store") == before, "reading writes nothing"
    offline.delete(found["x0"])
    assert {one["label"] for one in offline.sessions()} == {"x1", "x2"}
    assert os.statvfs(disk).f_bavail
    fill(disk)
    assert offline.prune(1, no_step)["freed_bytes"] > 0
    fill(disk)
    assert offline.clear(pinned=False)["sessions"] == 2
    assert offline.sessions() == []
    ballast.unlink()
    make_sessions(disk / "store")
    with opened(disk / "store", LIMIT, free_floor=NO_FLOOR) as made:
        assert made.check() == []
        assert assert_right(made, tokens(2000, 1), row=ROW).length == 2000
    assert (disk / "store" / "reserve").stat().st_size == SMALL_BYTES


def test_an_open_store_frees_the_space_of_a_full_disk(disk):
    make_sessions(disk / "store", 0)
    with opened(disk / "store", LIMIT, free_floor=NO_FLOOR) as made:
        sessions = Sessions(made.database)
        ids = [sessions.record_turn(_turn(tokens(2000, seed), f"x{seed}")) for seed in range(9)]
        made.database.empty_log(shrink=True)
        fill(disk)
        with pytest.raises(StoreError, match="full"):
            sessions.record_turn(_turn(tokens(2000, 10), "new"))
        for id in ids:  # none of them has a file, so nothing but the reserve gives space
            made.delete_session(sessions, id)
        assert sessions.all() == []


def test_another_connection_reads_the_index_of_a_full_disk(disk):
    folder = disk / "store"
    make_sessions(folder)
    with opened(folder, LIMIT, free_floor=NO_FLOOR) as store, store.database.read() as connection:
        fill(disk)
        before = (folder / "index.sqlite-wal").stat().st_size
        with closing(connect(store.database.path)) as other:
            sql = "SELECT COUNT(*) FROM sessions"
            assert other.execute(sql).fetchone() == connection.execute(sql).fetchone()
        assert (folder / "index.sqlite-wal").stat().st_size == before


def test_the_reserve_is_given_up_on_a_full_disk_alone(folder, monkeypatch):
    make_sessions(folder, limit=1 << 30)
    reserve = folder / "reserve"
    assert reserve.stat().st_size == RESERVE_BYTES
    with opened(folder, 1 << 30) as made:
        with made.freeing():
            assert reserve.exists()
        monkeypatch.setattr(Folder, "free", lambda _: RESERVE_BYTES - 1)
        with made.freeing():
            assert not reserve.exists()
            with made.freeing():
                pass
            assert not reserve.exists()
        assert 0 < reserve.stat().st_size < RESERVE_BYTES
        monkeypatch.undo()
        with made.freeing():
            pass
        assert reserve.stat().st_size == RESERVE_BYTES


def test_a_full_disk_is_listed_without_a_byte(folder, monkeypatch):
    """Nothing is written, so other programs cannot take what the reserve gave."""
    make_sessions(folder)
    monkeypatch.setattr(Folder, "free", lambda _: 0)
    before = listed(folder)
    offline = Offline(folder.parent)
    found = offline.sessions()
    assert [one["tokens"] for one in found] == [2000] * 3
    assert offline.stats()["sessions"] == 3
    assert offline.check(no_step) == []
    assert listed(folder) == before
    offline.delete(found[0]["id"])
    assert len(offline.sessions()) == 2
    assert offline.clear(pinned=False)["sessions"] == 2


def cannot_write(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "find_obstacle", lambda _: "The disk is read-only.")


def test_a_folder_that_cannot_be_written_is_read(folder, monkeypatch):
    make_sessions(folder)
    with_a_log(folder)
    (folder / "locks" / "1-left").touch()
    before = listed(folder)
    cannot_write(monkeypatch)
    ids = tokens(3000, 0)
    with opened(folder, LIMIT, free_floor=NO_FLOOR) as made:
        sessions = Sessions(made.database)
        assert made.obstacle == "The disk is read-only."
        assert assert_right(made, ids, row=ROW).length == 2000
        assert len(sessions.all()) == 3
        assert made.check() == []
        made.note_uses()  # which a server does when it is idle
        for change in (
            lambda: put(made, ids, 1984, row=ROW),
            lambda: sessions.record_turn(_turn(ids, "x0")),
            lambda: made.delete_session(sessions, sessions.all()[0].id),
            made.clear,
        ):
            with pytest.raises(Unwritable, match="read-only"):
                change()
        assert listed(folder) == before
        monkeypatch.undo()
        put(made, ids, 1984, row=ROW)
        assert assert_right(made, ids, row=ROW).length == 3000
        assert made.obstacle is None
        assert len(sessions.all()) == 3
    with opened(folder, LIMIT, free_floor=NO_FLOOR) as made:
        assert made.check() == []


def test_a_disk_that_is_read_only_from_the_start_is_read(disk):
    make_sessions(disk / "store")
    with_a_log(disk / "store")
    mount(disk, "remount,ro")
    try:
        with opened(disk / "store", LIMIT) as made:
            assert "Read-only file system" in (made.obstacle or "")
            assert len(Sessions(made.database).all()) == 3
            assert assert_right(made, tokens(2000, 2), row=ROW).length == 2000
            with pytest.raises(Unwritable):
                put(made, tokens(2100, 2), 1984, row=ROW)
        assert len(Offline(disk).sessions()) == len(list_session_names(disk / "store")) == 3
        with pytest.raises(StoreError, match="Read-only file system"):
            Offline(disk).clear(pinned=False)
    finally:
        mount(disk, "remount,rw")


def test_a_folder_without_an_index_that_cannot_be_written_is_refused(folder, monkeypatch):
    make_sessions(folder)
    shutil.rmtree(folder)
    folder.mkdir()
    cannot_write(monkeypatch)
    with pytest.raises(StoreError), opened(folder):
        pass


def test_a_server_is_found_on_a_full_disk(disk):
    """Its note of a few bytes takes the place of the reserve."""
    make_sessions(disk / "store")
    with serving(disk, "http://127.0.0.1:1", "a"):
        pass  # makes the folder of notes
    fill(disk)
    with serving(disk, "http://127.0.0.1:9", "some/model"):
        assert [one.url for one in servers(disk)] == ["http://127.0.0.1:9"]


def test_too_little_free_space_is_told_before_it_is_needed(folder, monkeypatch):
    free = 10**9
    monkeypatch.setattr(Folder, "free", lambda _: free)
    with opened(folder, LIMIT, free_floor=1 << 60) as made:
        assert "are kept free for other programs" in (made.stats().obstacle or "")
    with opened(folder, LIMIT, free_floor=NO_FLOOR) as made:
        put(made, tokens(2000), row=ROW)
        assert made.stats().obstacle is None
    with opened(folder, LIMIT, free_floor=free + 50_000) as made:
        assert made.stats().obstacle is None, "evicting the file of 320 KB is enough"
