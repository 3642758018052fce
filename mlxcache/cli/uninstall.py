"""The command `mlxcache uninstall`: list the files of mlxcache on this machine, and remove them."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mlxcache.cli import show
from mlxcache.cli.confirm import Yes, confirm, require_terminal_or_yes
from mlxcache.cli.output import console, reporting
from mlxcache.cli.own_command import CLONE
from mlxcache.cli.service import NOTE as UNCLEAN
from mlxcache.cli.target import CacheDir, Json
from mlxcache.config import format_size, load_settings
from mlxcache.config.folder import default_cache_dir, former_cache_dir
from mlxcache.config.sources import default_config_path
from mlxcache.errors import MlxcacheError
from mlxcache.kernels import kernel_folder
from mlxcache.store.folder import KINDS
from mlxcache.store.lock import NAME, NOTE, NOTES, exclusive_lock, servers
from mlxcache.store.mac_folder import STORE, locate_cache_dir

OWN: Mapping[str, tuple[str, ...]] = {
    STORE: (
        *("index.sqlite", "index.sqlite-*", "open.lock", "reserve", "locks/[0-9]*-????????"),
        *("quarantine/[0-9]*-*.safetensors", "quarantine/[0-9]*-index.sqlite*"),
        *(
            f"{kind}s/{name}"
            for kind in KINDS
            for name in ("*.safetensors", "??/*.safetensors", "??/.*.tmp")
        ),
    ),
    "incoming": ("restore-*.safetensors",),
    "demo": ("mlxcache-demo-*/*", ".demo-*/*"),
    "log": ("serve-*.log",),
    NOTES: ("open.lock", NOTE),
}
"""Folders of mlxcache in a cache folder, with patterns of its files in each.

Only these files are removed, because --cache-dir may name a folder of other programs by mistake,
and they may have a folder `log` too.
"""

_OWN_FILES = ("fingerprints.json", "passes.json", NAME, UNCLEAN)
"""Names of mlxcache's files in a cache folder itself."""

_COMPLETIONS = (".zfunc/_mlxcache", ".config/fish/completions/mlxcache.fish")
_BASH = ".bash_completions/mlxcache.sh"

_SERVICES = (
    ("Library/LaunchAgents/mlxcache.plist", 'launchctl bootout "gui/$(id -u)/mlxcache"'),
    (".config/systemd/user/mlxcache.service", "systemctl --user disable --now mlxcache"),
)
"""Service files of docs/service.md, below the home folder, and the command that stops each."""


@dataclass(frozen=True, slots=True)
class Place:
    """File or folder of mlxcache, with its size in bytes. `what` describes its content.

    `command` tells the user how to remove it, if this command does not remove it, else None.
    """

    what: str
    path: Path
    nbytes: int
    command: str | None = None

    def as_object(self) -> dict[str, Any]:
        """Return `what`, `path`, `bytes` and `command` as an object for --json."""
        found = {**asdict(self), "path": str(self.path)}
        found["bytes"] = found.pop("nbytes")
        return found


def uninstall(*, yes: Yes = False, cache_dir: CacheDir = None, as_json: Json = False) -> None:
    """Remove the sessions, settings and other files of mlxcache, after asking.

    All files are first listed with their sizes. Not removed are the program itself, models of the
    Hugging Face Hub, which other programs may use, a service, and shell completion of bash; the
    last lines say how to remove those of them that are there.
    """
    with reporting():
        given = load_settings({"cache_dir": cache_dir}, os.environ).cache_dir
        folders = _cache_folders(given)
        _refuse_while_served(folders)
        require_terminal_or_yes(yes=yes)
        places, left = list(_places(folders)), list(_left())
        if not as_json:
            _show("mlxcache keeps here", places)
        if places:
            total = format_size(sum(one.nbytes for one in places))
            confirm(f"Remove all of it ({total})? Sessions cannot be restored.", yes=yes)
            _remove(places, folders)
        if as_json:
            removed = [one.as_object() for one in places]
            show.print_json({"removed": removed, "left": [one.as_object() for one in left]})
            return
        console().print("Removed." if places else "Nothing was found.")
        _show_left(left)


def _cache_folders(given: Path) -> list[Path]:
    """Return the cache folders: `given`, and if it is the default, the one of earlier versions.

    Only Macs had another default.
    """
    folders = [locate_cache_dir(given)]
    if given == default_cache_dir():
        folders += [given, *filter(None, (former_cache_dir(),))]
    return list(dict.fromkeys(folders))


def _refuse_while_served(folders: Sequence[Path]) -> None:
    """Raise MlxcacheError if a server is using one of the folders."""
    for folder in folders:
        for one in servers(folder):
            raise MlxcacheError(
                f"The server at {one.url} ({one.model}, process {one.pid}) uses {folder}: stop it, "
                "then try again."
            )


def _places(folders: Sequence[Path]) -> Iterator[Place]:
    """Yield the existing files and folders that this command removes."""
    for folder in folders:
        if store := _own_files(folder, STORE):
            yield Place("sessions and their KV", folder / STORE, sum(map(_size, store)))
        others = [path for name in OWN if name != STORE for path in _own_files(folder, name)]
        others += [path for name in _OWN_FILES if (path := folder / name).is_file()]
        if others:
            yield Place("the demo model, logs, locks", folder, sum(map(_size, others)))
    if (kernels := kernel_folder()).is_dir():
        yield Place("kernels that MLX compiled", kernels, _size(kernels))
    if (config := default_config_path()).is_file():
        yield Place("settings", config, _size(config))
    for name in _COMPLETIONS:
        if (path := Path.home() / name).is_file():
            yield Place("shell completion", path, _size(path))


def _left() -> Iterator[Place]:
    """Yield the existing files and folders that the user must remove, with a command for each."""
    for name, stop in _SERVICES:
        if (path := Path.home() / name).is_file():
            yield Place("the service", path, _size(path), f"{stop}; rm {shlex.quote(str(path))}")
    if (bash := Path.home() / _BASH).is_file():
        command = f"rm {shlex.quote(str(bash))}, and delete its line in ~/.bashrc"
        yield Place("shell completion", bash, _size(bash), command)
    from huggingface_hub import constants  # noqa: PLC0415 - takes a while

    hub = Path(constants.HF_HUB_CACHE)
    if hub.is_dir():
        what = "models of the Hub, also of other programs"
        yield Place(what, hub, _size(hub), "hf cache rm, or rm -r of a model's folder there")
    if (CLONE / "pyproject.toml").is_file():
        # git's objects are write-protected: without -f, rm asks about each.
        command = f"rm -rf {shlex.quote(str(CLONE))}"
        yield Place("the program, a clone", CLONE, _size(CLONE), command)
    else:
        package = CLONE / "mlxcache"
        yield Place("the program", package, _size(package), "pip uninstall mlxcache")


def _remove(places: Sequence[Place], folders: Sequence[Path]) -> None:
    """Remove mlxcache's files in the cache folders, MLX's kernels, and the files of `places`.

    `folders`: the cache folders. They, mlxcache's folders in them and the folder of config.toml are
    removed too if they are empty then. Raises InUse if a server or another command uses a cache
    folder, and MlxcacheError if a file cannot be removed.
    """
    try:
        for folder in folders:
            if folder.is_dir():
                with exclusive_lock(folder):
                    for name in OWN:
                        _remove_own(folder, name)
                    for name in _OWN_FILES:
                        (folder / name).unlink(missing_ok=True)
        for one in places:
            if one.path.is_file():
                one.path.unlink()
        if kernel_folder().is_dir():
            shutil.rmtree(kernel_folder())
        for folder in (*folders, kernel_folder().parent, default_config_path().parent):
            with suppress(OSError):  # it has files of others, or is not there
                folder.rmdir()
    except OSError as error:
        raise MlxcacheError(f"{error.filename} cannot be removed: {error.strerror}.") from error


def _own_files(folder: Path, name: str) -> list[Path]:
    """Return mlxcache's files in `folder` / `name`, which may be a link to a folder.

    `folder` is a cache folder and `name` a key of `OWN`, which has the patterns of the files.
    """
    top = folder / name
    return [path for pattern in OWN[name] for path in top.glob(pattern) if path.is_file()]


def _remove_own(folder: Path, name: str) -> None:
    """Remove mlxcache's files in `folder` / `name`, and then each folder that is empty.

    If that path is a symbolic link, the files are removed from its target, and the link is removed
    if the target is.
    """
    top = folder / name
    for path in _own_files(folder, name):
        path.unlink()
    for below, _, _ in os.walk(top.resolve(), topdown=False):
        with suppress(OSError):  # it has files of others
            os.rmdir(below)
    if top.is_symlink() and not top.exists():
        top.unlink()


def _size(path: Path) -> int:
    """Return the bytes that a file, or all files below a folder, occupy on disk."""
    if not path.is_dir():
        return path.lstat().st_blocks * 512 if path.exists() else 0
    below = (os.path.join(top, name) for top, _, names in os.walk(path) for name in names)
    total = 0
    for one in below:
        with suppress(FileNotFoundError):  # another process removed it
            total += os.lstat(one).st_blocks * 512
    return total


def _show(heading: str, places: Sequence[Place]) -> None:
    if places:
        console().print(f"{heading}:")
        show.print_table(
            (("what", "left"), ("where", "left"), ("size", "right")),
            ((one.what, str(one.path), format_size(one.nbytes)) for one in places),
        )


def _show_left(left: Sequence[Place]) -> None:
    console().print("\nLeft, for you to remove:")
    for one in left:
        console().print(f"  {one.what}: {one.path} ({format_size(one.nbytes)})")
        console().print(f"    {one.command}")
