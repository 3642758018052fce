"""`GET /metrics`: the server's figures as Prometheus metrics, read at each scrape.

Source of the conventions: https://prometheus.io/docs/practices/naming/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
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

from mlxcache import __version__
from mlxcache.api.http import Deps
from mlxcache.api.operation import Operation
from mlxcache.engine.figures import Disk, Figures

if TYPE_CHECKING:
    from collections import Counter

    from mlxcache.engine.metrics import Times
    from mlxcache.engine.models import Models


PREFIX = "mlxcache_"

Kind = Literal["counter", "gauge"]


@dataclass(frozen=True, slots=True)
class Family:
    """Description of a metric that is taken from the engine's figures.

    `name` lacks the prefix `mlxcache_` and the `_total` of a counter. `path`: the names, joined by
    dots, that lead to a number in the figures, or to a structure or mapping with one for each value
    of the label; from tuples of values with several labels.
    """

    kind: Kind
    name: str
    help: str
    path: str
    labels: tuple[str, ...] = ()

    def iterate_samples(self, now: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], float]]:
        """Yield (label values, number) for each value of this metric."""
        value: Any = now
        for name in self.path.split("."):
            value = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        if is_dataclass(value) and not isinstance(value, type):
            value = asdict(value)
        if isinstance(value, Mapping):
            for label, number in value.items():
                yield label if isinstance(label, tuple) else (str(label),), float(number)
        elif value is not None:
            yield (), float(value)


RANK_FIGURES = ("silent_s", "operation_s", "footprint_bytes", "disk_used_bytes", "disk_limit_bytes")

LEVELS = ("normal", "warning", "critical")


def _read(table: str) -> tuple[Family, ...]:
    """Parse a table of metrics: names with labels, paths, and help texts, two blanks between."""
    found = []
    for row in table.strip().splitlines():
        head, path, help = row.split("  ")
        name, _, labels = head.removesuffix("}").partition("{")
        names = tuple(labels.split(",")) if labels else ()
        kind: Kind = "counter" if name.endswith("_total") else "gauge"
        found.append(Family(kind, name.removesuffix("_total"), help, path, names))
    return tuple(found)


_COUNTS = _read(
    """
build_info{version,model}  build  Version and served model.
http_errors_total{status}  http_errors  Error responses over HTTP.
requests_total{api,outcome}  tally.outcomes  Finished requests.
joined_requests_total  tally.joined  Requests that shared another's reply.
repetition_stops_total  tally.repetitions  Replies ended because they repeated themselves.
stage_seconds_total{stage}  tally.stages  Time that requests spent in each stage.
prefix_losses_total{reason,cause}  tally.losses  Requests that reused less than they could have.
prefix_lost_tokens_total{reason}  tally.lost  Tokens computed again after a lost prefix.
"""
)
FAMILIES = _read(
    """
admitted_requests_total{reuse}  admitted  Requests that were computed.
queued_requests  queue.waiting  Waiting requests.
queue_limit  queue.limit  Requests that may wait; more are refused.
running_requests{phase}  running  Requests being computed.
prompt_tokens_total  tokens.prompt  Prompt tokens of computed requests.
cached_tokens_total  tokens.cached  Prompt tokens that were reused.
restored_tokens_total  tokens.restored  Cached tokens that were read from disk.
fed_tokens_total  tokens.fed  Prompt tokens that the model computed.
generated_tokens_total  tokens.generated  Tokens of replies.
drafted_tokens_total{source}  guesses.drafted  Tokens proposed by a draft model, heads or \
the conversation.
accepted_tokens_total{source}  guesses.accepted  Drafted tokens that the model generated too.
guess_passes_total{source}  guesses.passes  Passes that checked drafted tokens.
guess_saved_seconds{source}  guesses.saved_s  Time that drafted tokens saved, less what they cost.
saved_tokens_total  saved.tokens  Cached tokens that saved_seconds covers.
saved_seconds_total  saved.seconds  Time that computing the saved tokens would have taken.
anticipated_tokens_total  anticipated.tokens  Tokens computed ahead of turns.
anticipated_used_tokens_total  anticipated.used_tokens  Tokens computed ahead that a turn used.
contained_exceptions_total  contained.exceptions  Unexpected exceptions that ended at most one \
request.
canonicalised_requests_total{rule}  canonicalised  Requests in which a rule changed text.
sessions  sessions  Sessions in the table.
tree_tokens  tree_tokens  Tokens in the prefix tree.
tree_segments  segments  Segments of the prefix tree.
tree_checkpoints  checkpoints  Checkpoints in the prefix tree.
cache_bytes{tier,kind}  bytes  Bytes in use by purpose.
cache_limit_bytes{tier}  limits  Memory budget, and limit of the disk tier.
ram_high_water_bytes  ram.high_water_bytes  Highest use of the memory budget so far.
ram_buffers  ram.buffers  MLX arrays in the cache.
mlx_active_bytes  mlx.active_bytes  Bytes of MLX arrays, including weights.
mlx_pool_bytes  mlx.pool_bytes  Bytes in MLX's pool of freed buffers.
footprint_bytes  pressure.footprint_bytes  Bytes of the process, as the system counts them.
memory_pressure{level}  levels  1 for the current level of memory pressure.
ram_evictions_total{outcome}  evictions  Evictions from RAM.
model_loaded{model}  loaded  1 while the model's weights are in memory.
model_loaded_ratio{model}  loaded_shares  Progress of loading the model, 1 when loaded.
model_size_bytes{model}  sizes  Memory of the model without KV.
model_loads_total{model}  loads  Times that dropped weights were read again.
model_unloads_total{model}  unloads  Times that weights were dropped.
pending_bytes  pending_bytes  Bytes waiting to be written to disk.
disk_written_bytes_total  disk.written_bytes  Bytes written to disk.
disk_written_tokens_total  disk.written_tokens  Tokens written to disk.
disk_evicted_files_total  disk.evicted_files  Files evicted from disk.
disk_files  disk.files  Files in the disk tier.
disk_quarantined_files  disk.quarantined  Damaged files in quarantine.
disk_suspended  suspended  1 while writing to disk or reading its index fails.
restores_total{outcome}  restores  Files verified before use.
remote_available  remote.available  1 if the remote can be read, else 0.
remote_writable  remote.writable  1 if the remote can be written to, else 0.
remote_waiting_uploads  remote.exchange.waiting  Uploads that wait.
remote_bytes_per_second{direction}  remote.bandwidth  Measured bandwidth of recent transfers.
remote_transferred_bytes_total{direction}  remote.moved_bytes  Bytes of objects moved.
remote_transferred_objects_total{direction}  remote.moved_objects  Objects moved.
remote_errors_total  remote.errors  Operations that failed.
remote_damaged_objects_total  remote.damaged_objects  Objects read and not used.
remote_fetched_tokens_total  remote.exchange.fetched_tokens  Tokens fetched for prompts.
ranks  ranks.size  Processes that serve a divided model.
rank_silent_seconds{rank}  ranks.silent_s  Time since a rank answered.
rank_operation_seconds{rank}  ranks.operation_s  Duration of a rank's operation.
rank_memory_bytes{rank}  ranks.footprint_bytes  Memory of a rank's process.
rank_disk_bytes{rank}  ranks.disk_used_bytes  Size of a rank's disk tier.
rank_disk_limit_bytes{rank}  ranks.disk_limit_bytes  Limit of a rank's disk tier.
rank_memory_pressure{rank,level}  ranks.levels  1 for a rank's memory pressure.
ready  ready  1 while requests are served.
mlx_thread_silent_seconds  silent_s  Duration of the current step.
"""
)


def arrange_figures(
    figures: Figures | None, models: Sequence[Mapping[str, Any]] = ()
) -> dict[str, Any]:
    """Return the parts of `figures` by name, with mappings added for the metrics of `FAMILIES`."""
    made: dict[str, Any] = {
        "loaded": {one["label"]: one["state"] == "loaded" for one in models},
        "sizes": {one["label"]: one["size_bytes"] for one in models if "size_bytes" in one},
        "loaded_shares": {one["label"]: _loaded_share(one) for one in models},
        "loads": {one["label"]: one.get("loads", 0) for one in models},
        "unloads": {one["label"]: one.get("unloads", 0) for one in models},
    }
    if figures is None:
        return made
    requests, queue, ram, disk = figures.requests, figures.queue, figures.ram, figures.disk
    kinds = {("ram", kind): count for kind, count in ram.kinds.items()}
    made |= {
        "admitted": {"warm": requests.warm, "restored": requests.restored, "cold": requests.cold},
        "running": {"prefill": queue.prefill, "decode": queue.decode},
        "bytes": kinds,
        "limits": {"ram": ram.limit_bytes, "disk": disk.limit_bytes},
    }
    if disk.limit_bytes is None:
        del made["limits"]["disk"]
    if isinstance(disk, Disk):
        made["bytes"] |= {("disk", kind): count for kind, count in disk.kinds.items()}
        made["suspended"] = disk.state != "ok"
    if (pressure := figures.pressure) is not None:
        made["levels"] = {level: level == pressure["level"] for level in LEVELS}
    if figures.remote is not None:
        made["remote"] = _arrange_remote(figures.remote)
    if figures.ranks is not None:
        made["ranks"] = _arrange_ranks(figures.ranks)
    return {one.name: getattr(figures, one.name) for one in fields(figures)} | made


def _arrange_ranks(ranks: Mapping[str, Any]) -> dict[str, Any]:
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


async def metrics(collector: EngineCollector, deps: Deps, request: Request) -> Response:
    """Return all metrics of the server as Prometheus text or, by `Accept`, as OpenMetrics."""
    await collector.refresh()
    body, type = _encode(collector.registry, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": type})


def endpoints(deps: Deps) -> Mapping[str, Operation]:
    """Return the endpoint of the metrics, with its collector."""
    handler = partial(metrics, EngineCollector(deps.models, deps.error_counts))
    return {"GET /metrics": Operation(handler, types=("text/plain",))}


def _encode(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    try:
        encode, type = choose_encoder(accept)
        return encode(registry), type
    except (TypeError, ValueError):  # `accept` holds an invalid version
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _loaded_share(model: Mapping[str, Any]) -> float:
    if model["state"] == "loading":
        return float(model.get("progress") or 0.0)
    return 1.0 if model["state"] == "loaded" else 0.0


class EngineCollector(Collector):
    """Prometheus collector of the server's figures and counts. Call it from the event loop."""

    def __init__(self, models: Models, error_counts: Counter[int]):
        self._models, self._error_counts = models, error_counts
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        self._figures: Figures | None = None

    async def refresh(self) -> None:
        """Read the figures that the next `collect` reports, in a thread: it waits for the disk."""
        self._figures = await run_sync(self._models.measure)

    def describe(self) -> list[Metric]:
        """Return nothing, so that `prometheus_client` reads no metrics at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield each metric once, even if it has no value."""
        engine = self._models.default
        tally = engine.tally
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
        models = self._models.describe() if self._figures is not None else ()
        now = arrange_figures(self._figures, [one for one in models if "state" in one]) | counts
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
