"""xxh3-64 over each block of a run, all its tensors in order; of buffers, and of files."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from xxhash import xxh3_64

from mlxcache.store.digests import BLOCK
from mlxcache.store.safetensors import Header, Malformed, Place

BUFFER_BYTES = 4 << 20
_AHEAD = 16 << 20
_PAUSE_BYTES = 1 << 20
_PAUSE_S = 50e-6

_mine = threading.local()


def of_blocks(buffers: Sequence[memoryview], tokens: int) -> list[bytes]:
    """A checksum per block of `tokens` tokens, the first axis of each of `buffers`.

    A block's bytes are too few for xxhash to release the interpreter's lock, so this pauses every
    now and then: else the MLX thread waits 5 ms each time it wants the lock back.
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


def of_whole(buffers: Sequence[memoryview]) -> bytes:
    """One checksum over all of `buffers`, in order."""
    state = xxh3_64()
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


def of_file_blocks(fd: int, places: Iterable[Place], tokens: int, blocks: range) -> list[bytes]:
    """As `of_blocks`, read from a file of `tokens` tokens: those of `blocks`, over `places` of it.

    Raises Malformed where the file ends early or a tensor is not token-major, and OSError.
    """
    states = [xxh3_64() for _ in blocks]
    for place, ahead in _with_ends(list(places)):
        if not place.shape or place.shape[0] != tokens:
            raise Malformed(f"tensor {place.name!r} is not one of {tokens} tokens")
        row = place.nbytes // tokens
        start = blocks.start * BLOCK * row
        stop = min(blocks.stop * BLOCK, tokens) * row
        end = place.offset + stop
        more = ahead if stop - start == place.nbytes else end
        for at, view in _chunks(fd, place.offset + start, end, more):
            _update(states, BLOCK * row, at - place.offset - start, view)
    return [state.digest() for state in states]


def of_file(fd: int, header: Header) -> bytes:
    """As `of_whole`, read from a file."""
    state = xxh3_64()
    for place, ahead in _with_ends(header.places):
        for _, view in _chunks(fd, place.offset, place.offset + place.nbytes, ahead):
            state.update(view)
    return state.digest()


def _update(states: list[xxh3_64], size: int, at: int, view: memoryview) -> None:
    """Give each block of `size` bytes its part of `view`, which begins `at` bytes into them."""
    done = 0
    while done < len(view):
        index = (at + done) // size
        end = min((index + 1) * size - at, len(view))
        states[index].update(view[done:end])
        done = end


def _with_ends(places: Sequence[Place]) -> list[tuple[Place, int]]:
    """Each place, and where the places that follow it without a gap end."""
    found: list[tuple[Place, int]] = []
    end = next_start = -1
    for place in reversed(places):
        end = end if place.offset + place.nbytes == next_start else place.offset + place.nbytes
        next_start = place.offset
        found.append((place, end))
    return found[::-1]


def _chunks(fd: int, start: int, stop: int, ahead: int) -> Iterator[tuple[int, memoryview]]:
    """(offset, bytes) over [start, stop); the bytes are those of a buffer that is used again.

    Up to `ahead` will be read next.
    """
    if not hasattr(_mine, "buffer"):
        _mine.buffer = memoryview(bytearray(BUFFER_BYTES))
    buffer: memoryview = _mine.buffer
    file = io.FileIO(fd, closefd=False)
    file.seek(start)
    while start < stop:
        if hasattr(os, "posix_fadvise"):  # so that the disk reads on while this part is hashed
            os.posix_fadvise(fd, start, min(_AHEAD, ahead - start), os.POSIX_FADV_WILLNEED)
        view = buffer[: min(BUFFER_BYTES, stop - start)]
        count = file.readinto(view)
        if not count:
            raise Malformed("it ends too early")
        yield start, view[:count]
        start += count
