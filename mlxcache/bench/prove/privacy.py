"""Remove text that identifies a machine or its user from a report to be published."""

from __future__ import annotations

import contextlib
import getpass
import os
import pwd
import re
import socket
import sysconfig
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import mlxcache

CUT = "..."
HOSTS = frozenset({"huggingface.co", "github.com", "127.0.0.1", "localhost"})
"""Hosts whose URLs are kept, without the query."""

COMMON = frozenset({"localhost", "mlxcache", "model", "models", "snapshots"})
"""Names that identify nobody and occur in the report, so they are kept."""

LEAST_NAME = 3
"""Minimum letters of a folder's name to be removed as a word of its own."""

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
    """Return strings that identify this machine, its user, or the given `paths`.

    Each path contributes itself, its parents and their names, both as given and resolved.
    """
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
        usual = {part for root in _roots() for part in root.parts}
        yield from (part for part in below if part not in usual and len(part) >= LEAST_NAME)


def _folders(path: Path) -> Iterator[str]:
    for one in (path, path.resolve()):
        yield from (str(folder) for folder in (one, *one.parents) if folder != Path())


def _roots() -> tuple[Path, ...]:
    """Return folders that exist on most machines and so identify none of them."""
    usual = "/Users", "/Volumes", "/home", "/private/var/folders", "/mnt", "/opt", "/tmp"
    return tuple(map(Path, usual))


def _code_roots() -> list[tuple[str, str]]:
    """Return folders of installed code, each with the prefix that a path below it must have.

    Such a path is kept in a report, and only the folder before it is removed.
    """
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
