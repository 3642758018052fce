"""The cache folder before it is used: local, private to its user, and not backed up on a Mac."""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import os
import plistlib
from pathlib import Path
from tempfile import TemporaryFile

import psutil

from mlxcache.config import folder
from mlxcache.errors import ConfigError
from mlxcache.private import make_folder
from mlxcache.store.folder import STORE

NETWORK = frozenset({"afpfs", "cifs", "nfs", "nfs4", "smb2", "smb3", "smbfs"})
"""Types of network file systems, as Linux and macOS name them."""

EXCLUDED = "com.apple.metadata:com_apple_backup_excludeItem"
"""Extended attribute of files and folders that Time Machine excludes."""

log = logging.getLogger(__name__)


def network_type(cache_dir: Path) -> str | None:
    """Return the type (such as "nfs") of the folder's network file system; None for a local one."""
    path = cache_dir.expanduser().resolve()
    found, longest = "", -1
    for mount in psutil.disk_partitions(all=True):
        point = Path(mount.mountpoint)
        if path.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = mount.fstype.lower(), len(point.parts)
    return found if found in NETWORK else None


def require_local(cache_dir: Path) -> None:
    """Raise ConfigError unless the cache folder is on a disk of this machine.

    Over a network, locks and SQLite's log fail without an error, so two servers would corrupt the
    folder.
    """
    if (kind := network_type(cache_dir)) is not None:
        raise ConfigError(
            f"--cache-dir {cache_dir} is on a network file system ({kind}), where a store can be "
            "corrupted: choose a folder on a disk of this machine. To share conversations between "
            "servers, add --remote URL"
        )


def require_writable(cache_dir: Path, why: str) -> None:
    """Raise ConfigError, with `why` it matters, unless files can be made in the cache folder.

    A missing folder is made.
    """
    try:
        make_folder(cache_dir)
        with TemporaryFile(dir=cache_dir):
            pass
    except OSError as error:
        raise ConfigError(
            f"--cache-dir {cache_dir} cannot be written, and {why}: {error.strerror}. "
            "Choose another folder"
        ) from error


def prepare_cache_dir(cache_dir: Path) -> None:
    """Make the default folder of a Mac private to its user and exclude it from Time Machine.

    Does nothing on other systems, for any other folder, and if it has a store already. Errors are
    logged.
    """
    default = folder.SYSTEM == "darwin" and cache_dir == folder.default_cache_dir()
    if not default or (cache_dir / STORE).is_dir():
        return
    try:
        make_folder(cache_dir)
        cache_dir.chmod(0o700)  # the user may have made it, for config.toml
    except OSError as error:
        log.warning("cache folder %s not made private to its user: %s", cache_dir, error)
    try:
        exclude_from_backups(cache_dir)
    except OSError as error:
        log.warning("cache folder %s not excluded from Time Machine: %s", cache_dir, error)


def exclude_from_backups(path: Path) -> None:
    """Exclude a folder from Time Machine's backups. Raises OSError.

    Sets the same attribute as `tmutil addexclusion FOLDER`, since tmutil itself asks the user for
    access to the whole disk on some versions of macOS. The attribute and its value are described in
    https://eclecticlight.co/2017/12/13/xattr-com-apple-metadatacom_apple_backup_excludeitem-exclude-from-backups/.
    """
    value = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    library.setxattr.argtypes = (
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
        *(ctypes.c_uint32, ctypes.c_int),  # position and options, which Linux does not have
    )
    if library.setxattr(os.fsencode(path), EXCLUDED.encode(), value, len(value), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(path))
