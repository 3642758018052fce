"""Synthetic KV that depends on every token before it, so that wrong content is detected."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from mlxcache.errors import Corrupt, Gone
from mlxcache.safetensors import Tensor, read_header
from mlxcache.store.found import Found
from mlxcache.store.kv_files import open_file
from mlxcache.store.store import Store
from mlxcache.types import Tokens, join_ids, token_ids

NAMESPACE = "model-a"
ROW = 3
"""Float32 numbers per token of the first tensor; the second has twice as many of 2 bytes."""


def tokens(count: int, seed: int = 0) -> Tokens:
    return token_ids(np.random.default_rng(seed).integers(0, 50_000, count, dtype=np.int32))


def branch(ids: Tokens, at: int, count: int, seed: int = 1) -> Tokens:
    """`count` tokens that share exactly the first `at` with `ids`."""
    tail = tokens(count - at, seed)
    if at < len(ids) and len(tail) and tail[0] == ids[at]:
        tail = join_ids(token_ids([int(tail[0]) + 1]), tail[1:])
    return join_ids(ids[:at], tail)


def state(ids: Tokens) -> np.ndarray:
    """One number per token that depends on all tokens up to it."""
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return np.cumsum(mixed * (np.arange(len(ids), dtype=np.uint64) + np.uint64(7)))


def kv(ids: Tokens, start: int = 0, row: int = ROW) -> list[Tensor]:
    """Tensors of tokens [start, len(ids)): F32 of shape (n, row) and BF16 of (n, 2, row)."""
    seen = state(ids)[start:]
    wide = (seen[:, None] >> np.arange(row, dtype=np.uint64)) % np.uint64(1 << 20)
    first = wide.astype(np.float32)
    second = (
        np.stack((wide, wide + np.uint64(1)), axis=1).astype(np.uint16) & 0x3FFF
    )  # of which none is NaN
    return [
        Tensor("layers.0.keys", "F32", first.shape, first.data),
        Tensor("layers.0.values", "BF16", second.shape, second.data),
    ]


def snapshot(ids: Tokens) -> list[Tensor]:
    last = state(ids)[-1:]
    return [
        Tensor("state", "U64", (1,), last.data),
        Tensor("none", "F16", (0, 4), memoryview(b"")),
        Tensor("conv", "U8", (11,), memoryview(last.tobytes() + b"abc")),
    ]


def run_bytes(count: int, row: int = ROW) -> int:
    """Bytes of the KV of `count` tokens."""
    return count * row * 8


def put(store: Store, ids: Tokens, start: int = 0, row: int = ROW) -> None:
    """Save tokens [start, len(ids))."""
    store.write_run(ids, start, kv(ids, start, row))


def turns(store: Store, ids: Tokens, *ends: int, row: int = ROW) -> None:
    start = 0
    for end in ends:
        put(store, ids[:end], start, row)
        start = end // 64 * 64


def assert_right(store: Store, ids: Tokens, row: int = ROW) -> Found:
    """Assert that all that is found of `ids` passes its checks and has the right content."""
    found = store.find(ids)
    at = 0
    right = kv(ids, 0, row)
    for piece in found.pieces:
        assert piece.start == at < piece.end
        assert piece.first <= piece.start
        assert piece.end <= piece.last
        at = piece.end
        store.verify(piece, ids)
        first, last = piece.start - piece.first, piece.end - piece.first
        for tensor in right:
            wanted = _slice(tensor, piece.start, piece.end)
            assert file_rows(piece.path, tensor.name, first, last) == wanted
    assert at == found.length
    for saved in found.checkpoints:
        store.verify_checkpoint(saved, ids)
        wanted = state(ids[: saved.position])[-1]
        assert load_file(saved.path)["state"][0] == wanted
    return found


def length_right(store: Store, ids: Tokens) -> int:
    """Tokens of `ids` found with right content, after dropping damaged files."""
    while True:
        try:
            return assert_right(store, ids).length
        except (Corrupt, Gone):
            continue


def on_disk(folder: Path) -> int:
    """Bytes of a folder and its content by the file system's count, each inode once."""
    seen: dict[int, int] = {}
    for path, folders, names in os.walk(folder):
        for entry in [path, *(os.path.join(path, name) for name in (*names, *folders))]:
            try:
                stat = os.lstat(entry)
            except FileNotFoundError:
                continue
            seen[stat.st_ino] = stat.st_blocks * 512
    return sum(seen.values())


def files(folder: Path) -> list[Path]:
    return sorted([*folder.glob("runs/*/*"), *folder.glob("checkpoints/*/*")])


@contextmanager
def opened(
    folder: Path,
    limit: int | None = 10**9,
    namespace: str = NAMESPACE,
    free_floor: int = 0,
    *,
    needs_checkpoints: bool | None = None,
) -> Iterator[Store]:
    store = Store.open(
        folder, namespace, limit, free_floor=free_floor, needs_checkpoints=needs_checkpoints
    )
    try:
        yield store
    finally:
        store.close()


def file_rows(path: Path, name: str, first: int, last: int) -> bytes:
    """Rows [first, last) of a tensor of a file."""
    with open_file(path) as fd:
        (place,) = (one for one in read_header(fd).places if one.name == name)
        row = place.nbytes // place.shape[0]
        return os.pread(fd, (last - first) * row, place.offset + first * row)


def _slice(tensor: Tensor, start: int, end: int) -> bytes:
    row = tensor.nbytes // tensor.shape[0]
    return bytes(tensor.bytes[start * row : end * row])
