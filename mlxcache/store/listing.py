"""A session as it is listed: its row, its leaves, and how much of them each tier holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mlxcache.store.leaves import LeafRow
from mlxcache.store.session_rows import Session, SessionFigures

Tier = Literal["ram", "disk", "both", "mixed"]
NO_FIGURES = SessionFigures()


@dataclass(frozen=True, slots=True)
class Held:
    """The part of a session that one tier (RAM or disk) holds.

    `tokens`: number of tokens held of each leaf. `nbytes`: bytes in all; those shared by leaves
    count once.
    """

    tokens: tuple[int, ...]
    nbytes: int

    @classmethod
    def nothing(cls, leaves: Sequence[LeafRow]) -> Held:
        """Return the contents of a tier that holds none of `leaves`."""
        return cls((0,) * len(leaves), 0)

    def joined(self, other: Held) -> Held:
        """Return what two tiers hold together.

        Of each leaf, the larger number of tokens counts; bytes are added.
        """
        most = tuple(map(max, self.tokens, other.tokens))
        return Held(most, self.nbytes + other.nbytes)


@dataclass(frozen=True, slots=True)
class Listed:
    """A session, its leaves (the main one first), and what each tier holds of it.

    `figures`: sums over its requests, such as their numbers of tokens.
    """

    session: Session
    leaves: tuple[LeafRow, ...]
    ram: Held
    disk: Held
    figures: SessionFigures = NO_FIGURES

    @property
    def tier(self) -> Tier | None:
        """The tier that holds tokens of the session; None if neither RAM nor disk does.

        `ram` or `disk` if only that tier does, `both` if each tier holds all of the session, and
        `mixed` if both hold tokens but at least one of them lacks some.
        """
        lengths = tuple(leaf.tokens for leaf in self.leaves)
        ram, disk = any(self.ram.tokens), any(self.disk.tokens)
        if ram and disk:
            return "both" if self.ram.tokens == self.disk.tokens == lengths else "mixed"
        return "ram" if ram else "disk" if disk else None

    def as_object(self, *, leaves: bool = False) -> dict[str, Any]:
        """Return the session's JSON object in `GET /v1/sessions`.

        `leaves`: add the field `leaves`, a list with an object for each leaf. The fields `tokens`
        and `durable_tokens` count only the main leaf; `ram_bytes` and `disk_bytes` are those of all
        leaves.
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
            "tokens": sum(leaf.tokens for leaf in self.leaves[main]),
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


def related_objects(sessions: Sequence[Session]) -> list[dict[str, Any]]:
    """Return a JSON object for each of `sessions`, which are related to one listed session.

    Related sessions have the same label and different models; see `Sessions.related`. The fields of
    an object are `id`, `model`, `turns` and `last_used_at`.
    """
    return [
        {"id": one.id, "model": one.model, "turns": one.turns, "last_used_at": one.last_used_at}
        for one in sessions
    ]


def _leaf_object(leaf: LeafRow, ram_tokens: int, durable_tokens: int) -> dict[str, Any]:
    return {
        "kind": leaf.kind,
        "tokens": leaf.tokens,
        "prompt_tokens": leaf.prompt_tokens,
        "ram_tokens": ram_tokens,
        "durable_tokens": durable_tokens,
        "turns": leaf.turns,
        "last_used_at": leaf.last_used_at,
    }
