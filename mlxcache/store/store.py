"""The disk tier of one folder, as the engine uses it: find, verify, write, evict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxcache.store.database import Database
from mlxcache.store.found import Found, Piece, Problem, Saved, StoreStats
from mlxcache.store.tensors import Tensor
from mlxcache.types import Tokens

FREE_FLOOR = 2_000_000_000
"""Bytes of the file system that the store leaves free for everyone else."""


class Store:
    """Runs and checkpoints of one namespace in a folder that several processes may share.

    Every method may be called on any thread. `database` is the folder's, for other tables.
    """

    database: Database
    folder: Path
    namespace: str
    limit: int | None

    @classmethod
    def open(
        cls, folder: Path, namespace: str, limit: int | None, *, free_floor: int = FREE_FLOOR
    ) -> Store:
        """Make or open `folder`, and put right what a killed process left.

        `limit` in bytes is a cap on all that the folder holds, by the file system's count; what
        exceeds it is evicted at once. None: no cap, for looking at a folder offline.
        Raises StoreError.
        """
        raise NotImplementedError

    def find(self, ids: Tokens, *, touch: bool = True) -> Found:
        """The longest prefix of `ids` on disk, to the token, and the checkpoints along `ids`.

        `touch` counts as a use. Raises StoreError.
        """
        raise NotImplementedError

    def verify(self, piece: Piece, ids: Tokens) -> None:
        """Read the file and check that it holds what `find` said, from its header to checksums.

        Raises Corrupt: the file is in quarantine, and all that builds on it is gone too. Raises
        Gone if the file was evicted meanwhile.
        """
        raise NotImplementedError

    def verify_checkpoint(self, saved: Saved, ids: Tokens) -> None:
        """As `verify`, of a checkpoint."""
        raise NotImplementedError

    def write_run(self, ids: Tokens, start: int, tensors: Sequence[Tensor]) -> None:
        """Save the KV of tokens [start, len(ids)); durable on return.

        `start` is a multiple of 64, and the first axis of each tensor is those tokens. Blocks that
        are on disk already are left out; nothing is written where all are. Raises NotAnchored
        if [0, start) is not on disk, DiskFull if no room can be made, StoreError.
        """
        raise NotImplementedError

    def write_checkpoint(self, ids: Tokens, tensors: Sequence[Tensor]) -> None:
        """Save the state after `ids`; durable on return. Raises DiskFull and StoreError.

        Of those along one path the first, the newest 4 and one per 4096 tokens are kept.
        """
        raise NotImplementedError

    def pin(self, name: str, paths: Sequence[Tokens]) -> None:
        """Evict what is on disk of `paths` last, in place of what `name` pinned before.

        No paths: `name` pins nothing. Files written later are not pinned until the next call.
        """
        raise NotImplementedError

    def make_room(self, nbytes: int) -> None:
        """Evict until `nbytes` more fit; for rows of other tables. Raises DiskFull."""
        raise NotImplementedError

    def stats(self) -> StoreStats:
        """Figures of the whole folder, and of what this process did."""
        raise NotImplementedError

    def check(self) -> list[Problem]:
        """Read every file of every namespace and report what is wrong; changes nothing."""
        raise NotImplementedError

    def prune(self, limit: int | None = None) -> int:
        """Drop the quarantine, and evict until all is within `limit`; returns bytes freed."""
        raise NotImplementedError

    def clear(self, *, pinned: bool = False) -> int:
        """Remove every file, pinned ones only if `pinned`; returns bytes freed."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of the folder. Calls after this raise StoreError."""
        raise NotImplementedError
