"""Whether a file is a snapshot, before it is sent anywhere; and what it is where it is none."""

from __future__ import annotations

import os
from pathlib import Path

from mlxcache.config import format_size
from mlxcache.errors import MlxcacheError, SnapshotRefused
from mlxcache.store.snapshot_check import format_of
from mlxcache.store.snapshot_info import FORMAT

EXPECTED = (
    "Expected is a file that `mlxcache snapshot ID -o FILE` wrote, or mlx-lm's "
    "`mlx_lm.cache_prompt`."
)
_HEAD = 4096
_SHOWN = 40
_LENGTH = 8  # bytes that say how long the header is
_OFFSETS = b'"data_offsets"'  # of each tensor there is

_ARCHIVES = (
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "zip"),
    (b"BZh", "bzip2"),
    (b"\xfd7zXZ", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)


def check(file: Path) -> None:
    """Raises MlxcacheError, with what was expected and what was found, unless it is a snapshot."""
    try:
        format_of(file)
    except SnapshotRefused as error:
        raise MlxcacheError(
            f"{file} is no snapshot: {_what_is(file, error)}. {EXPECTED}"
        ) from error


def _what_is(file: Path, error: SnapshotRefused) -> str:
    try:
        with file.open("rb") as opened:
            head = opened.read(_HEAD)
            size = os.fstat(opened.fileno()).st_size
    except OSError as failure:
        raise MlxcacheError(f"{file} cannot be read: {failure.strerror}.") from failure
    if not head:
        return "it is empty"
    for start, name in _ARCHIVES:
        if head.startswith(start):
            return f"it is packed with {name}; unpack it first"
    if f'"{FORMAT}"'.encode() in head[_LENGTH:]:
        return f"it is a snapshot, but cut off or damaged. {str(error).rstrip('.')}"
    if _OFFSETS in head[_LENGTH:]:
        why = str(error).rstrip(".")
        return f"it is a safetensors file of something else, such as weights, or cut off. {why}"
    text = _text(head)
    if text is not None:
        return f"it is a text, which begins with {text[:_SHOWN]!r}"
    return f"it is {format_size(size)} of something else"


def _text(head: bytes) -> str | None:
    try:
        text = head.decode(errors="strict" if len(head) < _HEAD else "ignore").strip()
    except UnicodeDecodeError:
        return None
    shown = text[:_SHOWN]
    return shown if all(c.isprintable() or c.isspace() for c in shown) else None
