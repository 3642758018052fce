"""A session as it is listed: its row, its leaves, and what each tier holds of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxcache.store.leaves import Leaf
from mlxcache.store.session_rows import Session, SessionFigures

Tier = Literal["ram", "disk", "both", "mixed"]
NO_FIGURES = SessionFigures()


@dataclass(frozen=True, slots=True)
class Held:
    """Contents of one tier for a session: tokens of each leaf, and bytes, shared ones once."""

    tokens: tuple[int, ...]
    nbytes: int

    @classmethod
    def nothing(cls, leaves: Sequence[Leaf]) -> Held:
        """Contents of a tier that holds none of `leaves`."""
        return cls((0,) * len(leaves), 0)


@dataclass(frozen=True, slots=True)
class Listed:
    """A session, its leaves (the main one first), what each tier holds, and its figures."""

    session: Session
    leaves: tuple[Leaf, ...]
    ram: Held
    disk: Held
    figures: SessionFigures = NO_FIGURES

    @property
    def tier(self) -> Tier | None:
        """Tier that holds it: `mixed` if part of it is in one tier only, None if in neither."""
        lengths = tuple(len(leaf.ids) for leaf in self.leaves)
        ram, disk = any(self.ram.tokens), any(self.disk.tokens)
        if ram and disk:
            return "both" if self.ram.tokens == self.disk.tokens == lengths else "mixed"
        return "ram" if ram else "disk" if disk else None

    def as_object(self, *, leaves: bool = False) -> dict[str, Any]:
        """Object of `GET /v1/sessions`; `leaves` adds one object per leaf.

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
