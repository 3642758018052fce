"""A session as people see it: its row, and how much of it each tier holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxcache.store.found import Found
from mlxcache.store.leaves import Leaf
from mlxcache.store.session_figures import SessionFigures
from mlxcache.store.session_rows import Session
from mlxcache.store.store import Store

Tier = Literal["ram", "disk", "both", "mixed"]
NO_FIGURES = SessionFigures()


@dataclass(frozen=True, slots=True)
class Held:
    """What one tier holds of a session: tokens of each leaf, and bytes, each shared one once."""

    tokens: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class Listed:
    """A session, its leaves (the main one first), what is in RAM and on disk of them, and what it
    has gained."""

    session: Session
    leaves: tuple[Leaf, ...]
    ram: Held
    disk: Held
    figures: SessionFigures = NO_FIGURES

    @property
    def tier(self) -> Tier | None:
        """Where it is: `mixed` if some of it is in one tier only; None if it is in neither."""
        lengths = tuple(len(leaf.ids) for leaf in self.leaves)
        ram, disk = any(self.ram.tokens), any(self.disk.tokens)
        if ram and disk:
            return "both" if self.ram.tokens == self.disk.tokens == lengths else "mixed"
        return "ram" if ram else "disk" if disk else None

    def as_object(self, *, leaves: bool = False) -> dict[str, Any]:
        """What `GET /v1/sessions` shows; with `leaves`, each of them too.

        `tokens` and `durable_tokens` are the main leaf's, the bytes those of all leaves.
        """
        session, main = self.session, slice(0, 1)
        found: dict[str, Any] = {
            "id": session.id,
            "object": "session",
            "name": session.name,
            "title": session.title,
            "label": session.label,
            "model": session.model,
            "namespace": session.namespace,
            "client": session.client,
            "agents": sum(leaf.kind == "agent" for leaf in self.leaves),
            "tokens": sum(len(leaf.ids) for leaf in self.leaves[main]),
            "durable_tokens": sum(self.disk.tokens[main]),
            "turns": session.turns,
            "ram_bytes": self.ram.nbytes,
            "disk_bytes": self.disk.nbytes,
            "tier": self.tier,
            "pinned": session.pinned,
            "figures": self.figures.as_object(),
            "created_at": session.created_at,
            "last_used_at": session.last_used_at,
        }
        if leaves:
            found["leaves"] = [
                _leaf_object(leaf, ram, disk)
                for leaf, ram, disk in zip(
                    self.leaves, self.ram.tokens, self.disk.tokens, strict=True
                )
            ]
        return found


def _leaf_object(leaf: Leaf, ram_tokens: int, durable_tokens: int) -> dict[str, Any]:
    return {
        "kind": leaf.kind,
        "tokens": len(leaf.ids),
        "prompt_tokens": leaf.prompt_tokens,
        "ram_tokens": ram_tokens,
        "durable_tokens": durable_tokens,
        "turns": leaf.turns,
        "last_used_at": leaf.last_used_at,
    }


def nothing(leaves: Sequence[Leaf]) -> Held:
    """What a tier that is not there holds."""
    return Held((0,) * len(leaves), 0)


def on_disk(store: Store, leaves: Sequence[Leaf]) -> Held:
    """What the store holds of `leaves`; asking is no use of it. Raises StoreError."""
    found = [store.find(leaf.ids, touch=False) for leaf in leaves]
    files = {piece.path: piece.nbytes for each in found for piece in each.pieces}
    files |= {saved.path: saved.nbytes for each in found for saved in each.checkpoints}
    return Held(tuple(durable(store, each) for each in found), sum(files.values()))


def durable(store: Store, found: Found) -> int:
    """The tokens from which a server that starts now could go on.

    Where a model has states that cannot be cut, the last checkpoint counts whose KV is there too,
    if the model has any: KV that was written ahead of the first checkpoint is of no use yet.
    """
    if not found.checkpoints:
        return 0 if found.length and store.has_states() else found.length
    limit = found.length if found.pieces else max(x.position for x in found.checkpoints)
    return max((x.position for x in found.checkpoints if x.position <= limit), default=0)
