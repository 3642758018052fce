"""Counts for `GET /v1/cache`: kept on the MLX thread, read as a finished value from any other."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import mlx.core as mx

from mlxcache.cache.disk import Disk
from mlxcache.cache.kv_cache import Memory
from mlxcache.cache.pressure import HELD_BACK
from mlxcache.config.rules import RULES
from mlxcache.engine.cost import Speed, gained
from mlxcache.store.session_rows import Gain
from mlxcache.types import WARMING, Job, RequestRecord

if TYPE_CHECKING:
    from mlxcache.engine.anticipate import Ahead

Reuse = Literal["cold", "warm", "restored"]
"""Most of the prompt was computed; most was reused, all of that from RAM; some of it from disk."""

LEAST_SHARE, LEAST_TOKENS = 0.5, 16
"""What a prompt that is not cold has reused of it, and more tokens than which: a tokenizer's first
one and the first words of a template are the same in all prompts, and spare nobody a wait."""

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds of the ranges that times are counted in."""

STAGES = ("queue_s", "render_s", "match_s", "restore_s", "prefill_s", "decode_s")
"""The stages that follow one another; `first_token_s` spans several."""

OUTCOMES = ("done", "cancelled", "failed", "rejected")
REASONS = (
    *("evicted", "edited", "system_changed", "tools_changed", "template_drift"),
    *("checkpoint_gap", "namespace", "corrupt", "first_seen"),
)

KINDS: tuple[Reuse, ...] = ("cold", "warm", "restored")


def reuse_of(record: RequestRecord) -> Reuse:
    """Where most of a request's prompt came from.

    What is called cold, warm and restored anywhere is so by this.
    """
    cached = record.cached_tokens
    if cached <= LEAST_TOKENS or cached < LEAST_SHARE * record.prompt_tokens:
        return "cold"
    return "restored" if record.restored_tokens else "warm"


@dataclass(slots=True)
class Times:
    """How long something took, how often. `counts` are by range, the last one of what is longer
    than the last of `bounds`."""

    bounds: ClassVar[tuple[float, ...]] = SECONDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        """How many there were."""
        return sum(self.counts)

    @property
    def average(self) -> float | None:
        """Seconds; None where there were none."""
        return self.total_s / self.count if self.count else None


def _no_losses() -> Counter[str]:
    return Counter(dict.fromkeys(REASONS, 0))


def _by_kind() -> dict[Reuse, Times]:
    return {kind: Times() for kind in KINDS}


@dataclass(slots=True)
class Tally:
    """Counts since the start; changed and read on the event loop.

    `outcomes` are by API and status. `first_token` and `whole` are times from a request's arrival:
    of those that were computed for a client and drew a token, and of those of them that came to
    their end. `stages` are seconds. `losses` are by reason and cause, `lost_tokens` by reason.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    joined: int = 0
    first_token: dict[Reuse, Times] = field(default_factory=_by_kind)
    whole: dict[Reuse, Times] = field(default_factory=_by_kind)
    stages: Counter[str] = field(default_factory=Counter)
    losses: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost_tokens: Counter[str] = field(default_factory=_no_losses)

    def add(self, record: RequestRecord) -> None:
        """Count a request that is over."""
        api = record.api or "other"
        for outcome in OUTCOMES:  # all of an API's: Prometheus sees no rise from nothing to one
            self.outcomes[api, outcome] += outcome == record.status
        if record.joined is not None:  # what was computed is the other's
            self.joined += 1
            return
        for stage in STAGES:
            self.stages[stage] += record.timing.get(stage, 0.0)  # type: ignore[assignment]
        if record.api != WARMING:
            self._time(record)
        if record.lost is not None:
            self.losses[record.lost["reason"], record.lost["cause"]] += 1
            self.lost_tokens[record.lost["reason"]] += record.lost["lost_tokens"]

    def _time(self, record: RequestRecord) -> None:
        first, kind = record.timing.get("first_token_s"), reuse_of(record)
        if first is None:
            return
        self.first_token[kind].add(first)
        if record.status == "done":
            self.whole[kind].add(first + record.timing.get("decode_s", 0.0))


KEPT = 1000


class Records:
    """The latest requests' records by id, and the tally of all. Use from the event loop.

    `told` is called with each that is over.
    """

    def __init__(self, told: Callable[[RequestRecord], None]) -> None:
        self.tally = Tally()
        self._told = told
        self._kept: OrderedDict[str, RequestRecord] = OrderedDict()

    def begin(self, job: Job) -> RequestRecord:
        """A record for a request that has just come; what came first is forgotten first."""
        record = RequestRecord(
            id=job.id,
            session=job.session,
            api=job.api,
            client=job.client,
            status="queued",
            created_at=time.time(),
            prompt_tokens=len(job.prompt.ids),
            timing={"render_s": round(job.render_s, 6)},
            canonicalised=job.prompt.rules,
            owner=job.owner,
        )
        self._kept[record.id] = record
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return record

    def over(self, record: RequestRecord) -> None:
        """A request is over, and known is what it lost."""
        self.tally.add(record)
        self._told(record)

    def all(self, owner: str | None) -> list[RequestRecord]:
        """An owner's, newest first."""
        return [record for record in reversed(self._kept.values()) if record.owner == owner]

    def get(self, id: str, owner: str | None) -> RequestRecord | None:
        """One of an owner's."""
        found = self._kept.get(id)
        return found if found is not None and found.owner == owner else None


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
