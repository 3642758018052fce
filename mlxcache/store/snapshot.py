"""Snapshots: one session in one portable safetensors file. The format is in docs/snapshots.md.

Nothing here holds a session in RAM: files are read and written in ranges of a few MiB. What a file
claims is checked against its size before anything is allocated for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mlxcache.store.snapshot_info import LeafInfo, SessionInfo
from mlxcache.store.store import Store
from mlxcache.types import Tokens

__all__ = ["Export", "LeafInfo", "SessionInfo", "Snapshot", "export", "read_snapshot", "restore"]

Spec = Mapping[str, tuple[str, tuple[int, ...]]]
"""What a model caches per token: each tensor's dtype and shape by name (`wire.run_spec`)."""

Progress = Callable[[int, int], None]
"""Called with the bytes done and those to do in all."""


class Export:
    """A snapshot on its way out: iterate once for its bytes, `nbytes` in all."""

    nbytes: int

    def __iter__(self) -> Iterator[bytes]:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """A file that was checked to be a snapshot, to its tokens' range; KV is checked by `restore`.

    `nbytes`: of its KV and checkpoints.
    """

    path: Path
    session: SessionInfo
    nbytes: int


def export(store: Store, session: SessionInfo) -> Export:
    """A snapshot of `session` with what is on disk of it, which is verified here.

    Raises StoreError.
    """
    raise NotImplementedError


def read_snapshot(
    path: Path,
    namespace: str | None = None,
    *,
    model: str | None = None,
    spec: Spec | None = None,
    vocab_size: int | None = None,
) -> Snapshot:
    """Check the snapshot at `path`, for the model of `namespace` if given.

    Raises SnapshotRefused, a sentence; of another model one that names both.
    """
    raise NotImplementedError


def restore(store: Store, snapshot: Snapshot, progress: Progress | None = None) -> SessionInfo:
    """Write a snapshot's KV into `store`; the session to enter into the table, with its tokens.

    Raises SnapshotRefused where a checksum does not hold, and StoreError.
    """
    raise NotImplementedError
