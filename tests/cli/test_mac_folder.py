"""Servers and programs with the default cache folder of a Mac."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlxcache.bench.process import free_port
from mlxcache.cli import server
from mlxcache.cli.main import app
from mlxcache.config import Settings
from mlxcache.embed import Model
from mlxcache.store.lock import serving
from tests.mac_home import MacHome


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MacHome:
    monkeypatch.delenv("MLXCACHE_CACHE_DIR")
    monkeypatch.setenv("MLXCACHE_PORT", str(free_port()))  # at which no server answers
    return MacHome(tmp_path, monkeypatch)


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of each server that is started, none of which serves."""
    settings: list[Settings] = []

    async def run(found: Settings, *_: object) -> None:
        settings.append(found)

    monkeypatch.setattr(server, "run", run)
    monkeypatch.setattr("mlxcache.cli.serve.configure_logging", lambda *_: None)
    return settings


def test_a_server_moves_the_former_folder_before_it_starts(mac, used):
    """Then all of it uses the new one."""
    mac.fill(mac.former)
    done = CliRunner().invoke(app, ["serve"])
    assert done.exit_code == 0, done.output
    assert [one.cache_dir for one in used] == [mac.new]
    assert (mac.new / "store").is_dir()
    assert not mac.former.exists()


def test_a_server_shares_a_former_folder_that_is_in_use(mac, used):
    """With the server of an earlier version that uses it."""
    mac.fill(mac.former)
    with serving(mac.former, "http://127.0.0.1:1", "m"):
        assert CliRunner().invoke(app, ["serve"]).exit_code == 0
    assert [one.cache_dir for one in used] == [mac.former]


def test_a_program_with_an_engine_moves_the_former_folder(mac):
    """As a server does."""
    mac.fill(mac.former)
    assert Model().settings.cache_dir == mac.new
    assert (mac.new / "store").is_dir()
