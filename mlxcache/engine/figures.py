"""Figures of the server: the one structure that `GET /v1/cache`, the metrics and the commands show.

A part that a server lacks is None, and is left out of the JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

import mlx.core as mx

from mlxcache.cache.disk import DiskTier
from mlxcache.cache.kv_cache import KVCache
from mlxcache.config.rules import RULES
from mlxcache.engine.metrics import reuse_of
from mlxcache.store.session_rows import SessionFigures
from mlxcache.types import WARMING, RequestRecord

if TYPE_CHECKING:
    from mlxcache.scheduling.anticipate import IdlePrefill
    from mlxcache.scheduling.prefill import PrefillSpeed
    from mlxcache.scheduling.wall import Wall

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Requests:
    """Numbers of computed requests: all, and by the source of most of their prompt."""

    total: int = 0
    warm: int = 0
    restored: int = 0
    cold: int = 0


@dataclass(frozen=True, slots=True)
class TokenCounts:
    prompt: int = 0
    cached: int = 0
    restored: int = 0
    fed: int = 0
    generated: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class BySource:
    """A sum by the source of drafted tokens: a draft model, heads, or the conversation."""

    draft: float = 0
    heads: float = 0
    history: float = 0


@dataclass(frozen=True, slots=True)
class Guesses:
    """Drafted and accepted tokens, passes that checked them, and the seconds that these saved."""

    drafted: BySource = field(default_factory=BySource)
    accepted: BySource = field(default_factory=BySource)
    passes: BySource = field(default_factory=BySource)
    saved_s: BySource = field(default_factory=BySource)


@dataclass(frozen=True, slots=True)
class Saved:
    """Cached tokens, and the seconds that computing them would have taken at the measured speed."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass(slots=True)
class Totals:
    """Sums over all ended requests whose computation had begun. MLX thread only.

    `canonicalised`: number of requests that each rule changed.
    """

    requests: Requests = field(default_factory=Requests)
    tokens: TokenCounts = field(default_factory=TokenCounts)
    guesses: Guesses = field(default_factory=Guesses)
    saved: Saved = field(default_factory=Saved)
    canonicalised: dict[str, int] = field(default_factory=lambda: dict.fromkeys(RULES, 0))

    def add(self, record: RequestRecord, speed: PrefillSpeed) -> SessionFigures:
        """Count a request that is over; return its figures, with what reuse of KV saved it.

        `speed`: measured cost of prefill, from which the saved seconds are computed.
        """
        figures = figures_of(record, speed)
        self.requests = _plus(self.requests, total=1, **{reuse_of(record): 1})
        counts = {one.name: getattr(record, f"{one.name}_tokens") for one in fields(TokenCounts)}
        self.tokens = _plus(self.tokens, **counts)
        sums = {
            one.name: _plus(
                getattr(self.guesses, one.name),
                **{source: getattr(found, one.name) for source, found in record.guesses.items()},
            )
            for one in fields(Guesses)
        }
        self.guesses = Guesses(**sums)
        if record.api != WARMING:
            self.saved = _plus(self.saved, tokens=figures.saved_tokens, seconds=figures.saved_s)
        for rule in record.canonicalised:
            self.canonicalised[rule] += 1
        return figures


def figures_of(record: RequestRecord, speed: PrefillSpeed) -> SessionFigures:
    first = record.timing.get("first_token_s")
    return SessionFigures(
        requests=1,
        first_tokens=int(first is not None),
        first_token_s=first or 0.0,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        restored_tokens=record.restored_tokens,
        fed_tokens=record.fed_tokens,
        generated_tokens=record.generated_tokens,
        saved_tokens=speed.known_tokens(record.cached_tokens),
        saved_s=speed.seconds(record.cached_tokens) or 0.0,
        drafted_tokens=record.drafted_tokens,
        accepted_tokens=record.accepted_tokens,
        guess_passes=record.guess_passes,
        guess_saved_s=record.guess_saved_s,
    )


def _plus(sums: T, **more: float) -> T:
    added = {name: round(getattr(sums, name) + value, 6) for name, value in more.items()}
    return cast(T, replace(cast(Any, sums), **added))


@dataclass(frozen=True, slots=True)
class Ram:
    """`used_bytes` is the part of the budget that the prefix tree takes; `kinds`: bytes by kind."""

    used_bytes: int = 0
    limit_bytes: int = 0
    high_water_bytes: int = 0
    withheld_bytes: int = 0
    buffers: int = 0
    buffer_limit: int | None = None
    kinds: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NoDisk:
    """No disk tier. `reason`: None if it is off."""

    used_bytes: int = 0
    limit_bytes: int = 0
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """The disk tier of a folder, which models share; each counts what it wrote and evicted.

    `written_per_cached_token` measures wear: bytes written to disk since the start, divided by the
    prompt tokens that were reused. It is None if none were.
    """

    used_bytes: int
    limit_bytes: int | None
    written_bytes: int
    written_tokens: int
    evicted_files: int
    quarantined: int
    kinds: Mapping[str, int]
    files: int
    state: str
    reason: str | None
    written_per_cached_token: float | None = None


@dataclass(frozen=True, slots=True)
class Evictions:
    spilled: int = 0
    dropped: int = 0


@dataclass(frozen=True, slots=True)
class Restores:
    ok: int = 0
    corrupt: int = 0


@dataclass(frozen=True, slots=True)
class Anticipated:
    """Tokens computed in advance, and the number of those that requests reused."""

    tokens: int = 0
    used_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Contained:
    """Exceptions that nobody expected and that ended at most one request."""

    exceptions: int = 0


@dataclass(frozen=True, slots=True)
class Mlx:
    """Memory as MLX counts it, in bytes: of arrays, with the weights, and of freed buffers."""

    active_bytes: int = 0
    pool_bytes: int = 0

    @classmethod
    def now(cls) -> Mlx:
        """Any thread."""
        return cls(mx.get_active_memory(), mx.get_cache_memory())


@dataclass(frozen=True, slots=True)
class Queue:
    """Number of requests that wait, are in prefill and are decoded, and the most that may wait."""

    waiting: int = 0
    limit: int = 0
    prefill: int = 0
    decode: int = 0


@dataclass(frozen=True, slots=True)
class Memory:
    """The budget that several models share; `kinds`: bytes charged to itself, without their KV."""

    used_bytes: int
    limit_bytes: int
    high_water_bytes: int
    kinds: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Figures:
    """All figures of a model or, added up, of a server's models.

    `active_bytes`: what lineages take beyond the prefix tree. `remote`: see `RemoteTier.figures`.
    `ranks`: see `Ranks.figures`. `pressure`: see `Pressure.figures`. `models`: see
    `Models.describe`.
    """

    ram: Ram = field(default_factory=Ram)
    active_bytes: int = 0
    reserved_bytes: int = 0
    pending_bytes: int = 0
    bytes_per_token: int = 0
    bytes_per_checkpoint: int = 0
    tree_tokens: int = 0
    segments: int = 0
    checkpoints: int = 0
    evictions: Evictions = field(default_factory=Evictions)
    disk: Disk | NoDisk = field(default_factory=NoDisk)
    mlx: Mlx = field(default_factory=Mlx)
    sessions: int = 0
    requests: Requests = field(default_factory=Requests)
    tokens: TokenCounts = field(default_factory=TokenCounts)
    guesses: Guesses = field(default_factory=Guesses)
    saved: Saved = field(default_factory=Saved)
    canonicalised: Mapping[str, int] = field(default_factory=dict)
    anticipated: Anticipated = field(default_factory=Anticipated)
    contained: Contained = field(default_factory=Contained)
    restores: Restores = field(default_factory=Restores)
    remote: Mapping[str, Any] | None = None
    ranks: Mapping[str, Any] | None = None
    pressure: Mapping[str, Any] | None = None
    queue: Queue = field(default_factory=Queue)
    models: Sequence[Mapping[str, Any]] | None = None
    memory: Memory | None = None

    def as_object(self) -> dict[str, Any]:
        """Return the response body of `GET /v1/cache`."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class FiguresOfModel:
    """Maker of the figures of one model on the MLX thread; any thread may read `latest`.

    `no_disk`: why there is no disk tier; None if there is one, or if it is off.
    """

    def __init__(
        self,
        kv: KVCache,
        totals: Totals,
        idle_prefill: IdlePrefill,
        wall: Wall,
        no_disk: str | None = None,
    ):
        self.latest = Figures()
        self._no_disk = NoDisk(reason=no_disk)
        self._kv = kv
        self._totals = totals
        self._idle_prefill = idle_prefill
        self._wall = wall

    def publish(self) -> None:
        """Replace `latest` by the current figures. MLX thread only."""
        kv, totals, ahead = self._kv, self._totals, self._idle_prefill
        tree, ram, kinds = kv.tree, kv.ram, kv.budget.by_kind()
        held = tree.kv_bytes + tree.checkpoint_bytes
        live = sum(kinds.get(kind, 0) for kind in ("kv", "checkpoints", "states", "batch"))
        self.latest = Figures(
            ram=Ram(
                used_bytes=held,
                limit_bytes=kv.budget.limit,
                high_water_bytes=kv.budget.high_water,
                withheld_bytes=ram.shared.withheld,
                buffers=ram.count_buffers(),
                buffer_limit=ram.buffers.limit,
                kinds=kinds,
            ),
            active_bytes=max(0, live - held),
            reserved_bytes=_reserved(kinds),
            pending_bytes=kv.disk.write_behind.pending_bytes if kv.disk else 0,
            bytes_per_token=kv.layout.bytes_per_token,
            bytes_per_checkpoint=kv.layout.checkpoint_bytes,
            tree_tokens=tree.tokens,
            segments=tree.segments,
            checkpoints=tree.checkpoints,
            evictions=Evictions(ram.spilled, ram.dropped),
            disk=self._no_disk,
            mlx=Mlx.now(),
            requests=totals.requests,
            tokens=totals.tokens,
            guesses=totals.guesses,
            saved=Saved(totals.saved.tokens, round(totals.saved.seconds, 3)),
            canonicalised=dict(totals.canonicalised),
            anticipated=Anticipated(ahead.tokens, ahead.used),
            contained=Contained(self._wall.contained),
        )


def _reserved(kinds: Mapping[str, int]) -> int:
    return kinds.get("transient", 0) + kinds.get("pool", 0)


def with_disk(figures: Figures, tier: DiskTier) -> Figures:
    """Return `figures` with those of the disk tier. Waits for the disk."""
    stats = tier.stats()
    works = tier.write_behind.works and not stats.obstacle
    disk = Disk(
        used_bytes=stats.used_bytes,
        limit_bytes=stats.limit_bytes,
        written_bytes=stats.written_bytes,
        written_tokens=stats.written_tokens,
        evicted_files=stats.evicted,
        quarantined=stats.quarantined,
        kinds={
            "runs": stats.run_bytes,
            "checkpoints": stats.checkpoint_bytes,
            "index": stats.index_bytes,
        },
        files=stats.runs + stats.checkpoints,
        state="ok" if works else "suspended",
        reason=stats.obstacle,
    )
    restores = Restores(stats.verified, stats.corrupt)
    return replace(figures, disk=_with_wear(disk, figures.tokens.cached), restores=restores)


def _with_wear(disk: Disk, cached: int) -> Disk:
    wear = round(disk.written_bytes / cached, 1) if cached else None
    return replace(disk, written_per_cached_token=wear)


def add_up(models: Sequence[Figures], memory: Memory, kinds: Mapping[str, int]) -> Figures:
    """Return the figures of several models, each of which was loaded, as those of one server.

    Numbers are added, except those of what the models share, which are those of the first one, the
    default model. `kinds`: bytes charged by kind, such as "weights", "pool" or "kv", to `memory`
    and to all models.
    """
    first, total = models[0], _added(models)
    disk, exchange = first.disk, [one.remote["exchange"] for one in models if one.remote]
    opened = [one.disk for one in models if isinstance(one.disk, Disk)]
    if opened:
        stopped = next((one for one in opened if one.state != "ok"), opened[0])
        added = _added(opened)
        disk = replace(
            opened[0],
            written_bytes=added.written_bytes,
            written_tokens=added.written_tokens,
            evicted_files=added.evicted_files,
            state=stopped.state,
            reason=stopped.reason,
        )
        disk = _with_wear(disk, total.tokens.cached)
    return replace(
        total,
        ram=Ram(
            used_bytes=total.ram.used_bytes,
            limit_bytes=memory.limit_bytes,
            high_water_bytes=memory.high_water_bytes,
            withheld_bytes=kinds.get("withheld", 0),
            buffers=total.ram.buffers,
            buffer_limit=first.ram.buffer_limit,
            kinds=dict(kinds),
        ),
        reserved_bytes=_reserved(kinds),
        bytes_per_token=first.bytes_per_token,
        bytes_per_checkpoint=first.bytes_per_checkpoint,
        disk=disk,
        mlx=Mlx.now(),
        sessions=max(one.sessions for one in models),
        remote={**first.remote, "exchange": _added(exchange)} if first.remote else None,
        ranks=first.ranks,
        pressure=first.pressure,
    )


def _added(parts: Sequence[T]) -> T:
    """Add numbers, of tables by their keys and of structures by name; else return the first."""
    first = parts[0]
    made: Any = first
    if isinstance(first, Mapping):
        made = {key: _added([cast(Any, one).get(key, 0) for one in parts]) for key in first}
    elif is_dataclass(first):
        names = [one.name for one in fields(first)]
        sums = {name: _added([getattr(one, name, 0) for one in parts]) for name in names}
        made = cast(Any, type(first))(**sums)
    elif isinstance(first, int | float):
        made = round(sum(one or 0 for one in cast(Sequence[Any], parts)), 3)
    return cast(T, made)
