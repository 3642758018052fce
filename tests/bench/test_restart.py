"""A server that is killed and started again, and what is made of its rounds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from mlxcache.bench.client import Client
from mlxcache.bench.measure import RESTART, Plan, measure
from mlxcache.bench.process import OURS, NotStarted, Server
from mlxcache.bench.turns import Visit
from tests.bench.test_command import bench
from tests.bench.test_process import fake
from tests.bench.test_scenarios import Words
from tests.proofs.models import for_speed, recurrent


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(fake("child"), tmp_path, tmp_path, 20) as one:
        yield one


def test_a_killed_server_is_gone_and_the_next_one_is_another(server: Server) -> None:
    first, process = server.client, psutil.Process(server.pid)
    assert server.client is first
    server.kill()
    assert not server.alive()
    assert not process.is_running()
    assert server.client.port != first.port
    assert server.alive()


def test_a_round_is_two_turns_a_kill_and_a_third(server: Server) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("make", [for_speed, recurrent])
def test_our_server_goes_on_from_disk(make: object, tmp_path: Path) -> None:
    model, file = make(tmp_path / "model"), tmp_path / "out.json"  # type: ignore[operator]
    args = ["--model", str(model), "--tokens", "700", "--reply", "200", "--runs", "1"]
    done = bench(*args, "--no-mlx-lm", "--only", "restart", "--assert", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    (taken,) = json.loads(file.read_text())["restart"]["restart"]["rounds"][OURS]
    assert taken["restored_tokens"] >= 700
    assert taken["cached_tokens"] < taken["prompt_tokens"]
