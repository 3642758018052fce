"""Removal of what tells whose machine it is from texts that are to be published."""

from __future__ import annotations

import contextlib
import getpass
import re
import socket
from collections.abc import Iterable

PATH = re.compile(r"(?<![\w.:/])(?:~[/\\]|/|[A-Za-z]:[\\/])(?:[^\s/\\:'\"]+[/\\])+")
"""Folders of an absolute path, up to its last name."""

COMMON = frozenset({"root", "user", "admin", "localhost", "mlxcache", "model", "runner"})
"""Names that tell nothing, and are words of error messages."""


def scrub(text: str, names: Iterable[str] | None = None) -> str:
    """Replace folders of paths, and `names` (default: `private_names`) as whole words."""
    text = PATH.sub(".../", text)
    for name in private_names() if names is None else names:
        text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", text, flags=re.IGNORECASE)
    return text


def private_names() -> list[str]:
    """This user's and this host's names, the longest first, without those that tell nothing."""
    host = socket.gethostname()
    names = {host, host.partition(".")[0]}
    with contextlib.suppress(OSError, KeyError):  # a user id without a name
        names.add(getpass.getuser())
    return sorted((one for one in names if one and one.lower() not in COMMON), key=len)[::-1]
