"""`GET /metrics`: the server's figures in the words of Prometheus, read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

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
from mlxcache.api.metric_table import FAMILIES, PREFIX, Family, arranged

if TYPE_CHECKING:
    from collections import Counter

    from mlxcache.engine.engine import Engine
    from mlxcache.engine.metrics import Tally, Times


def routes(deps: Deps) -> list[Route]:
    """The one route."""
    figures = Figures(deps.engine, deps.refusals)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(figures)
    return [Route("/metrics", partial(metrics, figures, registry), methods=["GET"])]


async def metrics(figures: Figures, registry: CollectorRegistry, request: Request) -> Response:
    """All figures, of the whole server: as text, or as OpenMetrics where `Accept` asks for it."""
    await figures.renew()
    body, type = _encoded(registry, request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": type})


def _encoded(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """What goes out, and its type."""
    try:
        encode, type = choose_encoder(accept)
        return encode(registry), type
    except (TypeError, ValueError):  # a version that is none
        return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


class Figures(Collector):
    """What an engine counts, as metrics. Nothing is counted here, so nothing is counted twice.

    Call everything from the event loop.
    """

    def __init__(self, engine: Engine, refusals: Counter[int]):
        self._engine, self._refusals = engine, refusals
        self._now: dict[str, Any] = {}

    async def renew(self) -> None:
        """Read the figures anew, which waits for the disk's and never for the MLX thread."""
        self._now = await run_sync(self._engine.figures)

    def describe(self) -> list[Metric]:
        """Nothing: names are the same before a model is loaded, values are not there yet."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Each metric once, those without a value too."""
        engine = self._engine
        ready = engine.state == "ready" and engine.failure is None
        now = arranged({**self._now, "ready": ready, "silent_s": engine.silent_s})
        yield _build(engine)
        yield _refused(self._refusals)
        yield from _tallied(engine.tally)
        yield from (_figure(family, now) for family in FAMILIES)


def _build(engine: Engine) -> Metric:
    info = engine.info
    made = GaugeMetricFamily(
        f"{PREFIX}build_info", "The version, and the model served.", labels=("version", "model")
    )
    made.add_metric((__version__, info.id if info else ""), 1)
    return made


def _figure(family: Family, now: dict[str, Any]) -> Metric:
    of = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    made = of(PREFIX + family.name, family.help, labels=family.labels)
    for labels, value in family.samples(now):
        made.add_metric(labels, value)
    return made


def _refused(refusals: Counter[int]) -> Metric:
    """Answers that were errors, whatever was asked: also of what was no request to the model."""
    made = CounterMetricFamily(
        f"{PREFIX}http_errors", "Answers over HTTP that were errors.", labels=("status",)
    )
    for status, count in refusals.items():
        made.add_metric((str(status),), count)
    return made


def _tallied(tally: Tally) -> Iterator[Metric]:
    """What is counted when a request is over."""
    requests = CounterMetricFamily(
        f"{PREFIX}requests", "Requests that are over.", labels=("api", "outcome")
    )
    for (api, outcome), count in tally.outcomes.items():
        requests.add_metric((api, outcome), count)
    yield requests
    yield CounterMetricFamily(
        f"{PREFIX}joined_requests", "Requests that shared another's reply.", value=tally.joined
    )
    yield _histogram("first_token_seconds", "From arrival to the first token.", tally.first_token)
    yield _histogram("request_duration_seconds", "From arrival to the end.", tally.whole)
    stages = CounterMetricFamily(
        f"{PREFIX}stage_seconds", "Time that requests spent in each stage.", labels=("stage",)
    )
    for stage, seconds in tally.stages.items():
        stages.add_metric((stage.removesuffix("_s"),), seconds)
    yield stages
    losses = CounterMetricFamily(
        f"{PREFIX}prefix_losses",
        "Requests that found less cached than they might, by why.",
        labels=("reason", "cause"),
    )
    for (reason, cause), count in tally.losses.items():
        losses.add_metric((reason, cause), count)
    yield losses
    tokens = CounterMetricFamily(
        f"{PREFIX}prefix_lost_tokens", "Tokens that were computed again for it.", labels=("reason",)
    )
    for reason, count in tally.lost_tokens.items():
        tokens.add_metric((reason,), count)
    yield tokens


def _histogram(name: str, help: str, times: dict[Any, Times]) -> Metric:
    made = HistogramMetricFamily(PREFIX + name, help, labels=("reuse",))
    for reuse, one in times.items():
        bounds = (*map(str, one.bounds), "+Inf")
        made.add_metric(
            (reuse,), list(zip(bounds, accumulate(one.counts), strict=True)), one.total_s
        )
    return made
