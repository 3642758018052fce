"""Keys: those that clients must send, and the one that encrypts a shared remote."""

from __future__ import annotations

import logging
import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mlxcache.errors import ConfigError

if TYPE_CHECKING:
    from mlxcache.config.settings import Settings

log = logging.getLogger("mlxcache.server")

MOST_BYTES = 1 << 20

KEY_BYTES = 32

MAKE_KEY = "(umask 077; openssl rand -hex 32 > FILE)"


@dataclass(frozen=True, slots=True)
class Keys:
    """API keys of a server, and the names in the file of keys.

    `owned`: each key has sessions of its own. It is false without keys and for a single key that is
    not from a file: then all clients share all sessions.
    """

    values: tuple[str, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = ()
    owned: bool = False


def read_keys(settings: Settings) -> Keys:
    """Collect the keys of `--api-key` and of the file of `--api-keys-file`."""
    named = [("", key) for key in settings.api_key]
    if settings.api_keys_file is not None:
        named += _file(settings.api_keys_file)
    values = tuple(dict.fromkeys(key for _, key in named))
    names = tuple(dict.fromkeys(name for name, _ in named if name))
    return Keys(values, names, len(values) > 1 or settings.api_keys_file is not None)


def _file(path: Path) -> list[tuple[str, str]]:
    """Read a file of keys, and return pairs of name and key.

    The name is "" for a key without one. Logs a warning if other users can read the file. Raises
    ConfigError if the file cannot be read or is not valid; the message never contains a key.
    """
    raw = read_secret(path, MOST_BYTES + 1, flag="--api-keys-file", what="API keys are")
    if len(raw) > MOST_BYTES:
        raise ConfigError(f"--api-keys-file: {path} is larger than {MOST_BYTES:,} bytes: split it")
    try:
        lines = raw.decode("ascii").splitlines()
    except UnicodeDecodeError as error:
        wrong = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"--api-keys-file: line {wrong} of {path} is not printable ASCII, as keys must be"
        ) from None  # the error holds the keys
    found: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text and not text.startswith("#"):
            found.append(_entry(text, f"line {number} of {path}"))
    if not found:
        raise ConfigError(f"--api-keys-file: {path} has no key: write KEY or NAME:KEY in a line")
    if len({key for _, key in found}) < len(found):
        raise ConfigError(f"--api-keys-file: {path} has the same key twice: remove one")
    return found


def _entry(text: str, where: str) -> tuple[str, str]:
    name, colon, key = text.partition(":")
    name, key = (name.strip(), key.strip()) if colon else ("", text)
    if not key or " " in key or not key.isprintable():
        raise ConfigError(f"--api-keys-file: {where} must be KEY or NAME:KEY, without blanks")
    return name, key


def read_remote_key(path: Path) -> bytes:
    """Read a file of `--remote-key-file`: 64 hexadecimal digits. Returns `KEY_BYTES` bytes.

    Logs a warning if other users can read the file. Raises ConfigError, whose message never
    contains the key.
    """
    raw = read_secret(path, 4 * KEY_BYTES, flag="--remote-key-file", what="the remote's key is")
    text = raw.decode("latin-1").strip()
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", text):
        raise ConfigError(
            f"--remote-key-file: {path} must hold {2 * KEY_BYTES} hexadecimal digits and nothing "
            f"else; make a key with {MAKE_KEY.replace('FILE', str(path))}"
        )
    return bytes.fromhex(text)


def read_secret(path: Path, most: int, *, flag: str, what: str) -> bytes:
    """Return at most `most` bytes of the file that `flag` names; warn if others can read it.

    `what`: subject and verb of the warning. Raises ConfigError if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(most)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("%s not private, other users can read %s: run chmod 600 on it", what, path)
    return raw
