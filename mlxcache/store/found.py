"""Frozen results of the store: positions in tokens, sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a prefix that one run covers: tokens [start, end) of a file of [first, last).

    Row `start - first` of each of its tensors is the first one of the part.
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
    """A checkpoint on disk: the state after `position` tokens."""

    path: Path
    id: int
    position: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """Prefix of some token ids that is on disk.

    `pieces` ascend without a gap and cover [0, length). `checkpoints` ascend, and may lie beyond
    `length`: a model without sliceable layers has no runs.
    """

    length: int
    pieces: tuple[Piece, ...]
    checkpoints: tuple[Saved, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of one store folder.

    `used_bytes`: bytes on disk of the whole folder, by the file system's count. `written_*`,
    `verified`, `corrupt` (checks of files before use) and `evicted` count events of this process
    since it opened the folder.
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
    """A problem of the folder: the path, and a predicate such as "is damaged"."""

    path: Path
    what: str
