"""Commands that are called in this process, and no server that they could find by themselves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlxcache.cli.main import app


@pytest.fixture
def no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Set no address, key or model, and an unused cache folder and port."""
    for name in [one for one in os.environ if one.startswith("MLXCACHE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("MLXCACHE_CACHE_DIR", str(tmp_path / "unused"))
    monkeypatch.setenv("MLXCACHE_PORT", "9")  # no server listens there
    monkeypatch.setenv("COLUMNS", "80")


def call(*arguments: str, status: int = 0) -> Result:
    """Run a command and check its exit status."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == status, result.output
    assert "Traceback" not in result.output
    return result
