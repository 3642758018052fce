"""A server that is killed and started again, and what is made of its rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from mlxcache.bench.client import Client
from mlxcache.bench.findings import Check
from mlxcache.bench.measure import RESTART, Figures, Plan, Results, Samples, measure, restart_checks
from mlxcache.bench.process import OURS, THEIRS, NotStarted, Server
from mlxcache.bench.report import restarts_json
from mlxcache.bench.turns import Visit
from tests.bench.test_command import bench
from tests.bench.test_process import fake
from tests.bench.test_scenarios import Words
from tests.proofs.models import for_speed, recurrent


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A fake server with a child process, begun when it is first asked for."""
    with Server(fake("child"), tmp_path, tmp_path, 20) as one:
        yield one


def test_a_killed_server_is_gone_and_the_next_one_is_another(server: Server) -> None:
    """Asked twice, the same one answers; after a kill it is a new process on a new port."""
    first, process = server.client, psutil.Process(server.pid)
    assert server.client is first
    server.kill()
    assert not server.alive()
    assert not process.is_running()
    assert server.client.port != first.port
    assert server.alive()


def test_a_server_can_be_killed_before_it_answers(server: Server) -> None:
    """And none is left of it."""
    before = set(psutil.Process().children())
    server.kill_starting(0.0)
    assert not server.alive()
    assert set(psutil.Process().children()) <= before


def test_a_round_is_two_turns_a_kill_and_a_third(server: Server) -> None:
    """The third one goes to the next server, and a server that fails is left out and told."""
    clients: list[Client] = []

    def visit(server: Server, run: int) -> Visit:
        clients.append(server.client)
        return Visit(server, Words(), 800, 4, f"{run}")  # type: ignore[arg-type]

    class Broken:
        name = "broken"

        @property
        def client(self) -> Client:
            raise NotStarted("no such flag")

    plan = Plan([RESTART], 2, visit, lambda _: None)
    results = measure(plan, [server, Broken()])  # type: ignore[list-item]
    rounds = results.samples[RESTART]
    assert [one["cached_tokens"] for one in rounds["fake"]] == [5, 5]
    assert [one["lost_tokens"] for one in rounds["fake"]] == [4, 4]  # 7 + 3 - 1 - 5
    assert rounds["broken"] == []
    assert results.failures == ["broken, restart: no such flag"]
    # the second round begins at the server that the first one ended with
    assert len({client.port for client in clients}) == 2
    assert clients[1].port != server.client.port


def one_round(cold_s: float, again_s: float, lost: int | None = 0) -> Figures:
    times = {"cold_s": cold_s, "again_s": again_s, "sooner": cold_s / again_s}
    return times | {"lost_tokens": lost}


def checks(*rounds: Figures, failures: Sequence[str] = ()) -> list[Check]:
    results = Results({RESTART: Samples({OURS: list(rounds)})}, list(failures))
    return list(restart_checks(results))


def test_the_bound_holds_where_cold_takes_long() -> None:
    """A short cold turn is measured and not held to anything."""
    assert [check.ok for check in checks(one_round(2.0, 1.0))] == [True, True]
    slow = one_round(12.0, 1.0), one_round(12.0, 1.0), one_round(12.0, 0.01)
    assert [check.ok for check in checks(*slow)] == [True, True, False]
    assert [check.ok for check in checks(one_round(12.0, 0.5))] == [True, True, True]


def test_lost_tokens_and_failures_break_their_bounds() -> None:
    """One round that lost a token is enough, and so is a server of ours that did not start."""
    lost = one_round(2.0, 1.0, -3), one_round(2.0, 1.0, 1)
    assert [check.ok for check in checks(*lost)] == [True, False]
    failures = [f"{OURS}, restart: no", f"{THEIRS}, restart: no"]
    assert [check.measured for check in checks(failures=failures)] == [1, 0]


def test_what_a_server_does_not_report_is_left_out() -> None:
    """Of the medians and, as for scenarios, of ratios within a round."""
    theirs = [one_round(10.0, 5.0), one_round(10.0, 0.1, None), one_round(10.0, 5.0)]
    rounds = Samples({OURS: [one_round(10.0, 1.0)] * 3, THEIRS: theirs})
    found = restarts_json(Results({RESTART: rounds}))
    assert found["medians"][THEIRS]["lost_tokens"] == 0
    assert found["ratios"] == {THEIRS: pytest.approx(0.2)}


@pytest.mark.slow
@pytest.mark.parametrize("make", [for_speed, recurrent])
def test_our_server_goes_on_from_disk(make: object, tmp_path: Path) -> None:
    """Killed right after the second reply, it has the first turn whole, from disk."""
    model, file = make(tmp_path / "model"), tmp_path / "out.json"  # type: ignore[operator]
    args = ["--model", str(model), "--tokens", "700", "--reply", "200", "--runs", "1"]
    done = bench(*args, "--no-mlx-lm", "--only", "restart", "--assert", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    (taken,) = json.loads(file.read_text())["restart"]["restart"]["rounds"][OURS]
    assert taken["restored_tokens"] >= 700
    assert taken["cached_tokens"] < taken["prompt_tokens"]
