"""Description of the machine for a report to be published, and removal of what is private.

Nothing in a report identifies the machine or its user.
"""

from __future__ import annotations

import contextlib
import getpass
import os
import platform
import pwd
import re
import socket
import subprocess
import sys
import sysconfig
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil

import mlxcache
from mlxcache import __version__
from mlxcache.command_buffers import read_chip

UNIQUE = ("uuid", "pci_bus_id", "registry_id", "serial")
"""Fields of MLX's device that no two machines share."""

PACKAGES = ("mlx", "mlx-metal", "mlx-cpu", "mlx-cuda-13", "mlx-lm")


def describe_machine() -> dict[str, Any]:
    """Return a description of the machine, its device and versions, without private text."""
    import mlx.core as mx  # noqa: PLC0415 - takes long, and help needs none of it

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    found: dict[str, Any] = {
        "chip": _chip(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "system": _system(),
        "power": None if battery is None else "mains" if battery.power_plugged else "battery",
        "device": str(mx.default_device()),
        "device_info": device_info(),
        "python": platform.python_version(),
        "mlxcache": _own_version(),
        "versions": dict(_versions()),
    }
    return _scrubbed(found)


def device_info() -> dict[str, Any]:
    """Return MLX's description of its default device, without what identifies it or its user."""
    import mlx.core as mx  # noqa: PLC0415 - as above

    info: Mapping[str, Any] = mx.device_info()
    return _scrubbed({name: info[name] for name in sorted(info) if name not in UNIQUE})


def _scrubbed(found: Mapping[str, Any]) -> dict[str, Any]:
    return {name: scrub(one) if isinstance(one, str) else one for name, one in found.items()}


def _chip() -> str:
    if sys.platform == "darwin":
        return read_chip() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _system() -> str:
    if sys.platform == "darwin":
        return f"macOS {platform.mac_ver()[0]} ({platform.machine()})"
    return f"{platform.system()} {platform.release()} ({platform.machine()})"


def _own_version() -> str:
    """Return the version, in a clone with its commit, and `-dirty` if files differ from it."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return __version__
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    command.append("--exclude=*")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):  # no git
        return __version__
    commit = done.stdout.strip()
    return f"{__version__}, commit {commit}" if commit else __version__


def _versions() -> Iterator[tuple[str, str]]:
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            yield name, version(name)


# -- privacy ---------------------------------------------------------------------------------------

CUT = "..."
HOSTS = frozenset({"huggingface.co", "github.com", "127.0.0.1", "localhost"})
"""Hosts whose URLs are kept, without the query."""

COMMON = frozenset({"localhost", "mlxcache", "model", "models", "snapshots"})
"""Names that identify nobody and occur in the report, so they are kept."""

USUAL = frozenset(
    part
    for root in ("/Users", "/Volumes", "/home", "/private/var/folders", "/mnt", "/opt", "/tmp")
    for part in Path(root).parts
)
"""Parts of the paths of folders that exist on most machines and so identify none of them."""

LEAST_NAME = 3  # minimum letters of a folder's name to be removed as a word of its own

_REST = r"[^\n'\"`<>]*?(?=:\s|:?$|['\"`<>\n])"
"""Pattern for the rest of a path, up to a quote, a line's end or `: `; names may contain blanks."""

_KNOWN, _SLASH = "\0", "\1"
"""Placeholders for a known folder, and for a slash that is not part of a path."""

_PATH = re.compile(
    rf"{_KNOWN}(?:[/\\]{_REST})?"
    r"|(?<![\w.~/\\])(?:~\w*[/\\]|/(?!v1/|health\b)(?=[^\s/])|[A-Za-z]:[\\/]|\\\\(?=\w))" + _REST,
    re.MULTILINE,
)
_FILE_URL = re.compile(rf"\bfile:(?=/){_REST}", re.MULTILINE | re.IGNORECASE)
_URL = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s'\"`<>]*", re.IGNORECASE)
_HOST = re.compile(r"(\bhost=)(['\"])[^'\"]*\2")
_PUBLIC = re.compile(
    r"[/\\]((?:config|generation_config|tokenizer\w*|model[\w-]*?(?:-of-\d+)?)"
    r"(?:\.safetensors\.index)?\.(?:json|safetensors))$"
)
"""Pattern for names of files that every model has, which are kept."""


def scrub(text: str, private: Iterable[str] | None = None) -> str:
    """Replace private strings, absolute paths, and URLs of hosts not in `HOSTS` by `...`.

    `private` are the private strings, by default those of `private_strings()`. They match in any
    case and as whole words. URLs of `HOSTS` lose their query. A path is taken to end at the next
    quote, `: ` or line end, because folder names may contain blanks. Paths of installed Python
    files are kept from their package on, and names of files that every model has, such as
    config.json, are kept.
    """
    text = unicodedata.normalize("NFC", text.replace(_KNOWN, "").replace(_SLASH, ""))
    for root, package in _code_roots():
        inside = rf"{re.escape(root)}/({package}(?:[\w.-]+/)*[\w.-]+\.py)\b"
        text = re.sub(inside, rf"{CUT}/\1", text)
    known = private_strings() if private is None else private
    for one in sorted({unicodedata.normalize("NFC", one) for one in known}, key=len)[::-1]:
        pattern = r"\s+".join(map(re.escape, one.split()))
        mark = _KNOWN if "/" in one or "\\" in one else CUT
        text = re.sub(rf"(?<!\w){pattern}(?!\w)", mark, text, flags=re.IGNORECASE)
    text = _FILE_URL.sub(CUT, text)
    text = _URL.sub(lambda found: _url(found[0]), text)
    text = _HOST.sub(rf"\1\2{CUT}\2", text)
    return _PATH.sub(lambda found: _path(found[0]), text).replace(_SLASH, "/")


def private_strings(*paths: str | Path | None) -> list[str]:
    """Return strings that identify this machine, its user, or the given paths and their parents."""
    found = {one for one in _strings(paths) if re.search(r"\w", one)}
    return sorted(one for one in found if one.lower() not in COMMON)


def _strings(paths: Iterable[str | Path | None]) -> Iterator[str]:
    host = socket.gethostname()
    yield from (host, host.partition(".")[0])
    with contextlib.suppress(OSError, KeyError):  # a user id without a name
        yield getpass.getuser()
    with contextlib.suppress(KeyError):
        user = pwd.getpwuid(os.getuid())
        yield from (user.pw_name, user.pw_gecos.partition(",")[0].strip())
    for name, value in os.environ.items():
        if name.lower().endswith("_proxy") or name == "HF_ENDPOINT":
            with contextlib.suppress(ValueError):
                yield urlsplit(value).hostname or ""
    for folder in (Path.home(), Path.cwd(), Path(tempfile.gettempdir())):
        yield from _folders(folder)
    for path in paths:
        if path is not None:
            yield from _of_path(path)


def _of_path(path: str | Path) -> Iterator[str]:
    if "/" in str(path):
        yield str(path)
    for one in {Path(path), Path(path).expanduser().absolute()}:
        yield from _folders(one)
        below = [part for part in (*one.parts, *one.resolve().parts) if part != one.anchor]
        yield from (part for part in below if part not in USUAL and len(part) >= LEAST_NAME)


def _folders(path: Path) -> Iterator[str]:
    for one in (path, path.resolve()):
        yield from (str(folder) for folder in (one, *one.parents) if folder != Path())


def _code_roots() -> list[tuple[str, str]]:
    """Return folders of installed code, with the prefix of paths below them that are kept."""
    paths = sysconfig.get_paths()
    installed = [(paths[name], "") for name in ("purelib", "platlib", "stdlib")]
    return [*installed, (str(Path(mlxcache.__file__).parent.parent), "mlxcache/")]


def _url(url: str) -> str:
    try:
        parts = urlsplit(url)
    except ValueError:
        return CUT
    if parts.hostname not in HOSTS or "@" in parts.netloc:
        return CUT
    return url.partition("?")[0].replace("/", _SLASH)


def _path(path: str) -> str:
    public = _PUBLIC.search(path)
    return f"{CUT}/{public[1]}" if public else CUT
