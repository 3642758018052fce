"""The documented metrics, the Grafana dashboard and the alerts are about metrics that there are."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import promql_parser as promql
import pytest
import yaml
from prometheus_client.core import Metric

from mlxcache.api.metrics import EngineCollector
from mlxcache.engine.metrics import STAGES, Tally
from mlxcache.types import RequestRecord

ROOT = Path(__file__).parents[1]
DASHBOARD = json.loads((ROOT / "examples/grafana/mlxcache.json").read_text())
ALERTS = yaml.safe_load((ROOT / "examples/prometheus/alerts.yml").read_text())
RULES = [rule for group in ALERTS["groups"] for rule in group["rules"]]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
TYPES = {"timeseries", "stat"}
VARIABLES = {"$__rate_interval": "5m", "$__range": "6h", "$job": ".*", "$instance": ".*"}


def exported() -> dict[str, Metric]:
    """Every metric, by the name that is documented."""
    tally = Tally()
    for cached, restored in ((0, 0), (10, 0), (10, 5)):
        timing = dict.fromkeys((*STAGES, "first_token_s"), 0.1)
        record = RequestRecord("r", None, "chat", None, "done", 0.0, 20, cached, restored)
        record.timing = timing
        record.lost = {"reason": "evicted", "cause": "memory", "lost_tokens": 3}
        tally.add(record)
    engine = SimpleNamespace(tally=tally, info=None, state="ready", failure=None, silent_s=0.0)
    models = SimpleNamespace(default=engine, figures=dict, describe=list)
    total = {"counter": "_total"}
    found = EngineCollector(cast(Any, models), Counter({400: 1})).collect()
    return {one.name + total.get(one.type, ""): one for one in found}


EXPORTED = exported()


def names(metric: Metric) -> set[str]:
    """What a query may ask of a metric."""
    if metric.type == "counter":
        return {f"{metric.name}_total"}
    if metric.type == "histogram":
        return {f"{metric.name}{end}" for end in ("_bucket", "_sum", "_count")}
    return {metric.name}


ASKED = {name: metric for metric in EXPORTED.values() for name in names(metric)}


def labels(metric: Metric) -> set[str]:
    """A metric's own labels, and those that Prometheus adds."""
    own = getattr(metric, "_labelnames", None) or ()
    return {*own, "job", "instance", *(["le"] if metric.type == "histogram" else [])}


def documented() -> dict[str, list[str]]:
    page = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(mlxcache_\w+)` \|(.+)\|$", page, re.MULTILINE)
    return {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows}


def test_the_documented_metrics_are_those_that_are_exported():
    """Name, type and labels of each, and none besides."""
    table = documented()
    assert set(table) == set(EXPORTED)
    for name, (type, names_of_labels, told) in table.items():
        metric = EXPORTED[name]
        assert type == metric.type, name
        own = labels(metric) - {"job", "instance", "le"}
        assert set(re.findall(r"\w+", names_of_labels)) == own, name
        assert told, name


def queries() -> Iterator[tuple[str, str]]:
    for panel in PANELS:
        for target in panel["targets"]:
            yield f"{panel['title']} {target['refId']}", target["expr"]
    for rule in RULES:
        yield rule["alert"], rule["expr"]


@pytest.mark.parametrize(
    ("where", "query"), list(queries()), ids=lambda text: text.split("\n")[0][:40]
)
def test_a_query_parses_and_asks_for_what_is_exported(where, query):
    """Each metric by a name that it has, each label of its own, a rate of counters alone."""
    for variable, text in VARIABLES.items():
        query = query.replace(variable, text)
    assert "$" not in query
    promql.parse(query)
    found = re.findall(r"\b(up|mlxcache_\w+)(?:\{([^}]*)\})?(\[)?", query)
    assert found, where
    for name, matchers, is_range in found:
        if name == "up":
            continue
        assert name in ASKED, name
        metric = ASKED[name]
        assert set(re.findall(r"(\w+)=", matchers)) <= labels(metric), name
        assert bool(is_range) == (metric.type != "gauge"), name
    for grouping in re.findall(r"by \(([^)]*)\)", query):
        own = set.union(*(labels(ASKED[name]) for name, *_ in found))
        assert set(re.findall(r"\w+", grouping)) <= own, grouping


def test_the_dashboard_is_one_that_grafana_imports():
    """The fields that its schema asks for, ids of their own, panels that do not overlap."""
    assert DASHBOARD["schemaVersion"] >= 39
    assert DASHBOARD["uid"] == DASHBOARD["title"] == "mlxcache"
    assert "id" not in DASHBOARD  # that of another Grafana
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + i, at["y"] + j) for i in range(at["w"]) for j in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
    variables = {one["name"] for one in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource", "job", "instance"}
    for panel in PANELS:
        assert panel["type"] in TYPES
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert len({one["refId"] for one in panel["targets"]}) == len(panel["targets"])


def test_alerts_say_what_is_wrong_and_are_documented():
    """A severity, a summary, a description; each in the page's table, and none besides."""
    page = (ROOT / "docs/monitoring.md").read_text(encoding="utf-8")
    assert [rule["alert"] for rule in RULES] == re.findall(r"^\| `(Mlxcache\w+)`", page, re.M)
    for rule in RULES:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_example_of_prometheus_loads_the_alerts():
    """By the name of the file that stands beside it."""
    config = yaml.safe_load((ROOT / "examples/prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == ["alerts.yml"]
    assert [one["job_name"] for one in config["scrape_configs"]] == ["mlxcache"]
