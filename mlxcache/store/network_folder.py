"""Check that a cache folder is not on a network file system."""

from __future__ import annotations

from pathlib import Path

import psutil

from mlxcache.errors import ConfigError

NETWORK = frozenset({"afpfs", "cifs", "nfs", "nfs4", "smb2", "smb3", "smbfs"})
"""Types of network file systems, as Linux and macOS name them."""


def network_type(folder: Path) -> str | None:
    """Return the type (such as "nfs") of the network file system of `folder`; None for a local one.

    The folder need not exist. Mount points are read from the system's table, without a request to a
    file server: Linux has it in /proc/self/mounts, macOS returns it from getfsstat(2).
    """
    path = folder.expanduser().resolve()
    found, longest = "", -1
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        if path.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = mount.fstype.lower(), len(point.parts)
    return found if found in NETWORK else None


def require_local(folder: Path) -> None:
    """Raise ConfigError unless the cache folder is on a disk of this machine.

    Over a network, locks and SQLite's log fail without an error, so two servers would corrupt the
    folder.
    """
    if (kind := network_type(folder)) is not None:
        raise ConfigError(
            f"--cache-dir {folder} is on a network file system ({kind}), where a store can be "
            "corrupted: choose a folder on a disk of this machine. To share conversations between "
            "servers, add --remote URL"
        )
