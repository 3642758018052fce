"""The default cache folder of a Mac: found, moved, and left out of backups."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
from pathlib import Path
from typing import NoReturn

import platformdirs
import pytest

from mlxcache.config import Settings, folder
from mlxcache.errors import StoreError
from mlxcache.store import mac_folder
from mlxcache.store.lock import NAME, exclusive_lock, serving
from mlxcache.store.mac_folder import locate_cache_dir, prepare_cache_dir
from tests.mac_home import IDS, MacHome
from tests.store.content import assert_right, opened


@pytest.fixture
def mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> MacHome:
    caplog.set_level(logging.INFO, logger="mlxcache")
    return MacHome(tmp_path, monkeypatch)


def test_a_mac_keeps_sessions_out_of_its_caches(mac):
    """The default is in Application Support there."""
    assert Settings().cache_dir == mac.new


def test_linux_keeps_its_default(monkeypatch):
    """The user's cache folder, which nothing is moved to."""
    monkeypatch.setattr(folder, "SYSTEM", "linux")
    there = platformdirs.user_cache_path("mlxcache")
    assert Settings().cache_dir == there == prepare_cache_dir(there) == locate_cache_dir(there)


def test_the_former_folder_is_moved_and_one_line_says_so(mac, caplog):
    """All that is in it; what was cached is found again."""
    mac.fill(mac.former)
    assert prepare_cache_dir(mac.new) == mac.new
    assert caplog.messages == [f"cache folder moved from {mac.former} to {mac.new}"]
    assert not mac.former.exists()
    assert (mac.new / "log" / "serve-8081.log").read_text() == "old"
    assert (mac.new / "fingerprints.json").is_file()
    with opened(mac.new / "store") as store:
        assert assert_right(store, IDS).length == len(IDS)


def test_a_second_start_says_and_does_nothing(mac, caplog):
    """Also not to an exclusion that the user removed."""
    mac.fill(mac.former)
    prepare_cache_dir(mac.new)
    caplog.clear()
    mac.library.set.clear()
    assert prepare_cache_dir(mac.new) == mac.new
    assert not caplog.messages
    assert not mac.library.set


def test_a_new_folder_is_left_out_of_backups(mac):
    """With the attribute of `tmutil addexclusion`: these bytes."""
    prepare_cache_dir(mac.new)
    name, value = mac.library.set[str(mac.new)]
    assert name == "com.apple.metadata:com_apple_backup_excludeItem"
    assert value.hex() == (
        "62706c6973743030" + "5f1011" + b"com.apple.backupd".hex() + "08" + "000000000000"
        "01" + "01" + "0000000000000001" + "0000000000000000" + "000000000000001c"
    )
    assert mac.new.stat().st_mode & 0o777 == 0o700


def test_an_exclusion_that_fails_is_a_warning(mac, caplog):
    """The folder is used all the same."""
    mac.library.fails = errno.ENOTSUP
    assert prepare_cache_dir(mac.new) == mac.new
    (message,) = caplog.messages
    assert message.startswith(f"cache folder {mac.new} not excluded from Time Machine: ")


def test_a_folder_that_cannot_be_made_private_is_a_warning(mac, caplog, monkeypatch):
    """It is excluded from backups all the same."""

    def refuse(self: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "chmod", refuse)
    assert prepare_cache_dir(mac.new) == mac.new
    (message,) = caplog.messages
    assert message.startswith(f"cache folder {mac.new} not made private to its user: ")
    assert str(mac.new) in mac.library.set


def test_a_config_file_in_the_new_folder_stops_no_move(mac):
    """config.toml is in Application Support, too; a log that both have is kept twice."""
    mac.fill(mac.former)
    (mac.new / "log").mkdir(parents=True)
    (mac.new / "config.toml").write_text("port = 1")
    (mac.new / "log" / "serve-8081.log").write_text("new")
    (mac.former / "log" / "serve-8082.log").write_text("other")
    assert prepare_cache_dir(mac.new) == mac.new
    with opened(mac.new / "store") as store:
        assert store.find(IDS).length == len(IDS)
    assert (mac.new / "config.toml").read_text() == "port = 1"
    assert mac.new.stat().st_mode & 0o777 == 0o700
    assert (mac.new / "log" / "serve-8081.log").read_text() == "new"
    assert (mac.former / "log" / "serve-8081.log").read_text() == "old"
    assert (mac.new / "log" / "serve-8082.log").read_text() == "other"


def test_a_folder_that_a_server_uses_stays_in_use(mac, caplog):
    """By its new servers and commands too, so no session is missed; the next start moves it."""
    mac.fill(mac.former)
    with serving(mac.former, "http://127.0.0.1:8081", "m"):
        assert prepare_cache_dir(mac.new) == mac.former
        assert locate_cache_dir(mac.new) == mac.former
        (message,) = caplog.messages
        assert message.startswith(
            f"cache folder not moved from {mac.former}: in use by http://127.0.0.1:8081, "
            f"process {os.getpid()}"
        )
    assert not (mac.new / "store").exists()
    assert prepare_cache_dir(mac.new) == mac.new == locate_cache_dir(mac.new)


def test_two_servers_that_start_at_once_move_it_once(mac, caplog):
    """The second one waits for the first."""
    mac.fill(mac.former)
    used: list[Path] = []
    starts = [
        threading.Thread(target=lambda: used.append(prepare_cache_dir(mac.new))) for _ in range(4)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert used == [mac.new] * 4
    assert caplog.messages == [f"cache folder moved from {mac.former} to {mac.new}"]
    assert not mac.former.exists()


def test_a_server_finds_the_folder_moved_while_it_opens_the_lock(mac, monkeypatch, caplog):
    """The server that moved it has removed the lock file, and the folder with it."""
    mac.fill(mac.former)

    def move_and_fail(_: Path) -> NoReturn:
        mac.new.mkdir(parents=True)
        os.rename(mac.former / "store", mac.new / "store")
        shutil.rmtree(mac.former)
        raise StoreError("serving.lock: No such file or directory")

    monkeypatch.setattr(mac_folder, "exclusive_lock", move_and_fail)
    assert prepare_cache_dir(mac.new) == mac.new
    assert not caplog.messages


def test_a_server_that_waited_finds_the_folder_moved(mac, monkeypatch, caplog):
    """By the other server that started; nothing is left to move."""
    mac.fill(mac.former)
    waits = threading.Event()

    def note(_: Path) -> list[object]:
        waits.set()
        return []

    monkeypatch.setattr(mac_folder, "servers", note)
    used: list[Path] = []
    second = threading.Thread(target=lambda: used.append(prepare_cache_dir(mac.new)))
    with exclusive_lock(mac.former):
        second.start()
        assert waits.wait(10)
        mac.new.mkdir(parents=True)
        os.rename(mac.former / "store", mac.new / "store")
    second.join()
    assert used == [mac.new]
    assert not caplog.messages


def test_a_command_that_changes_the_former_folder_is_waited_for(mac, monkeypatch, caplog):
    """For some seconds; then the folder is used where it is."""
    monkeypatch.setattr(mac_folder, "WAIT_S", 0.2)
    mac.fill(mac.former)
    with exclusive_lock(mac.former):
        assert prepare_cache_dir(mac.new) == mac.former
    assert "in use by another mlxcache command" in caplog.text


def test_a_folder_on_another_disk_stays_in_use(mac, monkeypatch, caplog):
    """A rename cannot move it, and a copy could take hours."""
    mac.fill(mac.former)

    def refuse(*_: object) -> None:
        raise OSError(errno.EXDEV, "Cross-device link")

    monkeypatch.setattr(os, "rename", refuse)
    assert prepare_cache_dir(mac.new) == mac.former
    assert "Cross-device link" in caplog.text
    with opened(mac.former / "store") as store:
        assert store.find(IDS).length == len(IDS)


def test_where_the_former_folder_cannot_be_removed_the_new_one_is_used(mac, monkeypatch):
    """It is a link, nobody may change ~/Library/Caches, or another start has made a lock in it."""
    real = mac.former.parent / "elsewhere"
    real.mkdir()
    mac.former.symlink_to(real)
    mac.fill(mac.former)
    assert prepare_cache_dir(mac.new) == mac.new == locate_cache_dir(mac.new)
    with opened(mac.new / "store") as store:
        assert store.find(IDS).length == len(IDS)


def test_a_store_that_is_a_link_is_reached_from_the_new_folder(mac):
    """Also by a relative link."""
    mac.fill(mac.former)
    os.rename(mac.former / "store", mac.former.parent / "elsewhere")
    (mac.former / "store").symlink_to("../elsewhere")
    assert prepare_cache_dir(mac.new) == mac.new == locate_cache_dir(mac.new)
    with opened(mac.new / "store") as store:
        assert store.find(IDS).length == len(IDS)


def test_where_one_folder_is_a_link_to_the_other_nobody_is_told_to_remove_it(mac, caplog):
    """Both have the same sessions."""
    mac.fill(mac.new)
    mac.former.symlink_to(mac.new)
    assert prepare_cache_dir(mac.new) == mac.new
    assert not caplog.messages


def test_where_both_folders_have_sessions_neither_is_touched(mac, caplog):
    """The new one is used, and a warning names the other."""
    mac.fill(mac.former)
    mac.fill(mac.new)
    before = sorted(mac.former.rglob("*"))
    assert prepare_cache_dir(mac.new) == mac.new
    assert caplog.messages[0].startswith(f"sessions in {mac.former} are not used, because")
    assert sorted(mac.former.rglob("*")) == before


def test_a_folder_that_was_named_is_left_alone(mac, tmp_path):
    """Also if it is the former default."""
    mac.fill(mac.former)
    for named in (tmp_path / "own", mac.former):
        assert prepare_cache_dir(named) == named == locate_cache_dir(named)
    assert not mac.new.exists()
    assert not mac.library.set
    assert (mac.former / NAME).exists()
