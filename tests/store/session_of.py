"""Sessions of a synthetic model, whose KV is a function of token and position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcache.safetensors import Tensor
from mlxcache.store.leaves import Leaf
from mlxcache.store.snapshot_format import SessionInfo, Spec
from mlxcache.store.snapshots import SnapshotExport, SnapshotKV
from mlxcache.store.store import Store
from mlxcache.types import Tokens, join_ids, token_ids
from tests.store.content import file_rows

NAMESPACE = "0123456789abcdef" * 2
SPEC: Spec = {
    "kv.0.0": ("F32", (2, 4)),
    "kv.0.1": ("F32", (2, 4)),
    "kv.1.0": ("BF16", (1, 8)),
    "kv.1.1": ("BF16", (1, 6)),
}


def store_in(folder: Path, namespace: str = NAMESPACE, limit: int | None = None) -> Store:
    return Store.open(folder, namespace, limit, free_floor=0)


def ids_of(length: int, seed: int = 0, head: Tokens | None = None) -> Tokens:
    made = token_ids(np.random.default_rng(seed).integers(0, 500, length, np.int32))
    return made if head is None else join_ids(head, made[len(head) :])


def kv(ids: Tokens, start: int, end: int) -> list[Tensor]:
    """KV of tokens [start, end), all of it finite."""
    tensors = []
    at = np.arange(start, end).astype(np.uint16)
    for salt, (name, (dtype, shape)) in enumerate(SPEC.items()):
        kind = np.float32 if dtype == "F32" else np.uint16
        rows = ((ids[start:end].astype(np.uint16) * 64 + at + salt) & 0xBFFF).astype(kind)
        full = np.repeat(rows, int(np.prod(shape))).reshape(-1, *shape)
        tensors.append(Tensor(name, dtype, full.shape, memoryview(full.tobytes())))
    return tensors


def state(ids: Tokens) -> list[Tensor]:
    """State after `ids`."""
    value = np.full((1, 3, 5), float(ids.sum() % 977), np.float32)
    skeleton = b'[[{"array":0}]]'
    return [
        Tensor("skeleton", "U8", (len(skeleton),), memoryview(skeleton)),
        Tensor("state.0", "F32", value.shape, memoryview(value.tobytes())),
    ]


def save(store: Store, ids: Tokens, step: int = 100, states: Sequence[int] = ()) -> None:
    at = 0
    while at < len(ids):
        end = min(at + step, len(ids))
        start = at // 64 * 64
        store.write_run(ids[:end], start, kv(ids, start, end))
        at = end
    for position in states:
        store.write_checkpoint(ids[:position], state(ids[:position]))


def session(*leaves: Tokens, namespace: str = NAMESPACE) -> SessionInfo:
    kinds = ["main", *["agent"] * (len(leaves) - 1)]
    return SessionInfo(
        id="ses_1",
        namespace=namespace,
        model="owner/some-model",
        leaves=tuple(
            Leaf(ids, kind, len(ids) - 1, min(7, len(ids)), 3, 1000.5)  # type: ignore[arg-type]
            for ids, kind in zip(leaves, kinds, strict=True)
        ),
        label="abc",
        name="a name",
        title="Warum ist der Himmel blau? 🌌",
        client="claude-cli",
        turns=3,
        created_at=900.25,
        last_used_at=1000.5,
    )


def snapshot_in(path: Path, store: Store, info: SessionInfo) -> Path:
    made = SnapshotExport(store, info)
    write(path, made)
    assert path.stat().st_size == made.nbytes
    return path


@contextmanager
def poisoned(patch: pytest.MonkeyPatch, name: str, value: float) -> Iterator[None]:
    """Meanwhile exports have `value` as the last number of the tensor `name`, or of a state."""
    rows, states = SnapshotKV.rows, SnapshotKV.state_bytes

    def last(parts: Iterable[bytes], dtype: str) -> Iterator[bytes]:
        *first, end = parts
        size = 2 if dtype in ("F16", "BF16") else 4
        raw = np.float32(value).tobytes()[-size:]
        yield from first
        yield end[:-size] + (np.float16(value).tobytes() if dtype == "F16" else raw)

    def bad_rows(self: Any, ids: Any, pieces: Any, key: str, *at: int) -> Iterable[bytes]:
        kind = next(dtype for one, dtype, _ in self.row_kinds(pieces) if one == key)
        parts = rows(self, ids, pieces, key, *at)
        return last(parts, kind) if key == name else parts

    def bad_states(self: Any, ids: Any, saved: Any, *at: Any) -> Iterable[bytes]:
        parts = states(self, ids, saved, *at)
        return last(parts, "F32") if name.startswith("state") else parts

    with patch.context() as now:
        now.setattr(SnapshotKV, "rows", bad_rows)
        now.setattr(SnapshotKV, "state_bytes", bad_states)
        yield


def write(path: Path, parts: Iterable[bytes]) -> None:
    with path.open("wb") as out:
        for part in parts:
            out.write(part)


def held(store: Store, ids: Tokens) -> int:
    """Number of tokens of `ids` on disk, each file verified and its KV compared."""
    found = store.find(ids)
    for piece in found.pieces:
        store.verify(piece, ids)
        for tensor in kv(ids, piece.start, piece.end):
            first, last = piece.start - piece.first, piece.end - piece.first
            assert file_rows(piece.path, tensor.name, first, last) == bytes(tensor.data)
    for saved in found.checkpoints:
        store.verify_checkpoint(saved, ids)
        for tensor in state(ids[: saved.position]):
            rows = tensor.shape[0]
            assert file_rows(saved.path, tensor.name, 0, rows) == bytes(tensor.data)
    return found.length
