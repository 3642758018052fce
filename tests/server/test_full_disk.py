"""A server and commands on a disk of 8 MB without a free byte, and on one that is read-only."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxcache.cli.main import app
from tests.conftest import ToyMaker
from tests.forked import served
from tests.served import Served
from tests.server.api import END_IDS, Api, until, user, words
from tests.small_disk import fill, mount, small_disk

TALK: dict[str, Any] = {"temperature": 0, "logit_bias": END_IDS}


def serve(model: Path, cache: Path, home: Path) -> Any:
    flags = ("--ram", "200MB", "--disk", "4MB", "--no-anticipate")
    return served("--model", str(model), "--cache-dir", str(cache), *flags, home=home)


@pytest.fixture(scope="module")
def kept(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    with serve(toy("llama"), home / "cache", home) as server:
        api = Api(server)
        for seed, name in enumerate(("one", "two")):
            api.chat([user(words(seed, 150))], 4, **TALK, prompt_cache_key=name)

        def durable() -> bool:
            found = api.http.get("/v1/sessions").json()["data"]
            return len(found) == 2 and all(one["durable_tokens"] > 100 for one in found)

        until(durable, 60, lambda: server.output)
        server.stop()
    return home / "cache"


@pytest.fixture
def disk(tmp_path: Path, kept: Path) -> Iterator[Path]:
    with small_disk(tmp_path / "disk", 8) as place:
        shutil.copytree(kept, place / "cache")
        yield place


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def labels(found: Any) -> set[str]:
    return {one["label"] for one in found["data"]}


def banner(server: Served) -> str:
    """The line of the banner on the disk, as one text."""
    _ = server.url
    lines = server.output.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("Disk "))
    return " ".join(lines[at : at + 4])


def test_commands_without_a_server_free_a_full_disk(disk: Path) -> None:
    """Each of them, with not one free byte at its start."""
    cache = ("--cache-dir", str(disk / "cache"))
    fill(disk)
    assert labels(run("sessions", *cache)) == {"one", "two"}
    assert run("cache", "stats", *cache)["sessions"] == 2
    assert run("cache", "check", *cache)["data"] == []
    assert run("sessions", "rm", "one", "--yes", *cache)["deleted"]
    fill(disk)
    assert labels(run("sessions", *cache)) == {"two"}
    assert run("cache", "prune", "--to", "1KB", *cache)["freed_bytes"] > 0
    fill(disk)
    assert run("cache", "clear", "--yes", *cache)["sessions"] == 1
    assert run("sessions", *cache)["data"] == []


def test_a_server_on_a_full_disk_serves_and_its_commands_free_it(disk, toy, tmp_path):
    """What is there is restored; conversations in RAM alone are listed, and can be removed."""
    fill(disk)
    with serve(toy("llama"), disk / "cache", tmp_path) as server:
        api, at = Api(server), ("--url", server.url)
        assert "off, computed prefixes are lost when the server ends" in banner(server)
        assert "kept free for other programs" in banner(server)
        assert api.http.get("/v1/cache").json()["disk"]["state"] == "suspended"
        assert api.chat([user(words(0, 150))], 4, **TALK, prompt_cache_key="one").cached > 100
        fill(disk)
        api.chat([user(words(9, 150))], 4, **TALK, prompt_cache_key="new")
        found = run("sessions", *at)
        assert labels(found) == {"one", "two", "new"}
        new = next(one for one in found["data"] if one["label"] == "new")
        assert new["durable_tokens"] < 20 < new["tokens"], "it shares the template's start alone"
        refused = CliRunner().invoke(app, ["sessions", "rename", "new", "x", *at])
        assert refused.exit_code == 1
        assert "in RAM alone" in refused.output
        for label in ("new", "one"):
            fill(disk)
            assert run("sessions", "rm", label, "--yes", *at)["deleted"]
        assert labels(run("sessions", *at)) == {"two"}
        fill(disk)
        assert run("cache", "prune", "--to", "1KB", *at)["freed_bytes"] > 0
        fill(disk)
        assert run("cache", "clear", "--yes", *at)["sessions"] == 1
        assert run("sessions", *at)["data"] == []
        assert api.chat([user(words(9, 150))], 4, **TALK).prompt > 100
        assert "Traceback" not in server.output
        assert server.stop() == 0


def test_a_server_on_a_read_only_disk_restores_what_is_there(disk, toy, tmp_path):
    """It lists sessions, those since its start included, and changes them once it can."""
    mount(disk, "remount,ro")
    with serve(toy("llama"), disk / "cache", tmp_path) as server:
        api, at = Api(server), ("--url", server.url)
        assert "Read-only file system" in banner(server)
        found = api.chat([user(words(0, 150))], 4, **TALK, prompt_cache_key="one")
        assert found.cached > 100, server.output
        api.chat([user(words(9, 150))], 4, **TALK, prompt_cache_key="new")
        assert labels(run("sessions", *at)) == {"one", "two", "new"}
        refused = CliRunner().invoke(app, ["sessions", "rm", "one", "--yes", *at])
        assert refused.exit_code == 1
        assert "Read-only file system" in refused.output
        assert labels(run("sessions", "--cache-dir", str(disk / "cache"))) == {"one", "two"}
        assert "Traceback" not in server.output
        mount(disk, "remount,rw")
        assert run("sessions", "rm", "one", "--yes", *at)["deleted"]
        server.wait_for("store folder can be written again: ")
        assert labels(run("sessions", "--cache-dir", str(disk / "cache"))) == {"two"}
        assert server.stop() == 0
