"""Metrics: records of recent requests, counts of all, and the figures of `GET /v1/cache`."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import mlx.core as mx

from mlxcache.cache.kv_cache import KVCache
from mlxcache.config.rules import RULES
from mlxcache.engine.trace import Recordings
from mlxcache.lru import LRU
from mlxcache.scheduling.cost import PrefillSpeed, figures_of
from mlxcache.store.session_rows import SessionFigures
from mlxcache.types import WARMING, Arrival, GuessSource, Job, RequestRecord

if TYPE_CHECKING:
    from mlxcache.scheduling.anticipate import IdlePrefill
    from mlxcache.scheduling.wall import Wall

Reuse = Literal["cold", "warm", "restored"]
"""Source of most of a prompt: computed; reused from RAM alone; reused, in part from disk."""

MIN_REUSED_SHARE, MIN_REUSED_TOKENS = 0.5, 16
"""Minimum reuse for a request to count as warm: share of the prompt, and number of tokens."""

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
"""Upper bounds, in seconds, of the ranges by which durations are counted."""

STAGES = ("queue_s", "render_s", "match_s", "restore_s", "prefill_s", "decode_s")
"""Stages of a request that follow one another; `first_token_s`, in contrast, spans several."""

OUTCOMES = ("done", "cancelled", "failed", "rejected")
REASONS = (
    *("evicted", "edited", "moved", "system_changed", "tools_changed", "template_drift"),
    *("checkpoint_gap", "namespace", "corrupt", "first_seen"),
)

KINDS: tuple[Reuse, ...] = ("cold", "warm", "restored")


def reuse_of(record: RequestRecord) -> Reuse:
    """Return whether a request was cold, warm or restored, as the glossary defines these."""
    cached = record.cached_tokens
    if cached <= MIN_REUSED_TOKENS or cached < MIN_REUSED_SHARE * record.prompt_tokens:
        return "cold"
    return "restored" if record.restored_tokens else "warm"


@dataclass(slots=True)
class Times:
    """A histogram of durations in seconds.

    `counts[i]` is the number of durations up to `bounds[i]` and above the bound before; the last
    count is for durations above all bounds. `total_s`: the sum of all durations.
    """

    bounds: ClassVar[tuple[float, ...]] = SECONDS
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        """Number of durations counted."""
        return sum(self.counts)

    @property
    def average(self) -> float | None:
        """Mean duration in seconds; None if nothing was counted."""
        return self.total_s / self.count if self.count else None


def _no_losses() -> Counter[str]:
    return Counter(dict.fromkeys(REASONS, 0))


def _by_kind() -> dict[Reuse, Times]:
    return {kind: Times() for kind in KINDS}


@dataclass(slots=True)
class Tally:
    """Counts of ended requests, including refused and joined ones. Event loop only.

    `outcomes` counts by API and status, such as ("chat", "done"). `joined`: requests that shared
    the computation of another; only these two fields count them. `first_token` and `whole`: times
    from a client's request to its first token and to its end, by whether it was cold, warm or
    restored. `stages`: total seconds by stage; see `STAGES`. `losses` counts prefix losses by
    reason and cause (see docs/how-caching-works.md#explain), `lost_tokens` their tokens by reason. `repetitions`:
    replies ended because they repeated themselves.
    """

    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)
    joined: int = 0
    repetitions: int = 0
    first_token: dict[Reuse, Times] = field(default_factory=_by_kind)
    whole: dict[Reuse, Times] = field(default_factory=_by_kind)
    stages: Counter[str] = field(default_factory=Counter)
    losses: Counter[tuple[str, str]] = field(default_factory=Counter)
    lost_tokens: Counter[str] = field(default_factory=_no_losses)

    def add(self, record: RequestRecord) -> None:
        """Count a request that is over."""
        api = record.api or "other"
        for outcome in OUTCOMES:  # zeros too: Prometheus sees no rise from an absent series
            self.outcomes[api, outcome] += outcome == record.status
        if record.joined is not None:  # the computation is counted once
            self.joined += 1
            return
        self.repetitions += record.finish_reason == "repetition"
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


MAX_RECORDS = 1000


class Records:
    """Records of the latest `MAX_RECORDS` requests by id, and the tally of all.

    Use on the event loop. `recordings`: traces that are being recorded. `on_over(record)` is called
    for each request that is over.
    """

    def __init__(self, on_over: Callable[[RequestRecord], None]) -> None:
        self.tally = Tally()
        self.recordings = Recordings()
        self._on_over = on_over
        self._kept: LRU[str, RequestRecord] = LRU(MAX_RECORDS)

    def begin(self, job: Job, model: str | None = None) -> RequestRecord:
        """Make the record of a request that has just arrived for the model with label `model`."""
        record = RequestRecord(
            id=job.id,
            session=job.session,
            api=job.api,
            client=job.client,
            status="queued",
            created_at=time.time() - job.loaded_s,
            prompt_tokens=len(job.prompt.ids),
            timing={"render_s": round(job.render_s, 6)},
            canonicalised=job.prompt.rules,
            owner=job.owner,
            model=model,
        )
        self._kept.put(record.id, record)
        return record

    def expect(self, arrival: Arrival, model: str) -> RequestRecord:
        """Make the record of a request that waits until its model, of label `model`, is loaded.

        It is replaced by that of `begin`; see `forget`.
        """
        record = RequestRecord(
            id=arrival.id,
            session=arrival.session,
            api=arrival.api,
            client=arrival.client,
            status="queued",
            created_at=time.time(),
            owner=arrival.owner,
            model=model,
        )
        self._kept.put(record.id, record)
        return record

    def forget(self, id: str) -> None:
        """Remove the record that `expect` made for request `id`; `begin` makes another one."""
        self._kept.pop(id)

    def end(self, record: RequestRecord) -> None:
        """Count a request that is over, and call `on_over`."""
        self.tally.add(record)
        self._on_over(record)

    def reject(self, record: RequestRecord, error: BaseException) -> None:
        """Complete the record of a request that was refused with `error`, and count it as `end`."""
        record.status, record.error = "rejected", str(error) or type(error).__name__
        self.end(record)

    def all(self, owner: str | None) -> list[RequestRecord]:
        """Return the records of an owner's requests, newest first."""
        return [record for record in reversed(self._kept.values()) if record.owner == owner]

    def get(self, id: str, owner: str | None) -> RequestRecord | None:
        """Return the record of request `id` if it belongs to `owner`, else None."""
        found = self._kept.peek(id)
        return found if found is not None and found.owner == owner else None


GUESSES = {
    "drafted": "drafted_tokens",
    "accepted": "accepted_tokens",
    "passes": "guess_passes",
    "saved_s": "guess_saved_s",
}
"""Keys of `Totals.guesses`, each with the field of `RequestRecord` whose values it adds up."""

SOURCES: tuple[GuessSource, ...] = ("draft", "history")
"""Sources of drafted tokens: a draft model, or the conversation."""


@dataclass(slots=True)
class Totals:
    """Sums over all ended requests whose computation had begun. MLX thread only.

    `requests`: number of all requests, and of those that were warm, restored and cold. `tokens`:
    their prompt, cached, restored, fed, generated, drafted and accepted tokens. `canonicalised`:
    number of requests that each rule changed. `sessions`: labels of the requests' sessions.
    `saved`: tokens and seconds that reuse saved clients. `guesses`: drafted and accepted tokens,
    passes that checked them, and the seconds that these saved, each by source of the tokens.
    """

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
    guesses: dict[str, dict[str, float]] = field(
        default_factory=lambda: {name: dict.fromkeys(SOURCES, 0) for name in GUESSES}
    )
    saved: dict[str, float] = field(default_factory=lambda: {"tokens": 0, "seconds": 0.0})

    def add(self, record: RequestRecord, speed: PrefillSpeed) -> SessionFigures:
        """Count a request that is over; return its figures, with what reuse of KV saved it.

        `speed`: measured cost of prefill, from which the saved seconds are computed.
        """
        figures = figures_of(record, speed)
        self.requests["total"] += 1
        self.requests[reuse_of(record)] += 1
        for name in self.tokens:
            self.tokens[name] += getattr(record, f"{name}_tokens")
        self._add_guesses(record)
        if record.api != WARMING:
            self.saved["tokens"] += figures.saved_tokens
            self.saved["seconds"] += figures.saved_s
        for rule in record.canonicalised:
            self.canonicalised[rule] += 1
        if record.session:
            self.sessions.add(record.session)
        return figures

    def _add_guesses(self, record: RequestRecord) -> None:
        if record.guess_source is None:
            return
        for name, counted in GUESSES.items():
            held = self.guesses[name]
            held[record.guess_source] = round(
                held[record.guess_source] + getattr(record, counted), 6
            )


def memory_of_mlx() -> dict[str, int]:
    """Return MLX's own counts of its memory in bytes. Any thread.

    `active_bytes`: the memory of arrays. `pool_bytes`: freed buffers that MLX keeps.
    """
    return {"active_bytes": mx.get_active_memory(), "pool_bytes": mx.get_cache_memory()}


class Figures:
    """Maker of the response body of `GET /v1/cache`.

    The body is made on the MLX thread; any thread may read the finished dictionary in `latest`.
    Some fields: `used_bytes` in `ram` is the part of the budget that the prefix tree takes, and
    `active_bytes` what lineages take beyond it. `mlx` is memory as MLX itself counts it, including
    the weights. `canonicalised`: number of requests that each rule changed. `saved`: cached tokens,
    and the seconds that computing them would have taken at the measured speed of prefill.
    `anticipated`: tokens computed in advance, and the number of those that requests reused.
    `contained`: exceptions that nobody expected and that ended at most one request.

    The argument `no_disk` says why there is no disk tier; None if there is one, or if it is off.
    """

    def __init__(
        self,
        kv: KVCache,
        totals: Totals,
        idle_prefill: IdlePrefill,
        wall: Wall,
        no_disk: str | None = None,
    ):
        self._no_disk = no_disk
        self.latest: dict[str, Any] = {}
        self._kv = kv
        self._totals = totals
        self._idle_prefill = idle_prefill
        self._wall = wall

    def publish(self) -> None:
        """Replace `latest` by the current figures, for other threads to read. MLX thread only."""
        totals, ahead = self._totals, self._idle_prefill
        self.latest = self._kv.figures() | {
            "disk": {"used_bytes": 0, "limit_bytes": 0, "reason": self._no_disk},
            "mlx": memory_of_mlx(),
            "sessions": len(totals.sessions),
            "requests": dict(totals.requests),
            "tokens": dict(totals.tokens),
            "guesses": {name: dict(totals.guesses[name]) for name in GUESSES},
            "saved": totals.saved | {"seconds": round(totals.saved["seconds"], 3)},
            "canonicalised": dict(totals.canonicalised),
            "anticipated": {"tokens": ahead.tokens, "used_tokens": ahead.used},
            "contained": {"exceptions": self._wall.contained},
            "restores": {"ok": 0, "corrupt": 0},
        }


def with_disk(figures: dict[str, Any], stats: dict[str, Any]) -> dict[str, Any]:
    """Add the figures of the disk tier to `figures`, a body of `GET /v1/cache`.

    Returns a new dictionary, or `figures` if it is empty. `stats`: see `DiskTier.figures`.
    `written_per_cached_token` measures wear: bytes written to disk since the start, divided by the
    prompt tokens that were reused. It is None if none were.
    """
    if not figures:
        return figures
    disk = {name: value for name, value in stats.items() if name != "restores"}
    saved = figures["tokens"]["cached"]
    disk["written_per_cached_token"] = round(disk["written_bytes"] / saved, 1) if saved else None
    return {**figures, "disk": disk, "restores": stats["restores"]}


COUNTED = (
    *("requests", "tokens", "saved", "canonicalised", "anticipated", "contained", "evictions"),
    "restores",
)
"""Parts of `GET /v1/cache` that map names to counts. Those of several models are added by name."""

SIZES = ("active_bytes", "pending_bytes", "tree_tokens", "segments", "checkpoints")
"""Figures of `GET /v1/cache` that are one number. Those of several models are added."""

DISK_COUNTS = ("written_bytes", "written_tokens", "evicted_files")
"""Figures of the disk tier that each model counts for itself, so that those of several are added.
"""


def add_up(
    models: Sequence[Mapping[str, Any]], memory: Mapping[str, int], kinds: Mapping[str, int]
) -> dict[str, Any]:
    """Return the figures of several models as one body of `GET /v1/cache`.

    `models`: the figures of each model that was loaded, those of the default model first. `memory`:
    `limit_bytes` and `high_water_bytes` of the shared budget. `kinds`: bytes charged by kind, such
    as "weights", "pool" or "kv", summed over that budget and those of all models.
    """
    ram = _sums([one["ram"] for one in models], ("used_bytes", "buffers"))
    ram |= {name: memory[name] for name in ("limit_bytes", "high_water_bytes")}
    ram |= {"withheld_bytes": kinds.get("withheld", 0), "kinds": dict(kinds)}
    figures = {
        **models[0],
        **_sums(models, SIZES),
        **{name: _sums([one[name] for one in models]) for name in COUNTED},
        "ram": {**models[0]["ram"], **ram},
        "reserved_bytes": kinds.get("transient", 0) + kinds.get("pool", 0),
        "mlx": memory_of_mlx(),
        "sessions": max(one["sessions"] for one in models),
        "guesses": {
            name: _sums([one["guesses"][name] for one in models], SOURCES) for name in GUESSES
        },
        "queue": _sums([one["queue"] for one in models]),
    }
    disks = [one["disk"] for one in models if "state" in one["disk"]]  # those that were opened
    if disks:
        stopped = next((one for one in disks if one["state"] != "ok"), disks[0])
        state = {name: stopped[name] for name in ("state", "reason")}
        restores = {"restores": figures["restores"]}
        stats = {**disks[0], **_sums(disks, DISK_COUNTS), **state, **restores}
        figures = with_disk(figures, stats)
    if "remote" in figures:
        exchange = _sums([one["remote"]["exchange"] for one in models])
        figures["remote"] = {**figures["remote"], "exchange": exchange}
    return figures


def _sums(parts: Sequence[Mapping[str, Any]], names: Iterable[str] = ()) -> dict[str, Any]:
    """Return the sum over `parts` of each figure in `names`, by name; a missing one counts as 0."""
    return {name: round(sum(one.get(name) or 0 for one in parts), 3) for name in names or parts[0]}
