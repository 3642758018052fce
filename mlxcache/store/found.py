"""What the store answers with: frozen values, positions in tokens, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Piece:
    """What one run contributes to a prefix.

    `start` and `end` are the absolute token positions wanted of it, `first` and `last` those that
    the file holds, so row `start - first` of each of its tensors is the first one wanted.
    """

    path: Path
    id: int
    start: int
    end: int
    first: int
    last: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint on disk: state after `position` tokens."""

    path: Path
    id: int
    position: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """The part of some token ids that is on disk.

    `pieces` are contiguous, ascending and cover [0, length). `checkpoints` ascend, and may lie
    beyond `length`: a model without sliceable layers has no runs.
    """

    length: int
    pieces: tuple[Piece, ...]
    checkpoints: tuple[Saved, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of one store. Counts of what happened are of this process, since it opened.

    `used_bytes` is what the file system counts for the whole folder: runs, checkpoints, and the
    index with all that is beside them. `verified` and `corrupt`
    count checks of files before use, `evicted` files that made room for others.
    """

    limit_bytes: int | None
    used_bytes: int = 0
    runs: int = 0
    checkpoints: int = 0
    run_bytes: int = 0
    checkpoint_bytes: int = 0
    index_bytes: int = 0
    tokens: int = 0
    pinned_bytes: int = 0
    quarantined: int = 0
    written_bytes: int = 0
    written_tokens: int = 0
    verified: int = 0
    corrupt: int = 0
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """Something in the folder that should not be: where, and what, as a sentence's end."""

    path: Path
    what: str
