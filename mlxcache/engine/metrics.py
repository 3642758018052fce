"""Counts for `GET /v1/cache`: kept on the MLX thread, read as a finished value from any other."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlxcache.cache.disk import Disk
from mlxcache.cache.kv_cache import Memory
from mlxcache.cache.pressure import HELD_BACK
from mlxcache.config.rules import RULES
from mlxcache.engine.ahead import Ahead
from mlxcache.engine.speed import Speed, gained
from mlxcache.engine.tally import reuse_of
from mlxcache.store.session_figures import Gain
from mlxcache.types import WARMING, RequestRecord


@dataclass(slots=True)
class Totals:
    """What all requests so far add up to."""

    requests: dict[str, int] = field(
        default_factory=lambda: {"total": 0, "warm": 0, "restored": 0, "cold": 0}
    )
    tokens: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("prompt", "cached", "restored", "fed", "generated", "drafted", "accepted"), 0
        )
    )
    canonicalised: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))
    sessions: set[str] = field(default_factory=set)
    saved: dict[str, float] = field(default_factory=lambda: {"tokens": 0, "seconds": 0.0})

    def add(self, record: RequestRecord, speed: Speed) -> Gain:
        """Count a request that was admitted and is over; what it gained."""
        gain = gained(record, speed)
        self.requests["total"] += 1
        self.requests[reuse_of(record)] += 1
        for name in self.tokens:
            self.tokens[name] += getattr(record, f"{name}_tokens")
        if record.api != WARMING:
            self.saved["tokens"] += gain.figures.saved_tokens
            self.saved["seconds"] += gain.figures.saved_s
        for rule in record.canonicalised:
            self.canonicalised[rule] += 1
        if record.session:
            self.sessions.add(record.session)
        return gain


def snapshot(memory: Memory, totals: Totals, disk: Disk | None, ahead: Ahead) -> dict[str, Any]:
    """The body of `GET /v1/cache`. MLX thread only.

    `active_bytes` is what lineages hold beyond the tree; `mlx` is what MLX itself counts, weights
    included. `withheld_bytes` are given up while memory is short; `buffers` are those
    of lineages and checkpoints, `kinds` the bytes of the budget by what they are charged for.
    `canonicalised`: in how many requests each rule changed something. `saved`: the seconds that
    computing so many of the cached tokens would have taken, by the measured speed of prefill.
    `anticipated`: tokens computed for turns that had not come, and how many of them were then used.
    """
    tree, kinds = memory.tree, memory.budget.by_kind()
    held = tree.kv_bytes + tree.checkpoint_bytes
    live = sum(kinds.get(kind, 0) for kind in ("kv", "checkpoints", "states", "batch"))
    return {
        "ram": _ram(memory, held),
        "disk": {"used_bytes": 0, "limit_bytes": 0},
        "active_bytes": max(0, live - held),
        "reserved_bytes": kinds.get("transient", 0) + kinds.get("pool", 0),
        "pending_bytes": disk.persist.pending_bytes if disk else 0,
        "mlx": {"active_bytes": mx.get_active_memory(), "pool_bytes": mx.get_cache_memory()},
        "sessions": len(totals.sessions),
        "bytes_per_token": memory.layout.bytes_per_token,
        "tree_tokens": tree.tokens,
        "segments": tree.segments,
        "checkpoints": tree.checkpoints,
        "requests": dict(totals.requests),
        "tokens": dict(totals.tokens),
        "saved": totals.saved | {"seconds": round(totals.saved["seconds"], 3)},
        "canonicalised": dict(totals.canonicalised),
        "anticipated": {"tokens": ahead.tokens, "used_tokens": ahead.used},
        "evictions": {"spilled": memory.room.spilled, "dropped": memory.room.dropped},
        "restores": {"ok": 0, "corrupt": 0},
    }


def _ram(memory: Memory, held: int) -> dict[str, Any]:
    """The memory budget, of which the tree has `held` bytes."""
    budget, room = memory.budget, memory.room
    kinds = budget.by_kind()
    return {
        "used_bytes": held,
        "limit_bytes": budget.limit,
        "high_water_bytes": budget.high_water,
        "withheld_bytes": kinds.get(HELD_BACK, 0),
        "buffers": room.handles_held(),
        "buffer_limit": room.handles.limit,
        "kinds": kinds,
    }


def with_disk(figures: dict[str, Any], stats: dict[str, Any]) -> dict[str, Any]:
    """`figures` with what the disk tier says of itself.

    `written_per_cached_token` is the wear: bytes written to disk for each prompt token that a cache
    saved, since the server started.
    """
    if not figures:
        return figures
    disk = {name: value for name, value in stats.items() if name != "restores"}
    saved = figures["tokens"]["cached"]
    disk["written_per_cached_token"] = round(disk["written_bytes"] / saved, 1) if saved else None
    return {**figures, "disk": disk, "restores": stats["restores"]}
