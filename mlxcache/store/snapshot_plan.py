"""What a snapshot of a session will hold: each leaf's own part, and the files that have it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlxcache.errors import Corrupt, Gone, StoreError
from mlxcache.owner import plain_ids
from mlxcache.store.digests import BLOCK
from mlxcache.store.found import Found, Piece, Saved
from mlxcache.store.leaves import common
from mlxcache.store.snapshot_info import (
    MOST_LEAVES,
    MOST_TEXT,
    MOST_TOKENS,
    Checkpoint,
    Description,
    Leaf,
    LeafInfo,
    SessionInfo,
)
from mlxcache.store.store import Store
from mlxcache.types import Tokens

MOST_STATES = 64
"""Checkpoints of one leaf: its first and the newest."""

_MOST_LOOKS = 1000


@dataclass(frozen=True, slots=True)
class Own:
    """What one leaf adds: its tokens from `start`, KV of `rows` of them in `pieces`, `states`."""

    parent: int | None
    start: int
    info: LeafInfo
    rows: int
    pieces: tuple[Piece, ...]
    states: tuple[Saved, ...]

    def tokens(self, owner: str | None) -> Tokens:
        """Its own token ids, little-endian, as nobody's."""
        return np.ascontiguousarray(plain_ids(self.info.ids, owner)[self.start :], "<i4")

    @property
    def end(self) -> int:
        """The position up to which there is KV."""
        return self.start + self.rows

    def describe(self) -> Leaf:
        """As the snapshot's description has it."""
        info = self.info
        return Leaf(
            parent=self.parent,
            start=self.start,
            tokens=len(info.ids) - self.start,
            rows=self.rows,
            kind=info.kind,
            prompt_tokens=min(info.prompt_tokens, len(info.ids)),
            anchor=min(info.anchor, len(info.ids)),
            turns=info.turns,
            last_used_at=info.last_used_at,
        )


def within_limits(leaves: tuple[LeafInfo, ...]) -> list[LeafInfo]:
    """As many leaves as a snapshot may hold, in their order: the main one is the first."""
    kept: list[LeafInfo] = []
    tokens = 0
    for leaf in leaves:
        tokens += len(leaf.ids)
        if len(leaf.ids) and tokens <= MOST_TOKENS and len(kept) < MOST_LEAVES:
            kept.append(leaf)
    if not kept:
        raise StoreError("The session has no tokens to make a snapshot of.")
    return kept


def owns_of(store: Store, leaves: list[LeafInfo]) -> list[Own]:
    """What each leaf adds to those before it, and where that is on disk, verified."""
    found = _all_verified(store, leaves)
    owns: list[Own] = []
    for leaf, on_disk in zip(leaves, found, strict=True):
        owns.append(_own(leaf, on_disk, owns))
    return owns


def _all_verified(store: Store, leaves: list[LeafInfo]) -> list[Found]:
    sound: set[tuple[Path, int, int]] = set()
    for _ in range(_MOST_LOOKS):
        try:
            return [_verified(store, leaf.ids, sound) for leaf in leaves]
        except (Corrupt, Gone):
            continue  # the store knows now, and finds less
    raise StoreError("The session's files go faster than a snapshot can be made of them.")


def _verified(store: Store, ids: Tokens, sound: set[tuple[Path, int, int]]) -> Found:
    """What is on disk of `ids`; what is in `sound`, a file up to a position, was checked before."""
    found = store.find(ids)
    for piece in found.pieces:
        if (piece.path, piece.start, piece.end) not in sound:
            store.verify(piece, ids)
            sound.add((piece.path, piece.start, piece.end))
    for saved in found.checkpoints:
        if (saved.path, 0, saved.position) not in sound:
            store.verify_checkpoint(saved, ids)
            sound.add((saved.path, 0, saved.position))
    return found


def _own(leaf: LeafInfo, found: Found, before: list[Own]) -> Own:
    shares = [common(leaf.ids, other.info.ids) for other in before]
    shared = max(shares, default=0)
    start = min(shared, len(leaf.ids) - 1) // BLOCK * BLOCK
    parent = shares.index(shared) if start else None
    anchored = parent is None or before[parent].end >= start
    rows = max(0, found.length - start) if anchored else 0
    return Own(
        parent,
        start,
        leaf,
        rows,
        tuple(p for p in found.pieces if p.end > start) if rows else (),
        _newest([s for s in found.checkpoints if parent is None or s.position > shared]),
    )


def _newest(states: list[Saved]) -> tuple[Saved, ...]:
    return (*states[:1], *states[1:][-(MOST_STATES - 1) :])


def _bounded(text: str | None) -> str | None:
    """What people and clients wrote, as far as a snapshot takes it."""
    if text is None:
        return None
    return text[:MOST_TEXT].encode(errors="replace").decode()


def described(
    session: SessionInfo, owns: list[Own], states: list[tuple[int, Saved]]
) -> Description:
    """The snapshot's description; `states` are the checkpoints it holds, each with its leaf."""
    return Description(
        id=session.id,
        namespace=session.namespace,
        model=session.model,
        label=_bounded(session.label),
        name=_bounded(session.name),
        title=_bounded(session.title),
        client=_bounded(session.client),
        turns=session.turns,
        created_at=session.created_at,
        last_used_at=session.last_used_at,
        leaves=tuple(own.describe() for own in owns),
        checkpoints=tuple(Checkpoint(leaf, saved.position) for leaf, saved in states),
    )
