"""The default cache folder on a Mac: moved from ~/Library/Caches, and excluded from backups.

On other systems, and for any other folder, `locate_cache_dir` and `prepare_cache_dir` only return
their argument.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import logging
import os
import plistlib
import time
from pathlib import Path

from mlxcache.config.folder import default_cache_dir, former_cache_dir
from mlxcache.errors import StoreError
from mlxcache.private import make_folder
from mlxcache.store.folder import STORE
from mlxcache.store.lock import NAME, InUse, exclusive_lock, servers

__all__ = ["STORE", "locate_cache_dir"]

WAIT_S = 5.0
"""Most seconds to wait for another process that moves or changes the folder."""

_POLL_S = 0.05

EXCLUDED = "com.apple.metadata:com_apple_backup_excludeItem"
"""Extended attribute of files and folders that Time Machine excludes."""

log = logging.getLogger(__name__)


def locate_cache_dir(cache_dir: Path) -> Path:
    """Return the folder that commands use for `cache_dir`: itself, or that of earlier versions.

    The latter, in ~/Library/Caches, is returned if `cache_dir` is the default folder on a Mac and
    the store has not been moved to it yet; see `prepare_cache_dir`.
    """
    former = _former(cache_dir)
    if former is None or _has_store(cache_dir) or not _has_store(former):
        return cache_dir
    return former


def prepare_cache_dir(cache_dir: Path) -> Path:
    """Move the folder of earlier versions to `cache_dir`; return the folder that a server uses.

    The former folder is returned if it cannot be moved, for example because a server uses it or
    because it is on another disk. A new folder is made private to the user and excluded from Time
    Machine. Moves and failures are logged. Blocks for at most `WAIT_S` seconds.
    """
    former = _former(cache_dir)
    if former is None:
        return cache_dir
    if _has_store(cache_dir):
        if _has_store(former) and (former / STORE).resolve() != (cache_dir / STORE).resolve():
            log.warning(
                "sessions in %s are not used, because %s has sessions too: to use them, pass "
                "--cache-dir %s; to be rid of them, remove that folder",
                *(former, cache_dir, former),
            )
        return cache_dir
    if _has_store(former) and not _take_over(former, cache_dir):
        return former
    try:
        make_folder(cache_dir)
        cache_dir.chmod(0o700)  # the user may have made it, for config.toml
    except OSError as error:
        log.warning("cache folder %s not made private to its user: %s", cache_dir, error)
    try:
        exclude_from_backups(cache_dir)
    except OSError as error:
        log.warning("cache folder %s not excluded from Time Machine: %s", cache_dir, error)
    return cache_dir


def exclude_from_backups(folder: Path) -> None:
    """Exclude a folder from Time Machine's backups. Raises OSError.

    Sets the same attribute as `tmutil addexclusion FOLDER`; `tmutil removeexclusion` removes it
    (tmutil(8), setxattr(2)). The command tmutil itself is not used because on some versions of
    macOS it asks the user for access to the whole disk. The attribute and its value are described
    in
    https://eclecticlight.co/2017/12/13/xattr-com-apple-metadatacom_apple_backup_excludeitem-exclude-from-backups/.
    """
    value = plistlib.dumps("com.apple.backupd", fmt=plistlib.FMT_BINARY)
    library = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    library.setxattr.argtypes = (
        *(ctypes.c_char_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t),
        *(ctypes.c_uint32, ctypes.c_int),  # position and options, which Linux does not have
    )
    if library.setxattr(os.fsencode(folder), EXCLUDED.encode(), value, len(value), 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(folder))


def _former(cache_dir: Path) -> Path | None:
    """Return the path of the cache folder of earlier versions, which may be missing.

    None is returned unless `cache_dir` is the default folder on a Mac, which replaced it.
    """
    former = former_cache_dir()
    return former if former != cache_dir == default_cache_dir() else None


def _has_store(folder: Path) -> bool:
    return (folder / STORE).is_dir()


def _take_over(former: Path, cache_dir: Path) -> bool:
    """Move the folder `former` to `cache_dir`; return False if that is impossible.

    Waits up to `WAIT_S` seconds for another process that is moving it. Failures are logged, and the
    former folder then stays in use.
    """
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            with exclusive_lock(former):
                if _has_store(former):  # else another process that starts has moved it
                    _move(former, cache_dir)
                _remove_empty(former)
            return True
        except InUse:
            users = servers(former)
            if not users and time.monotonic() < deadline:
                time.sleep(_POLL_S)
                continue
            names = ", ".join(f"{one.url}, process {one.pid}" for one in users)
            log.warning(
                "cache folder not moved from %s: in use by %s. The next start that finds it unused "
                "moves it to %s",
                *(former, names or "another mlxcache command", cache_dir),
            )
        except (OSError, StoreError) as error:
            if _has_store(cache_dir) and not _has_store(former):
                return True  # the process that moved it removed the lock file while we opened it
            log.warning(
                "cache folder not moved from %s to %s: %s. Move it while no server runs, or pass "
                "it as --cache-dir",
                *(former, cache_dir, str(error).rstrip(".")),
            )
        return False


def _move(former: Path, cache_dir: Path) -> None:
    """Rename the entries of `former` into `cache_dir`, the store first.

    Raises OSError if the store cannot be renamed; errors of other entries are logged. Entries that
    `cache_dir` already has are not replaced.
    """
    make_folder(cache_dir)
    store = former / STORE
    if store.is_symlink():  # a relative one would lead elsewhere from the new folder
        (cache_dir / STORE).symlink_to(store.resolve())
        store.unlink()
    else:
        os.rename(store, cache_dir / STORE)
    log.info("cache folder moved from %s to %s", former, cache_dir)
    _move_rest(former, cache_dir)


def _move_rest(source: Path, target: Path) -> None:
    """Move the entries of `source` that `target` lacks to it, also inside folders that both have.

    Errors are logged.
    """
    for entry in list(source.iterdir()):
        if entry.name == NAME:
            continue  # held by this process; the new folder has its own
        new = target / entry.name
        try:
            if not os.path.lexists(new):
                os.rename(entry, new)
            elif entry.is_dir() and new.is_dir():
                _move_rest(entry, new)
                entry.rmdir()
        except OSError as error:
            log.warning("%s not moved to the new cache folder: %s", entry, error.strerror)


def _remove_empty(former: Path) -> None:
    """Remove the folder `former` if only its lock file is left in it.

    If it cannot be removed, for example because it is a symbolic link, that is logged.
    """
    try:
        if [entry.name for entry in former.iterdir()] == [NAME]:
            (former / NAME).unlink()
            former.rmdir()
    except FileNotFoundError:
        log.debug("former cache folder %s was removed by another process", former)
    except OSError as error:
        log.info("empty former cache folder %s not removed: %s", former, error.strerror)
