"""The cache folder: refused on NFS or SMB; on a Mac private and left out of backups."""

from __future__ import annotations

import errno
import logging
from collections import namedtuple
from pathlib import Path

import platformdirs
import psutil
import pytest

from mlxcache.config import Settings, folder
from mlxcache.errors import ConfigError
from mlxcache.store.cache_folder import network_type, prepare_cache_dir, require_local
from tests.mac_home import MacHome

Mount = namedtuple("Mount", "device mountpoint fstype opts")

LINUX = [("/", "overlay"), ("/mnt", "ext4"), ("/mnt/nas", "nfs4"), ("/mnt/nas/disk", "xfs")]
MAC = [("/", "apfs"), ("/System/Volumes/Data", "apfs"), ("/Volumes/team", "smbfs")]


@pytest.fixture
def mounted(monkeypatch):
    def mount(table):
        found = [Mount("device", point, kind, "rw") for point, kind in table]
        monkeypatch.setattr(psutil, "disk_partitions", lambda all=False: found)

    return mount


@pytest.mark.parametrize(
    ("table", "folder", "kind"),
    [
        (LINUX, "/mnt/nas/cache/not/there", "nfs4"),
        (LINUX, "/mnt/nas", "nfs4"),
        (LINUX, "/mnt/nas/disk/cache", None),
        (LINUX, "/mnt/nas2", None),
        (LINUX, "/home/me", None),
        ([("/", "ext4"), ("/home", "ext4"), ("/home", "cifs")], "/home/me/.cache", "cifs"),
        (MAC, "/Volumes/team/mlxcache", "smbfs"),
        (MAC, "/Users/me/Library", None),
    ],
)
def test_the_file_system_is_that_of_the_nearest_mount_point(mounted, table, folder, kind):
    mounted(table)
    assert network_type(Path(folder)) == kind


def test_a_link_to_a_share_is_followed(mounted, tmp_path):
    (tmp_path / "share").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "share")
    mounted([("/", "ext4"), (str((tmp_path / "share").resolve()), "nfs")])
    with pytest.raises(ConfigError, match=r"\(nfs\).*--remote URL"):
        require_local(tmp_path / "link" / "cache")
    require_local(tmp_path)


def test_the_disks_of_this_machine_are_local(tmp_path):
    require_local(tmp_path)


@pytest.fixture
def mac(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> MacHome:
    caplog.set_level(logging.INFO, logger="mlxcache")
    return MacHome(tmp_path, monkeypatch)


def test_a_mac_keeps_sessions_out_of_its_caches(mac):
    assert Settings().cache_dir == mac.cache_dir


def test_linux_keeps_its_default(monkeypatch):
    monkeypatch.setattr(folder, "SYSTEM", "linux")
    there = platformdirs.user_cache_path("mlxcache")
    assert Settings().cache_dir == there


def test_a_new_folder_is_left_out_of_backups(mac):
    """With the attribute of `tmutil addexclusion`: these bytes."""
    prepare_cache_dir(mac.cache_dir)
    name, value = mac.library.set[str(mac.cache_dir)]
    assert name == "com.apple.metadata:com_apple_backup_excludeItem"
    assert value.hex() == (
        "62706c6973743030" + "5f1011" + b"com.apple.backupd".hex() + "08" + "000000000000"
        "01" + "01" + "0000000000000001" + "0000000000000000" + "000000000000001c"
    )
    assert mac.cache_dir.stat().st_mode & 0o777 == 0o700


def test_a_folder_with_a_store_or_with_a_name_of_its_own_is_left_alone(mac, tmp_path):
    """The user may have removed the exclusion, or wants backups of that folder."""
    (mac.cache_dir / "store").mkdir(parents=True)
    prepare_cache_dir(mac.cache_dir)
    prepare_cache_dir(tmp_path / "named")
    assert not mac.library.set
    assert not (tmp_path / "named").exists()


def test_an_exclusion_that_fails_is_a_warning(mac, caplog):
    mac.library.fails = errno.ENOTSUP
    prepare_cache_dir(mac.cache_dir)
    (message,) = caplog.messages
    assert message.startswith(f"cache folder {mac.cache_dir} not excluded from Time Machine: ")


def test_a_folder_that_cannot_be_made_private_is_a_warning(mac, caplog, monkeypatch):
    def refuse(self: Path, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", str(self))

    monkeypatch.setattr(Path, "chmod", refuse)
    prepare_cache_dir(mac.cache_dir)
    (message,) = caplog.messages
    assert message.startswith(f"cache folder {mac.cache_dir} not made private to its user: ")
    assert str(mac.cache_dir) in mac.library.set
