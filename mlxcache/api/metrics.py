"""`GET /metrics`: the server's figures as Prometheus metrics, read at each scrape.

Source of the conventions: https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

from anyio.to_thread import run_sync
from prometheus_client import CollectorRegistry
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache import __version__
from mlxcache.api.http import Deps

if TYPE_CHECKING:
    from collections import Counter

    from mlxcache.engine.engine import Engine
    from mlxcache.engine.metrics import Times
    from mlxcache.engine.models import Models


PREFIX = "mlxcache_"

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Family:
    """Description of a metric that is taken from the engine's figures.

    `name` is the metric's name without the prefix `mlxcache_` and without the `_total` of a
    counter. `labels` are the names of its labels. `path` is the keys, joined by dots, that lead to
    the metric's value in the figures: a number, or a mapping from the value of the label to a
    number. With several labels, the keys of the mapping are tuples of their values.
    """

    kind: Kind
    name: str
    help: str
    path: str
    labels: tuple[str, ...] = ()

    def iterate_samples(
        self, figures: Mapping[str, Any]
    ) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield (label values, number) for each value of this metric in `figures`.

        `figures`: a result of `arrange_figures`. The label values are in the order of `labels`.
        Nothing is yielded if `path` leads to no value.
        """
        value: Any = figures
        for key in self.path.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        if isinstance(value, Mapping):
            for label, number in value.items():
                yield label if isinstance(label, tuple) else (str(label),), float(number)
        elif value is not None:
            yield (), float(value)


RANK_FIGURES = (
    "silent_s",
    "operation_s",
    "footprint_bytes",
    "disk_used_bytes",
    "disk_limit_bytes",
)
"""Keys of the numbers that rank 0 of a divided model has of each other rank."""

LEVELS = ("normal", "warning", "critical")


def _gauge(name: str, help: str, path: str, *labels: str) -> Family:
    return Family("gauge", name, help, path, labels)


def _counter(name: str, help: str, path: str, *labels: str) -> Family:
    return Family("counter", name, help, path, labels)


_COUNTS = (
    _gauge("build_info", "Version and served model.", "build", "version", "model"),
    _counter("http_errors", "Error responses over HTTP.", "http_errors", "status"),
    _counter("requests", "Finished requests.", "tally.outcomes", "api", "outcome"),
    _counter("joined_requests", "Requests that shared another's reply.", "tally.joined"),
    _counter(
        "repetition_stops", "Replies ended because they repeated themselves.", "tally.repetitions"
    ),
    _counter("stage_seconds", "Time that requests spent in each stage.", "tally.stages", "stage"),
    _counter(
        "prefix_losses",
        "Requests that reused less than they could have.",
        "tally.losses",
        *("reason", "cause"),
    ),
    _counter(
        "prefix_lost_tokens", "Tokens computed again after a lost prefix.", "tally.lost", "reason"
    ),
)
_REQUESTS = (
    _counter("admitted_requests", "Requests that were computed.", "admitted", "reuse"),
    _gauge("queued_requests", "Waiting requests.", "queue.waiting"),
    _gauge("queue_limit", "Requests that may wait; more are refused.", "queue.limit"),
    _gauge("running_requests", "Requests being computed.", "running", "phase"),
    _counter("prompt_tokens", "Prompt tokens of computed requests.", "tokens.prompt"),
    _counter("cached_tokens", "Prompt tokens that were reused.", "tokens.cached"),
    _counter("restored_tokens", "Cached tokens that were read from disk.", "tokens.restored"),
    _counter("fed_tokens", "Prompt tokens that the model computed.", "tokens.fed"),
    _counter("generated_tokens", "Tokens of replies.", "tokens.generated"),
    _counter(
        "drafted_tokens",
        "Tokens proposed by a draft model or the conversation.",
        "guesses.drafted",
        "source",
    ),
    _counter(
        "accepted_tokens",
        "Drafted tokens that the model generated too.",
        "guesses.accepted",
        "source",
    ),
    _counter("guess_passes", "Passes that checked drafted tokens.", "guesses.passes", "source"),
    _gauge(
        "guess_saved_seconds",
        "Time that drafted tokens saved, less what they cost.",
        "guesses.saved_s",
        "source",
    ),
    _counter("saved_tokens", "Cached tokens that saved_seconds covers.", "saved.tokens"),
    _counter(
        "saved_seconds", "Time that computing the saved tokens would have taken.", "saved.seconds"
    ),
    _counter("anticipated_tokens", "Tokens computed ahead of turns.", "anticipated.tokens"),
    _counter(
        "anticipated_used_tokens",
        "Tokens computed ahead that a turn used.",
        "anticipated.used_tokens",
    ),
    _counter(
        "contained_exceptions",
        "Unexpected exceptions that ended at most one request.",
        "contained.exceptions",
    ),
    _counter(
        "canonicalised_requests", "Requests in which a rule changed text.", "canonicalised", "rule"
    ),
)

_MEMORY = (
    _gauge("sessions", "Sessions in the table.", "sessions"),
    _gauge("tree_tokens", "Tokens in the prefix tree.", "tree_tokens"),
    _gauge("tree_segments", "Segments of the prefix tree.", "segments"),
    _gauge("tree_checkpoints", "Checkpoints in the prefix tree.", "checkpoints"),
    _gauge("cache_bytes", "Bytes in use by purpose.", "bytes", "tier", "kind"),
    _gauge("cache_limit_bytes", "Memory budget, and limit of the disk tier.", "limits", "tier"),
    _gauge(
        "ram_high_water_bytes", "Highest use of the memory budget so far.", "ram.high_water_bytes"
    ),
    _gauge("ram_buffers", "MLX arrays in the cache.", "ram.buffers"),
    _gauge("mlx_active_bytes", "Bytes of MLX arrays, including weights.", "mlx.active_bytes"),
    _gauge("mlx_pool_bytes", "Bytes in MLX's pool of freed buffers.", "mlx.pool_bytes"),
    _gauge(
        "footprint_bytes",
        "Bytes of the process, as the system counts them.",
        "pressure.footprint_bytes",
    ),
    _gauge("memory_pressure", "1 for the current level of memory pressure.", "levels", "level"),
    _counter("ram_evictions", "Evictions from RAM.", "evictions", "outcome"),
)

_MODELS = (
    _gauge("model_loaded", "1 while the model's weights are in memory.", "loaded", "model"),
    _gauge(
        "model_loaded_ratio",
        "Progress of loading the model, 1 when loaded.",
        "loaded_shares",
        "model",
    ),
    _gauge("model_size_bytes", "Memory of the model without KV.", "sizes", "model"),
    _counter("model_loads", "Times that dropped weights were read again.", "loads", "model"),
    _counter("model_unloads", "Times that weights were dropped.", "unloads", "model"),
)

_DISK = (
    _gauge("pending_bytes", "Bytes waiting to be written to disk.", "pending_bytes"),
    _counter("disk_written_bytes", "Bytes written to disk.", "disk.written_bytes"),
    _counter("disk_written_tokens", "Tokens written to disk.", "disk.written_tokens"),
    _counter("disk_evicted_files", "Files evicted from disk.", "disk.evicted_files"),
    _gauge("disk_files", "Files in the disk tier.", "disk.files"),
    _gauge("disk_quarantined_files", "Damaged files in quarantine.", "disk.quarantined"),
    _gauge(
        "disk_suspended", "1 while writing to disk or reading its index fails.", "disk.suspended"
    ),
    _counter("restores", "Files verified before use.", "restores", "outcome"),
)

_REMOTE = (
    _gauge("remote_available", "1 if the remote can be read, else 0.", "remote.available"),
    _gauge("remote_writable", "1 if the remote can be written to, else 0.", "remote.writable"),
    _gauge("remote_waiting_uploads", "Uploads that wait.", "remote.exchange.waiting"),
    _gauge(
        "remote_bytes_per_second",
        "Measured bandwidth of recent transfers.",
        "remote.bandwidth",
        "direction",
    ),
    _counter(
        "remote_transferred_bytes",
        "Bytes of objects moved.",
        "remote.moved_bytes",
        "direction",
    ),
    _counter("remote_transferred_objects", "Objects moved.", "remote.moved_objects", "direction"),
    _counter("remote_errors", "Operations that failed.", "remote.errors"),
    _counter("remote_damaged_objects", "Objects read and not used.", "remote.damaged_objects"),
    _counter(
        "remote_fetched_tokens", "Tokens fetched for prompts.", "remote.exchange.fetched_tokens"
    ),
)

_SERVER = (
    _gauge("ready", "1 while requests are served.", "ready"),
    _gauge("mlx_thread_silent_seconds", "Duration of the current step.", "silent_s"),
)

_RANKS = (
    _gauge("ranks", "Processes that serve a divided model.", "ranks.size"),
    _gauge("rank_silent_seconds", "Time since a rank answered.", "ranks.silent_s", "rank"),
    _gauge(
        "rank_operation_seconds", "Duration of a rank's operation.", "ranks.operation_s", "rank"
    ),
    _gauge("rank_memory_bytes", "Memory of a rank's process.", "ranks.footprint_bytes", "rank"),
    _gauge("rank_disk_bytes", "Size of a rank's disk tier.", "ranks.disk_used_bytes", "rank"),
    _gauge(
        "rank_disk_limit_bytes", "Limit of a rank's disk tier.", "ranks.disk_limit_bytes", "rank"
    ),
    _gauge(
        "rank_memory_pressure", "1 for a rank's memory pressure.", "ranks.levels", "rank", "level"
    ),
)

FAMILIES = (*_REQUESTS, *_MEMORY, *_MODELS, *_DISK, *_REMOTE, *_RANKS, *_SERVER)


def arrange_figures(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return the engine's `figures`, with mappings added for the metrics of `FAMILIES`.

    The level of memory pressure becomes a mapping from each possible level to True or False, and
    the state of the disk a boolean, `suspended`. Totals, such as `total` beside the counts of
    requests by kind, are left out of the mappings.
    """
    tiers = {tier: figures.get(tier, {}) for tier in ("ram", "disk")}
    disk, queue = tiers["disk"], figures.get("queue", {})
    level, models = figures.get("pressure", {}).get("level"), figures.get("models", ())
    made: dict[str, Any] = {
        "admitted": {k: n for k, n in figures.get("requests", {}).items() if k != "total"},
        "running": {phase: n for phase, n in queue.items() if phase in ("prefill", "decode")},
        "levels": {one: one == level for one in LEVELS if level is not None},
        "bytes": {(t, kind): n for t, x in tiers.items() for kind, n in x.get("kinds", {}).items()},
        "loaded": {one["label"]: one["state"] == "loaded" for one in models},
        "sizes": {one["label"]: one["size_bytes"] for one in models if "size_bytes" in one},
        "loaded_shares": {one["label"]: _loaded_share(one) for one in models},
        "loads": {one["label"]: one.get("loads", 0) for one in models},
        "unloads": {one["label"]: one.get("unloads", 0) for one in models},
        "limits": {t: n for t, x in tiers.items() if (n := x.get("limit_bytes")) is not None},
    }
    if "state" in disk:
        made["disk"] = {**disk, "suspended": disk["state"] != "ok"}
    if (remote := figures.get("remote")) is not None:
        made["remote"] = _arrange_remote(remote)
    if (ranks := figures.get("ranks")) is not None:
        made["ranks"] = _arrange_ranks(ranks)
    return {**figures, **made}


def _arrange_ranks(ranks: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the metrics `_RANKS`, from the figures `ranks` of a divided model.

    `size` is the number of ranks. Each of `RANK_FIGURES` is a mapping from each rank but rank 0 to
    its figure, if that is known. `levels` maps (rank, level of memory pressure) to True if the rank
    is at that level, else False.
    """
    others = ranks["others"]
    numbers = {
        name: {one["rank"]: one[name] for one in others if one[name] is not None}
        for name in RANK_FIGURES
    }
    levels = {
        (str(one["rank"]), level): one["pressure"] == level for one in others for level in LEVELS
    }
    return {"size": ranks["size"], **numbers, "levels": levels}


def _arrange_remote(remote: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of the remote, with entries added for the metrics `_REMOTE`.

    Added are `bandwidth` (bytes per second), `moved_bytes` and `moved_objects`, each a mapping from
    the direction, `up` or `down`, to a number; and, from the state of the remote, the booleans
    `available` (the remote can be read) and `writable`.
    """
    ways = {"up": "upload", "down": "download"}
    rates = {way: remote[f"{name}_bytes_per_s"] for way, name in ways.items()}
    return {
        **remote,
        "available": remote["state"] != "unavailable",
        "writable": remote["state"] == "ok",
        "bandwidth": {way: rate for way, rate in rates.items() if rate is not None},
        "moved_bytes": {way: remote[f"{name}ed_bytes"] for way, name in ways.items()},
        "moved_objects": {way: remote[f"{name}ed_objects"] for way, name in ways.items()},
    }


def routes(deps: Deps) -> list[Route]:
    """Return the route of the metrics."""
    collector = EngineCollector(deps.engine, deps.error_counts, deps.models)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return [Route("/metrics", partial(metrics, collector, registry), methods=["GET"])]


async def metrics(
    collector: EngineCollector, registry: CollectorRegistry, request: Request
) -> Response:
    """Return all metrics of the server as Prometheus text or, by `Accept`, as OpenMetrics."""
    await collector.refresh()
    body, type = _encode(registry, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": type})


def _encode(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return the metrics and their content type, in the format that the header `accept` prefers."""
    try:
        encode, type = choose_encoder(accept)
        return encode(registry), type
    except (TypeError, ValueError):  # `accept` holds an invalid version
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _loaded_share(model: Mapping[str, Any]) -> float:
    """Return how far a model is loaded: 1.0 if it is loaded, 0.0 if it is neither that nor loading.

    While it is being loaded, its `progress` is returned (see `Models.describe`).
    `model`: the model's entry in the figures `models`.
    """
    if model["state"] == "loading":
        return float(model.get("progress") or 0.0)
    return 1.0 if model["state"] == "loaded" else 0.0


class EngineCollector(Collector):
    """Prometheus collector of the server's figures and counts. Call it from the event loop.

    `engine`: that of the default model. `error_counts`: error responses by HTTP status. `models`:
    all models, if there are several, else None.
    """

    def __init__(self, engine: Engine, error_counts: Counter[int], models: Models | None = None):
        self._engine, self._error_counts, self._models = engine, error_counts, models
        self._figures: dict[str, Any] = {}

    async def refresh(self) -> None:
        """Read the figures that the next `collect` reports.

        They are read in another thread, because that waits for the disk.
        """
        if self._models is not None:
            self._figures = await run_sync(self._models.figures)
            return
        one, figures = self._engine, await run_sync(self._engine.figures)
        models = [{"label": one.label, **one.residence}] if one.residence else []
        self._figures = {**figures, "models": models}

    def describe(self) -> list[Metric]:
        """Return no metrics: `prometheus_client` then does not read them at registration.

        There are no values before a model is loaded.
        """
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, even if it has no value.

        The figures are those of the last `refresh`; those of `Engine.tally` are the present ones.
        """
        engine, tally = self._engine, self._engine.tally
        counts = {
            "build": {(__version__, engine.info.id if engine.info else ""): 1},
            "http_errors": self._error_counts,  # of all paths, also those before the engine
            "tally": {
                "outcomes": tally.outcomes,
                "joined": tally.joined,
                "repetitions": tally.repetitions,
                "stages": {stage.removesuffix("_s"): s for stage, s in tally.stages.items()},
                "losses": tally.losses,
                "lost": tally.lost_tokens,
            },
            "ready": engine.state == "ready" and engine.failure is None,
            "silent_s": engine.silent_s,
        }
        now = arrange_figures({**self._figures, **counts})
        yield from (_figure(family, now) for family in (*_COUNTS, *FAMILIES))
        first, whole = tally.first_token, tally.whole
        yield _histogram("first_token_seconds", "Time from arrival to the first token.", first)
        yield _histogram("request_duration_seconds", "Time from arrival to the end.", whole)


def _figure(family: Family, now: dict[str, Any]) -> Metric:
    of = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    made = of(PREFIX + family.name, family.help, labels=family.labels)
    for labels, value in family.iterate_samples(now):
        made.add_metric(labels, value)
    return made


def _histogram(name: str, help: str, times: dict[Any, Times]) -> Metric:
    made = HistogramMetricFamily(PREFIX + name, help, labels=("reuse",))
    for reuse, one in times.items():
        bounds = (*map(str, one.bounds), "+Inf")
        made.add_metric(
            (reuse,), list(zip(bounds, accumulate(one.counts), strict=True)), one.total_s
        )
    return made
