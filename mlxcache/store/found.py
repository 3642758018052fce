"""Immutable results of the store, with positions in tokens and sizes in bytes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunPart:
    """The tokens [start, end) of a prefix, contained in the file of one run.

    The run holds the tokens [first, last). Row `start - first` of each tensor in the file belongs
    to token `start`. `id`: id of its index row.
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
    """A checkpoint on disk: the state after `position` tokens; `id`: id of its index row."""

    path: Path
    id: int
    position: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Found:
    """The longest prefix of given token ids that is on disk.

    `pieces` are in order and cover [0, length) without a gap. `checkpoints` are those after a
    prefix of the ids, in order of position. Their positions may be above `length`, because a model
    whose layers all need checkpoints has no runs.
    """

    length: int
    pieces: tuple[RunPart, ...]
    checkpoints: tuple[Saved, ...]


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Figures of one store folder.

    `index_bytes`: those of all but runs and checkpoints. `tokens`: tokens in all runs. The figures
    from `written_bytes` to `evicted` count events of this process since it opened the folder.
    `obstacle`: why nothing can be written now, None if something can.
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
    obstacle: str | None = None


@dataclass(frozen=True, slots=True)
class Problem:
    path: Path
    what: str
