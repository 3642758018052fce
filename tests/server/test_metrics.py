"""GET /metrics: its format, and its agreement with the requests made."""

from __future__ import annotations

import asyncio
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client import parser
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import parser as openmetrics

from mlxcache.api.app import create_app
from mlxcache.api.metrics import FAMILIES, PREFIX
from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from tests.api.fake import OneModel
from tests.forked import served
from tests.served import Served
from tests.server.agent import Agent
from tests.server.api import CHAT, Api, until, user, words

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
FLAGS = ("--ram", "200MB", "--disk", "300MB", "--prefill-chunk", "256", "--context", "3000")


def traffic(api: Api) -> None:
    """Two sessions, a sub-agent, another API, one that is refused."""
    first, helper = Agent(api, "s-1"), Agent(api, "s-1", agent="a1")
    for turn in range(3):
        first.ask(words(10 + turn, 20))
    helper.ask(words(20, 20))
    Agent(api, "s-2").ask(words(30, 20))
    api.chat([user(words(40, 20))], tokens=4, prompt_cache_key="s-3")
    too_long = [user(words(50, 1200))]
    assert api.post(CHAT, {"messages": too_long}).status_code == 400


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("metrics")


@pytest.fixture(scope="module")
def model(toy: Any) -> Path:
    return toy("llama", emits={"<|im_end|>": 30})


def begin(model: Path, folder: Path) -> Any:
    return served("--model", str(model), "--cache-dir", str(folder), *FLAGS, home=folder)


@pytest.fixture(scope="module")
def runs(model: Path, folder: Path) -> Iterator[tuple[Api, str, dict[str, Any]]]:
    """A server that goes on where one before it ended; that one's last words, and its session."""
    with begin(model, folder) as before:
        api = Api(before)
        traffic(api)
        listed = booked(api, 4)
        ended = finish(before)
    with begin(model, folder) as running:
        api = Api(running)
        carried = api.http.get(f"/v1/sessions/{listed['id']}").json()["figures"]
        traffic(api)
        yield api, ended, {"before": listed["figures"], "carried": carried, "id": listed["id"]}


def finish(server: Served) -> str:
    assert server.stop(signal.SIGTERM, 30) == 0
    return server.output


def booked(api: Api, requests: int) -> dict[str, Any]:
    """The first session once so many of its requests are in the table."""
    found: dict[str, Any] = {}

    def there() -> bool:
        sessions = api.http.get("/v1/sessions").json()["data"]
        found.update(next(one for one in sessions if one["label"] == "s-1"))
        return bool(found["figures"]["requests"] == requests)

    until(there, 60, lambda: str(found))
    return found


@pytest.fixture(scope="module")
def api(runs: tuple[Api, str, dict[str, Any]]) -> Api:
    return runs[0]


@pytest.fixture(scope="module")
def text(api: Api) -> str:
    """Once all requests are over, and known is what they lost."""
    found = [""]

    def counted() -> bool:
        response = api.http.get("/metrics")
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        found[0] = response.text
        now = read(found[0])  # the disk's figures may be half a second older than the others
        restored = value(now, "restores_total", outcome="ok")
        return value(now, "requests_total") == 7 and restored > 0

    until(counted, 60, lambda: found[0])
    return found[0]


def read(text: str) -> dict[str, Metric]:
    return {one.name: one for one in parser.text_string_to_metric_families(text)}


@pytest.fixture(scope="module")
def exported(text: str) -> dict[str, Metric]:
    return read(text)


def value(exported: dict[str, Metric], name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    family = exported[PREFIX + name.removesuffix("_total").removesuffix("_count")]
    found = [
        sample.value
        for sample in family.samples
        if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
    ]
    return sum(found)


def test_each_metric_is_named_by_the_conventions_and_told_what_it_is(text, exported):
    """A HELP and a TYPE for each, base units, `_total` for counters and for nothing else."""
    assert len(exported) > 40
    for name, family in exported.items():
        assert re.fullmatch(r"mlxcache(_[a-z]+)+", name), name
        full = f"{name}_total" if family.type == "counter" else name
        assert f"# TYPE {full} {family.type}\n" in text
        assert re.search(rf"^# HELP {full} [A-Z\d].+\.$", text, re.MULTILINE), full
        assert family.type in ("counter", "gauge", "histogram")
        assert not re.search(r"_(ms|milli|micro|kb|mb|gb|minutes|hours|percent)", name), name
        assert not name.endswith(("_total", "_sum", "_count", "_bucket", "_info_info")), name
        for sample in family.samples:
            assert not sample.name.endswith("_created")
            assert set(sample.labels) <= {
                *("api", "outcome", "reuse", "le", "stage", "reason", "cause", "version", "model"),
                *("phase", "rule", "tier", "kind", "level", "status", "source"),
            }


def test_every_figure_has_a_value_on_a_server_with_a_disk(exported):
    """So no path of the table leads nowhere.

    Those of a remote: tests/remote/test_status.py; of ranks: tests/api/test_metrics.py.
    """
    empty = {PREFIX + one.name for one in FAMILIES if not exported[PREFIX + one.name].samples}
    elsewhere = ("mlxcache_remote_", "mlxcache_rank")
    assert {one for one in empty if not one.startswith(elsewhere)} == set()


def test_openmetrics_for_who_accepts_it(api):
    """Its stricter parser takes it; a version that is none gets the plain text."""
    response = api.http.get("/metrics", headers={"Accept": OPENMETRICS})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    families = list(openmetrics.text_string_to_metric_families(response.text))
    assert len(families) > 40
    for accept in ("text/plain; version=wrong", "application/openmetrics-text; version=x", ";,="):
        response = api.http.get("/metrics", headers={"Accept": accept})
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_counters_agree_with_the_records(api, exported):
    """Of requests, tokens, restores and losses; the refused one is counted as refused alone."""
    records = api.http.get("/v1/requests?limit=1000").json()["data"]
    done = [one for one in records if one["status"] == "done"]
    assert len(done) == 6
    assert value(exported, "requests_total", outcome="done") == 6
    assert value(exported, "requests_total", outcome="done", api="messages") == 5
    assert value(exported, "requests_total", outcome="rejected") == 1
    for kind in ("prompt", "cached", "restored", "fed", "generated"):
        counted = value(exported, f"{kind}_tokens_total")
        assert counted == sum(one[f"{kind}_tokens"] for one in done), kind
    reuses = Counter(one["reuse"] for one in done)
    assert set(reuses) == {"cold", "warm", "restored"}
    requests = api.http.get("/v1/cache").json()["requests"]
    for reuse, count in reuses.items():
        assert value(exported, "first_token_seconds_count", reuse=reuse) == count, reuse
        assert value(exported, "admitted_requests_total", reuse=reuse) == count, reuse
        assert requests[reuse] == count, reuse
    assert value(exported, "request_duration_seconds_count") == 6
    assert value(exported, "restores_total", outcome="ok") > 0
    assert value(exported, "canonicalised_requests_total", rule="attribution") == 5
    lost = [one["lost"] for one in done if one["lost"]]
    assert value(exported, "prefix_losses_total") == len(lost)
    assert value(exported, "prefix_lost_tokens_total") == sum(x["lost_tokens"] for x in lost)


def test_times_agree_with_the_records(api, exported):
    """Sums of the histograms and of the stages."""
    records = api.http.get("/v1/requests?limit=1000").json()["data"]
    timings = [one["timing"] for one in records if one["status"] == "done"]
    family = exported[f"{PREFIX}first_token_seconds"]
    total = sum(x.value for x in family.samples if x.name.endswith("_sum"))
    assert total == pytest.approx(sum(x["first_token_s"] for x in timings), abs=1e-4)
    decode = sum(x["decode_s"] for x in timings)
    assert value(exported, "stage_seconds_total", stage="decode") == pytest.approx(decode, abs=1e-4)


def test_figures_agree_with_the_cache(api):
    """Bytes by what they are for add up to what the folder holds, once nothing is written."""
    told: list[tuple[float, ...]] = []

    def agree() -> bool:
        exported = read(api.http.get("/metrics").text)
        cache = api.http.get("/v1/cache").json()
        told[:] = [
            (value(exported, "cache_bytes", tier="disk"), cache["disk"]["used_bytes"]),
            (value(exported, "cache_bytes", tier="ram"), sum(cache["ram"]["kinds"].values())),
            (value(exported, "cache_limit_bytes", tier="ram"), cache["ram"]["limit_bytes"]),
            (value(exported, "tree_tokens"), cache["tree_tokens"]),
            (value(exported, "ready"), 1),
            (value(exported, "queued_requests"), 0),
        ]
        return all(one == other for one, other in told) and told[0][0] > 0 < told[3][0]

    until(agree, 60, lambda: str(told))


def test_session_figures_outlive_the_server(runs):
    """Under the same session; the sums go on."""
    api, _, found = runs
    before, carried = found["before"], found["carried"]
    assert before["requests"] == 4
    assert before["cached_tokens"] > before["fed_tokens"] > 0
    assert before["cached_tokens"] + before["fed_tokens"] == before["prompt_tokens"]
    assert carried == before
    now = booked(api, 8)["figures"]
    assert now["restored_tokens"] > 0
    mine = [x for x in api.http.get("/v1/requests").json()["data"] if x["session"] == "s-1"]
    for kind in ("prompt", "cached", "restored", "fed", "generated"):
        name = f"{kind}_tokens"
        assert now[name] == before[name] + sum(one[name] for one in mine), name
    assert now["saved_s"] > before["saved_s"] > 0


def test_the_end_of_a_run_says_what_was_gained(runs):
    """Requests, tokens and time."""
    text = runs[1].split("This run", 1)[1]
    assert re.search(r"^Requests +6 \(\d cold, \d warm\)$", text, re.MULTILINE)
    assert re.search(r"^Reused +[\d,]+ of [\d,]+ prompt tokens \(\d+%\)$", text, re.MULTILINE)
    assert re.search(r"^Time saved +.*\d s$", text, re.MULTILINE)


async def test_a_scrape_does_not_wait_for_the_mlx_thread(model, tmp_path):
    """It is told for how long that has not moved, which an alert goes by."""
    engine = Engine(Settings(model=str(model), cache_dir=tmp_path, ram=200_000_000, disk="off"))
    await engine.start()
    moves = threading.Event()
    try:
        transport = httpx.ASGITransport(create_app(OneModel(engine)))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            hangs = asyncio.ensure_future(engine.call(lambda _: moves.wait(60)))
            name, silent = "mlx_thread_silent_seconds", 0.0
            while silent < 0.2:
                silent = value(read((await client.get("/metrics")).text), name)
                await asyncio.sleep(0.02)
            assert not hangs.done()
            moves.set()
            assert await hangs
    finally:
        moves.set()
        await engine.stop()
