"""Servers and programs with the default cache folder of a Mac."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlxcache.cli import server
from mlxcache.cli.main import app
from mlxcache.config import Settings
from mlxcache.embed import Model
from tests.mac_home import MacHome


@pytest.fixture
def mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MacHome:
    monkeypatch.delenv("MLXCACHE_CACHE_DIR")
    return MacHome(tmp_path, monkeypatch)


def test_a_server_prepares_the_folder_before_it_starts(
    mac: MacHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is left out of backups."""
    used: list[Settings] = []

    async def run(found: Settings, *_: object) -> None:
        used.append(found)

    monkeypatch.setattr(server, "run", run)
    monkeypatch.setattr("mlxcache.cli.serve.configure_logging", lambda *_: None)
    done = CliRunner().invoke(app, ["serve"])
    assert done.exit_code == 0, done.output
    assert [one.cache_dir for one in used] == [mac.cache_dir]
    assert str(mac.cache_dir) in mac.library.set


def test_a_program_with_an_engine_prepares_the_folder(mac: MacHome) -> None:
    """As a server does."""
    assert Model().settings.cache_dir == mac.cache_dir
    assert str(mac.cache_dir) in mac.library.set
