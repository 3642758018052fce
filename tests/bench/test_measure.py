"""Interleaving, medians, ratios and bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from mlxcache.bench import measure as module
from mlxcache.bench.client import Refused, Reply
from mlxcache.bench.measure import (
    Figures,
    Plan,
    Results,
    Samples,
    measure,
    speed_checks,
)
from mlxcache.bench.process import OURS, THEIRS
from mlxcache.bench.turns import Outcome

LOG: list[tuple[str, str]] = []


@dataclass
class Named:
    """A server as far as `play` looks at it."""

    name: str
    first_s: float = 1.0
    fails: bool = False

    @property
    def client(self) -> Any:
        return self


@pytest.fixture(autouse=True)
def scenarios(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scenarios that only log who played them; a visit is (server, run)."""
    LOG.clear()

    def scenario(name: str) -> Any:
        def played(visit: tuple[Named, int]) -> Outcome:
            server = visit[0]
            LOG.append((name, server.name))
            if server.fails:
                raise Refused(500, "no")
            return Outcome([Reply("", server.first_s, 2.0, 2.0, 10, None, 4, None)], 2.0)

        return played

    monkeypatch.setattr(module, "SCENARIOS", {name: scenario(name) for name in ("cold", "in_turn")})
    monkeypatch.setattr(module, "SETTLE_S", 0.0)


def plan(runs: int, keep: bool = False) -> Plan:
    visit: Any = lambda server, run: (server, run)  # noqa: E731 - scenarios here take such a pair
    return Plan(["cold", "in_turn"], runs, visit, lambda _: None, keep)


def test_servers_play_the_same_scenario_in_turn_and_take_turns_at_being_first() -> None:
    """A B, A B, then B A, B A."""
    measure(plan(2), [Named("a"), Named("b")])  # type: ignore[list-item]
    assert [server for _, server in LOG] == ["a", "b", "a", "b", "b", "a", "b", "a"]
    assert [name for name, _ in LOG] == ["cold", "cold", "in_turn", "in_turn"] * 2


def test_what_begins_a_conversation_is_played_once_where_they_are_kept() -> None:
    measure(plan(3, keep=True), [Named("a")])  # type: ignore[list-item]
    assert [name for name, _ in LOG] == ["cold", "in_turn", "in_turn", "in_turn"]


def test_a_server_that_fails_is_left_out_from_then_on() -> None:
    results = measure(plan(2), [Named(OURS), Named("b", fails=True)])  # type: ignore[list-item]
    assert LOG.count(("cold", "b")) == 1
    assert [len(taken) for taken in results.samples["cold"].values()] == [2, 0]
    assert results.failures[0] == "b, cold: 500: no"
    assert next(speed_checks(results, [])).ok
    mine = measure(plan(1), [Named(OURS, fails=True)])  # type: ignore[list-item]
    assert not next(speed_checks(mine, [])).ok


def sampled(first_s: float, throughput: float = 1.0) -> Figures:
    return {"first_s": first_s, "throughput": throughput, "rate": None, "cached_tokens": None}


def results(mine: float, theirs: float, own: float = 1.0) -> Results:
    """Three pairs, the second on a machine ten times as slow, the third with an outlier."""
    both = Samples({
        OURS: [sampled(mine, 3.0), sampled(10 * mine, 0.3), sampled(0.0, 3.0)],
        THEIRS: [sampled(theirs, 2.0), sampled(10 * theirs, 0.2), sampled(1e-9, 2.0)],
    })  # fmt: skip
    names = ("cold", "warm", "concurrent")
    return Results({name: both for name in names}, pairs=[{"server_s": mine, "own_s": own}])


def test_a_machine_that_changes_its_pace_changes_no_ratio() -> None:
    assert results(3.0, 2.0).ratio("warm", "first_s", THEIRS) == 1.5


def test_bounds_hold_or_break_by_the_medians() -> None:
    good = speed_checks(results(1.0, 1.0, own=0.99), [THEIRS])
    assert [check.ok for check in good] == [True] * 6
    slow = {c.name: c.ok for c in speed_checks(results(1.2, 1.0, own=1.0), [THEIRS, "absent"])}
    assert list(slow.values()) == [True, False, False, True, False, False]
