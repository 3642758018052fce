"""URL and key of a shared remote: the values of `--remote` and `--remote-key-file`."""

from __future__ import annotations

import logging
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from mlxcache.errors import ConfigError

log = logging.getLogger("mlxcache.server")

KEY_BYTES = 32
"""Bytes of a key."""

MAKE_KEY = "(umask 077; openssl rand -hex 32 > FILE)"
"""Shell command that makes a file with a key."""

SCHEMES = ("s3", "gs", "az", "file")


@dataclass(frozen=True, slots=True)
class RemoteUrl:
    """Parts of the URL of a remote.

    `scheme`: s3, gs, az or file. `bucket`: the bucket, or the container of Azure; empty for `file`.
    `prefix`: the beginning of the paths of all objects, without slashes at its ends; for `file` the
    absolute path of the folder.
    """

    scheme: str
    bucket: str
    prefix: str

    def __str__(self) -> str:
        if self.scheme == "file":
            return f"file://{self.prefix}"
        return f"{self.scheme}://{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")


def read_remote_url(value: object) -> RemoteUrl:
    """Parse the URL of a remote. A RemoteUrl is returned unchanged.

    Raises ValueError for anything else, and for a URL with a user, a key or options: error messages
    and figures show the URL, so it must hold no secret. The message about a URL with these does not
    repeat it.
    """
    example = "must be a URL such as s3://bucket/prefix, gs://..., az://... or file:///path"
    if isinstance(value, RemoteUrl):
        return value
    if not isinstance(value, str):
        raise ValueError(f"{example}, not {value!r}")
    parts = urlsplit(value.strip())
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(
            f"{example}, without keys or options: set those in the environment, such as "
            "AWS_ACCESS_KEY_ID and AWS_ENDPOINT_URL"
        )
    if parts.scheme not in SCHEMES:
        raise ValueError(f"{example}, not {value!r}")
    path = unquote(parts.path).strip("/")
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost") or not path:
            raise ValueError(f"{example} with three slashes and an absolute path, not {value!r}")
        return RemoteUrl("file", "", f"/{path}")
    if not parts.netloc:
        raise ValueError(f"{example}: {value!r} names no bucket")
    return RemoteUrl(parts.scheme, parts.netloc, path)


def read_remote_key(path: Path) -> bytes:
    """Read a file of `--remote-key-file`: 64 hexadecimal digits. Returns `KEY_BYTES` bytes.

    Logs a warning if other users can read the file. Raises ConfigError, whose message never
    contains the key.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(4 * KEY_BYTES)
    except OSError as error:
        raise ConfigError(f"--remote-key-file: cannot read {path}: {error.strerror}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning(
            "the remote's key is not private, other users can read %s: run chmod 600 on it", path
        )
    text = raw.decode("latin-1").strip()
    if not re.fullmatch(rf"[0-9a-fA-F]{{{2 * KEY_BYTES}}}", text):
        raise ConfigError(
            f"--remote-key-file: {path} must hold {2 * KEY_BYTES} hexadecimal digits and nothing "
            f"else; make a key with {MAKE_KEY.replace('FILE', str(path))}"
        )
    return bytes.fromhex(text)
