"""Files of runs and checkpoints: metadata, checksums, and verification before use.

The format is described in docs/disk-format.md.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from xxhash import xxh3_64

from mlxcache import disk_calls
from mlxcache.safetensors import Header, Malformed, Place, Tensor, compose, read_header
from mlxcache.store.digests import BLOCK, DIGEST_BYTES, Chain, block_digests, partial_digest
from mlxcache.store.folder import CHECKPOINT, RUN
from mlxcache.store.found import RunPart
from mlxcache.store.index import Row
from mlxcache.types import Tokens, ids_of_bytes

VERSION = "1"

KV_FORMAT = 1
"""Version of the KV in all files, a part of each model's namespace.

It is raised when KV stored before must not be used any more, although its files can be read.
"""

_CHECKSUM_BYTES = 8

READ_BYTES = 1 << 20
"""Most bytes read by one call: they stay in a processor's cache while they are hashed."""

_CACHED_BYTES = 512 << 10

_PAUSE_BYTES, _PAUSE_S = 1 << 20, 50e-6
"""Bytes hashed between two pauses, in which other threads take the lock, and seconds of one."""

_EXPONENTS = {
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F32": ("<u4", 0x7F80_0000),
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
}
"""Unsigned type and exponent bits by dtype; all exponent bits set mean NaN or infinity."""


@dataclass(frozen=True, slots=True, eq=False)
class RunHeader:
    """Metadata of a run file. `checksums`: one per block; the last block may be partial."""

    namespace: str
    base: bytes
    start: int
    tokens: Tokens
    checksums: tuple[bytes, ...]
    places: tuple[Place, ...]

    @property
    def digests(self) -> list[bytes]:
        return block_digests(self.base, self.tokens)

    @property
    def digest(self) -> bytes:
        whole = len(self.tokens) // BLOCK
        return partial_digest([self.base, *self.digests][whole], self.tokens[whole * BLOCK :])


@dataclass(frozen=True, slots=True)
class CheckpointHeader:
    """Metadata of a checkpoint file; `previous`: the checkpoint before it then, or empty."""

    namespace: str
    digest: bytes
    base: bytes
    position: int
    previous: bytes
    checksum: bytes
    places: tuple[Place, ...]


def compose_run(chain: Chain, start: int, stop: int, tensors: Sequence[Tensor]) -> bytes:
    sums = block_checksums([tensor.bytes for tensor in tensors], stop - start)
    metadata = {
        "format": f"mlxcache-{RUN}",
        "version": VERSION,
        "namespace": chain.namespace,
        "base": chain.whole[start // BLOCK].hex(),
        "start": str(start),
        "tokens": base64.b64encode(chain.ids[start:stop].tobytes()).decode(),
        "checksums": b"".join(sums).hex(),
    }
    return compose(metadata, tensors)


def compose_checkpoint(chain: Chain, previous: bytes, tensors: Sequence[Tensor]) -> bytes:
    position = len(chain.ids)
    metadata = {
        "format": f"mlxcache-{CHECKPOINT}",
        "version": VERSION,
        "namespace": chain.namespace,
        "digest": chain.at(position).hex(),
        "base": chain.whole[position // BLOCK].hex(),
        "position": str(position),
        "previous": previous.hex(),
        "checksum": checksum_of([tensor.bytes for tensor in tensors]).hex(),
    }
    return compose(metadata, tensors)


def read_run(fd: int) -> RunHeader:
    return run_of(read_header(fd))


def run_of(header: Header) -> RunHeader:
    try:
        _expect(header, RUN)
        words = header.metadata
        tokens = ids_of_bytes(base64.b64decode(words["tokens"], validate=True))
        sums = _sums(words["checksums"])
        run = RunHeader(
            words["namespace"],
            bytes.fromhex(words["base"]),
            int(words["start"]),
            tokens,
            sums,
            header.places,
        )
    except (KeyError, ValueError, binascii.Error) as error:
        raise Malformed(f"its metadata is not that of a run ({error})") from error
    count = len(tokens)
    if not count or run.start % BLOCK or run.start < 0 or len(run.base) != DIGEST_BYTES:
        raise Malformed("its metadata is not that of a run")
    blocks = (count + BLOCK - 1) // BLOCK
    if len(sums) != blocks:
        raise Malformed("it does not have one checksum per block")
    return run


def _sums(text: str) -> tuple[bytes, ...]:
    sums = bytes.fromhex(text)
    return tuple(sums[at : at + 8] for at in range(0, len(sums), _CHECKSUM_BYTES))


def read_checkpoint(fd: int) -> CheckpointHeader:
    return checkpoint_of(read_header(fd))


def checkpoint_of(header: Header) -> CheckpointHeader:
    try:
        _expect(header, CHECKPOINT)
        words = header.metadata
        checkpoint = CheckpointHeader(
            words["namespace"],
            bytes.fromhex(words["digest"]),
            bytes.fromhex(words["base"]),
            int(words["position"]),
            bytes.fromhex(words["previous"]),
            bytes.fromhex(words["checksum"]),
            header.places,
        )
    except (KeyError, ValueError) as error:
        raise Malformed(f"its metadata is not that of a checkpoint ({error})") from error
    if len(checkpoint.digest) != DIGEST_BYTES or checkpoint.position <= 0:
        raise Malformed("its metadata is not that of a checkpoint")
    return checkpoint


def _expect(header: Header, kind: str) -> None:
    words = header.metadata
    if words["format"] != f"mlxcache-{kind}" or words["version"] != VERSION:
        raise Malformed(f"it is not a {kind} of format version {VERSION}")


def block_checksums(buffers: Sequence[memoryview], tokens: int) -> list[bytes]:
    """Compute the xxh3-64 checksum of each block of 64 tokens; the last block may be partial.

    `buffers`: the bytes of one tensor each, whose first axis is the tokens. xxhash does not release
    the interpreter's lock for inputs as small as a block, so this function pauses after every MiB.
    Without pauses the MLX thread would wait 5 ms each time it needs the lock.
    """
    found, hashed = [], 0
    for first in range(0, tokens, BLOCK):
        state = xxh3_64()
        last = min(first + BLOCK, tokens)
        for buffer in buffers:
            row = len(buffer) // tokens
            state.update(buffer[first * row : last * row])
            hashed += (last - first) * row
            if hashed >= _PAUSE_BYTES:
                time.sleep(_PAUSE_S)
                hashed = 0
        found.append(state.digest())
    return found


def checksum_of(buffers: Sequence[memoryview]) -> bytes:
    state = xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


def file_block_checksums(
    fd: int, places: Iterable[Place], tokens: int, blocks: range
) -> list[bytes]:
    states = [xxh3_64() for _ in blocks]
    first, last = blocks.start * BLOCK, min(blocks.stop * BLOCK, tokens)
    ranges, sizes = [], []
    for place in places:
        if not place.shape or place.shape[0] != tokens:
            raise Malformed(f"tensor {place.name!r} does not have {tokens} rows, one per token")
        row = place.nbytes // tokens
        ranges.append((place.offset + first * row, place.offset + last * row))
        sizes.append(BLOCK * row)
    for index, at, view in _parts(fd, ranges):
        update_blocks(states, sizes[index], at, view)
    return [state.digest() for state in states]


def file_checksum(fd: int, places: Sequence[Place]) -> bytes:
    state = xxh3_64()
    for _, _, view in _parts(fd, [(p.offset, p.offset + p.nbytes) for p in places]):
        state.update(view)
    return state.digest()


def update_blocks(states: list[xxh3_64], size: int, at: int, view: memoryview) -> None:
    """Update consecutive blocks' hashes with bytes at offset `at` from the first one's start."""
    done = 0
    while done < len(view):
        index = (at + done) // size
        end = (index + 1) * size - at
        states[index].update(view[done:end])
        done = end


def _parts(fd: int, ranges: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, memoryview]]:
    """Yield the bytes of ascending ranges [start, stop) of a file in parts, each byte once.

    A part is the index of its range, its offset in that range, and its bytes, which are valid until
    the next step. Ranges that touch are read together. Raises Malformed if the file ends early.
    """
    ends = [stop for _, stop in ranges]
    for i in reversed(range(len(ranges) - 1)):
        if ends[i] == ranges[i + 1][0]:
            ends[i] = ends[i + 1]
    buffer = memoryview(bytearray(READ_BYTES))
    at = read = 0  # the buffer holds the bytes [at, read) of the file
    for index, (start, stop) in enumerate(ranges):
        done = start
        while done < stop:
            if done >= read:
                at, read = done, min((done // READ_BYTES + 1) * READ_BYTES, ends[index])
                read_range(fd, at, buffer[: read - at])
            end = min(stop, read)
            yield index, done - start, buffer[done - at : end - at]
            done = end


def read_range(fd: int, at: int, into: memoryview) -> None:
    """Fill `into` from offset `at` of an open file. Raises Malformed."""
    file = io.FileIO(fd, closefd=False)
    file.seek(at)
    done = 0
    while done < len(into):
        count = file.readinto(into[done : done + READ_BYTES])
        if not count:
            raise Malformed("it ends before its last tensor")
        done += count


def check_run(fd: int, namespace: str, base: bytes, piece: RunPart, ids: Tokens) -> None:
    """Check that an open run file contains the KV of `ids` that `piece` describes."""
    content = read_run(fd)
    if content.namespace != namespace or content.base != base:
        raise Malformed("it belongs to another prefix")
    if (content.start, content.start + len(content.tokens)) != (piece.first, piece.last):
        raise Malformed("it holds other positions")
    wanted = slice(piece.start - piece.first, piece.end - piece.first)
    if not np.array_equal(content.tokens[wanted], ids[piece.start : piece.end]):
        raise Malformed("it holds other tokens")
    blocks = range(wanted.start // BLOCK, (wanted.stop + BLOCK - 1) // BLOCK)
    _check_blocks(fd, content, blocks)


def check_checkpoint(fd: int, namespace: str, digest: bytes, position: int) -> None:
    disk_calls.read_ahead(fd)
    content = read_checkpoint(fd)
    if content.namespace != namespace or content.digest != digest:
        raise Malformed("it belongs to another prefix")
    if content.position != position:
        raise Malformed("it holds another position")
    if file_checksum(fd, content.places) != content.checksum:
        raise Malformed("its checksum is wrong")


def check_whole(path: Path, row: Row) -> None:
    """Raise Malformed unless a whole file agrees with its index row and its checksums."""
    with open_file(path) as fd:
        if os.fstat(fd).st_size != row.nbytes:
            raise Malformed("its size differs from that in the index")
        disk_calls.read_ahead(fd)
        if row.kind == RUN:
            content = read_run(fd)
            if (content.start, content.digest) != (row.start, row.digest):
                raise Malformed("it holds another run than its name says")
            _check_blocks(fd, content, range(len(content.checksums)))
        else:
            state = read_checkpoint(fd)
            if (state.position, state.digest) != (row.start, row.digest):
                raise Malformed("it holds another checkpoint than its name says")
            if file_checksum(fd, state.places) != state.checksum:
                raise Malformed("its checksum is wrong")


def _check_blocks(fd: int, content: RunHeader, blocks: range) -> None:
    found = file_block_checksums(fd, content.places, len(content.tokens), blocks)
    if tuple(found) != content.checksums[blocks.start : blocks.stop]:
        raise Malformed("the checksum of a block is wrong")


def read_ahead(path: Path) -> None:
    with suppress(OSError), open_file(path) as fd:
        disk_calls.read_ahead(fd)


@contextmanager
def open_file(path: Path, *, links: bool = False) -> Iterator[int]:
    fd = os.open(path, os.O_RDONLY | (0 if links else os.O_NOFOLLOW))
    try:
        yield fd
    finally:
        os.close(fd)


def is_run_finite(path: Path, row: int) -> bool:
    try:
        with open_file(path) as fd:
            return all(is_place_finite(fd, one, row) for one in read_header(fd).places)
    except (Malformed, OSError):
        return False


def is_place_finite(fd: int, place: Place, row: int = 0) -> bool:
    if place.dtype not in _EXPONENTS or not place.nbytes:
        return True
    end = place.offset + place.nbytes
    begin = place.offset + (row * (place.nbytes // place.shape[0]) if row else 0)
    return all(
        is_finite(place.dtype, memoryview(os.pread(fd, min(READ_BYTES, end - at), at)))
        for at in range(begin, end, READ_BYTES)
    )


def is_finite(dtype: str, data: memoryview) -> bool:
    """Return whether no number in `data` is NaN or infinity; integers never are."""
    if dtype not in _EXPONENTS:
        return True
    kind, bits = _EXPONENTS[dtype]
    sign = 1 << 8 * np.dtype(kind).itemsize - 1
    for at in range(0, len(data), _CACHED_BYTES):
        values = np.frombuffer(data[at : at + _CACHED_BYTES], kind)
        # read as integers, NaN and infinity are the largest, without and with a sign
        positive, negative = values.view(kind.replace("u", "i")).max(), values.max()
        if positive >= bits or negative >= sign | bits:
            return False
    return True
