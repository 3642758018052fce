"""Reading and writing of safetensors headers, which are validated before use.

Files written by mlxcache also have a checksum of the header in its metadata.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

from xxhash import xxh3_64_hexdigest

from mlxcache.utf8 import NotUtf8, decode_utf8

ITEM_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of each dtype, by its safetensors name."""


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """An array to be written to a file; `data` is C-contiguous and must not change meanwhile."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview

    def __post_init__(self) -> None:
        view = memoryview(self.data)
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"{self.name}: safetensors does not support the dtype {self.dtype!r}")
        if not view.c_contiguous:
            raise ValueError(f"{self.name}: its bytes are not contiguous")
        if view.nbytes != self.nbytes:
            raise ValueError(
                f"{self.name}: {self.dtype} of shape {self.shape} takes {self.nbytes} bytes, "
                f"not {view.nbytes}"
            )

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def bytes(self) -> memoryview:
        view = memoryview(self.data)
        return view.cast("B") if view.nbytes else memoryview(b"")


MAX_HEADER = 100_000_000

MOST_FOREIGN = 8 << 20

_MOST_VALUES = 1 << 18  # a value takes tens of bytes once it is decoded, its text as few as two

_LENGTH = 8
_ALIGN = 64
_MOST_AXES = 8  # the product of many large sizes would take minutes
OPENING = b'{"__metadata__":{"check":"'

_NO_CHECK = b"0" * 16

_FIRST_READ = 256 << 10
"""Bytes of the first read of a file; with fewer, Linux at times reads the rest in small pages."""


class Malformed(ValueError): ...


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor in a file; `offset` is in bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """Header of a safetensors file.

    `metadata`: the strings under `__metadata__`. `places`: the tensors in the order of their data,
    which fill the file after the header without gap or overlap. `nbytes`: size of the whole file.
    """

    metadata: Mapping[str, str]
    places: tuple[Place, ...]
    nbytes: int


def compose(
    metadata: Mapping[str, str], tensors: Sequence[Tensor] | Sequence[Place], *, own: bool = True
) -> bytes:
    """Return the bytes of a file before its payload, which is the data of `tensors` in order.

    With `own`, a checksum of the header is added to the metadata. Raises ValueError if two tensors
    have the same name, or the header is longer than `MAX_HEADER`.
    """
    check = {"check": _NO_CHECK.decode()} if own else {}
    table: dict[str, Any] = {"__metadata__": {**check, **metadata}}
    at = 0
    for tensor in tensors:
        if tensor.name in table:
            raise ValueError(f"two tensors are named {tensor.name!r}")
        table[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=True).encode()
    text += b" " * (-(_LENGTH + len(text)) % _ALIGN)
    if len(text) > MAX_HEADER:
        raise ValueError(f"a header of {len(text)} bytes is more than the format allows")
    raw = len(text).to_bytes(_LENGTH, "little") + text
    if own:
        at = _LENGTH + len(OPENING)
        raw = raw[:at] + xxh3_64_hexdigest(raw).encode() + raw[at + len(_NO_CHECK) :]
    return raw


def read_header(fd: int, *, own: bool = True) -> Header:
    """Read the header of the open file `fd`, with `own` also its checksum. Raises Malformed."""
    return _checked(_raw_header(fd, MAX_HEADER), os.fstat(fd).st_size, own=own)


def header_of(data: bytes) -> Header:
    """Read the header of a file that mlxcache wrote, maybe on another machine, from its content."""
    length = int.from_bytes(data[:_LENGTH], "little")
    if not 2 <= length <= min(MOST_FOREIGN, len(data) - _LENGTH):
        raise Malformed("its header does not fit into it")
    return _foreign(data[: _LENGTH + length], len(data), own=True)


def read_foreign_header(fd: int, *, own: bool) -> Header:
    """Read the header of a file from another machine, in at most 64 MB of memory."""
    return _foreign(_raw_header(fd, MOST_FOREIGN), os.fstat(fd).st_size, own=own)


def _foreign(raw: bytes, size: int, *, own: bool) -> Header:
    if not is_foreign_size(raw[_LENGTH:]):
        raise Malformed("its header has too many entries")
    return _checked(raw, size, own=own)


def _checked(raw: bytes, size: int, *, own: bool) -> Header:
    at = _LENGTH + len(OPENING)
    stored = raw[at : at + len(_NO_CHECK)]
    zeroed = raw[:at] + _NO_CHECK + raw[at + len(_NO_CHECK) :]
    if own and (raw[_LENGTH:at] != OPENING or stored != xxh3_64_hexdigest(zeroed).encode()):
        raise Malformed("its header is damaged, or not of mlxcache")
    return parse(raw[_LENGTH:], size)


def _raw_header(fd: int, most: int) -> bytes:
    size = os.fstat(fd).st_size
    head = os.pread(fd, _FIRST_READ, 0)
    length = int.from_bytes(head[:_LENGTH], "little")
    if len(head) > _LENGTH and 2 <= length <= min(most, size - _LENGTH):
        end = _LENGTH + length
        return head[:end] + _pread(fd, max(0, end - len(head)), len(head))
    if head[_LENGTH:].startswith(OPENING) and length <= most:
        raise Malformed(
            f"it was cut short: {size:,} bytes are there, and its header alone takes "
            f"{_LENGTH + length:,}"
        )
    raise Malformed("its header does not fit into it")


def is_foreign_size(text: bytes) -> bool:
    return len(text) <= MOST_FOREIGN and text.count(b",") + text.count(b":") <= _MOST_VALUES


def parse(text: bytes, size: int) -> Header:
    try:
        table = json.loads(decode_utf8(text, _LENGTH), object_pairs_hook=_unique)
    except NotUtf8 as error:
        raise Malformed(f"its header {error}") from error
    except (ValueError, RecursionError) as error:
        raise Malformed(f"its header is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise Malformed("its header is not a JSON object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise Malformed("its metadata is not an object of strings")
    payload = _LENGTH + len(text)
    places = sorted(
        (_place(name, entry, payload) for name, entry in table.items()),
        key=lambda place: (place.offset, place.nbytes),
    )
    end = payload
    for place in places:
        if place.offset != end:
            raise Malformed(f"tensor {place.name!r} does not begin where the one before ends")
        end += place.nbytes
    if end > size:
        raise Malformed(f"it was cut short: {size:,} of its {end:,} bytes are there")
    if end < size:
        raise Malformed(f"it goes on after its end: it has {size:,} bytes instead of {end:,}")
    return Header(metadata, tuple(places), size)


def _place(name: str, entry: object, payload: int) -> Place:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"tensor {name!r} has an invalid description")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and dtype in ITEM_BYTES):
        raise Malformed(f"tensor {name!r} has an unknown dtype")
    if not (_numbers(shape) and _numbers(offsets) and len(offsets) == 2):
        raise Malformed(f"tensor {name!r} has an invalid shape or offset")
    begin, end = offsets
    if end - begin != prod(shape) * ITEM_BYTES[dtype]:
        raise Malformed(f"tensor {name!r} has the wrong number of bytes for its shape")
    return Place(name, dtype, tuple(shape), payload + begin, end - begin)


def _numbers(value: object) -> bool:
    few = isinstance(value, list) and len(value) <= _MOST_AXES
    return few and all(type(n) is int and 0 <= n < 2**63 for n in cast("list[object]", value))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("duplicate key")
    return table


def _pread(fd: int, length: int, offset: int) -> bytes:
    data = os.pread(fd, length, offset)
    while len(data) < length:
        more = os.pread(fd, length - len(data), offset + len(data))
        if not more:
            raise Malformed("it ends too early")
        data += more
    return data
