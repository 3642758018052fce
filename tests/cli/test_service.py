"""A service that keeps ending without being stopped starts later each time."""

from __future__ import annotations

import os
import stat
import time
from pathlib import Path

import pytest

from mlxcache.cli.main import warn_of_unknown_variables
from mlxcache.cli.options import FRONT, SERVICE
from mlxcache.cli.serve import MOST_S, NOTE, RECENT_S, backing_off

LAUNCHD = {SERVICE: "launchd"}


def run(folder: Path, environ: dict[str, str] = LAUNCHD, *, fails: bool = True) -> list[float]:
    """Run the service once; return the seconds for which its start was delayed."""
    waits: list[float] = []
    if not fails:
        with backing_off(folder, environ, waits.append):
            pass
        return waits
    with pytest.raises(RuntimeError), backing_off(folder, environ, waits.append):
        raise RuntimeError
    return waits


def test_each_unclean_end_in_a_row_doubles_the_wait(tmp_path: Path) -> None:
    """Up to some minutes; nothing waits after a clean end."""
    folder = tmp_path / "not" / "yet"
    found = [run(folder) for _ in range(7)]
    assert found == [[], [30], [60], [120], [240], [MOST_S], [MOST_S]]
    assert stat.S_IMODE((folder / NOTE).stat().st_mode) == 0o600
    assert run(folder, fails=False) == [MOST_S]
    assert run(folder, fails=False) == []


def test_a_start_is_noted_before_the_wait(tmp_path: Path) -> None:
    """A machine that goes down leaves no time to note its end."""
    run(tmp_path)
    seen: list[int] = []
    with backing_off(tmp_path, LAUNCHD, lambda _: seen.append((tmp_path / NOTE).stat().st_size)):
        assert seen == [2]


def test_an_end_after_a_long_run_is_not_in_a_row(tmp_path: Path) -> None:
    """Such as a power failure after a day."""
    for _ in range(3):
        run(tmp_path)
    old = time.time() - RECENT_S
    os.utime(tmp_path / NOTE, (old, old))
    assert run(tmp_path) == []
    assert run(tmp_path) == [30]


def test_a_server_in_a_terminal_never_waits(tmp_path: Path) -> None:
    """Somebody sees how it ends."""
    run(tmp_path)
    assert run(tmp_path, {}) == []
    assert (tmp_path / NOTE).stat().st_size == 1


def test_a_start_that_cannot_be_noted_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / NOTE).mkdir()
    assert run(tmp_path, fails=False) == []
    assert "start not noted" in caplog.text


def test_the_variables_of_the_service_and_of_ranks_are_no_unknown_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(SERVICE, "launchd")
    monkeypatch.setenv(FRONT, "1")
    monkeypatch.setenv("MLXCACHE_SERVCE", "launchd")
    warn_of_unknown_variables()
    printed = capsys.readouterr().err
    assert "MLXCACHE_SERVCE is ignored" in printed
    assert printed.count("is ignored") == 1
