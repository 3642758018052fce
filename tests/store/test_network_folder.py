"""A cache folder on NFS or SMB is refused."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path

import psutil
import pytest

from mlxcache.errors import ConfigError
from mlxcache.store.network_folder import network_type, require_local

Mount = namedtuple("Mount", "device mountpoint fstype opts")

LINUX = [("/", "overlay"), ("/mnt", "ext4"), ("/mnt/nas", "nfs4"), ("/mnt/nas/disk", "xfs")]
MAC = [("/", "apfs"), ("/System/Volumes/Data", "apfs"), ("/Volumes/team", "smbfs")]


@pytest.fixture
def mounted(monkeypatch):
    """`mounted(table)` has the system report these mount points and types."""

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
    """Of two at one place the later one is seen."""
    mounted(table)
    assert network_type(Path(folder)) == kind


def test_a_link_to_a_share_is_followed(mounted, tmp_path):
    """The folder itself may be a link."""
    (tmp_path / "share").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "share")
    mounted([("/", "ext4"), (str((tmp_path / "share").resolve()), "nfs")])
    with pytest.raises(ConfigError, match=r"\(nfs\).*--remote URL"):
        require_local(tmp_path / "link" / "cache")
    require_local(tmp_path)


def test_the_disks_of_this_machine_are_local(tmp_path):
    """By the system's own table."""
    require_local(tmp_path)
