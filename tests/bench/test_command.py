"""`mlxcache bench` from end to end, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess, run

import pytest
import typer
from typer.testing import CliRunner

from mlxcache.bench import command
from mlxcache.bench.command import Bench
from mlxcache.bench.findings import Check
from mlxcache.config.models import DEMO_ID
from tests.bench.test_process import FAKE
from tests.proofs.models import light

BENCH = (sys.executable, "-m", "mlxcache.cli.main", "bench")


def bench(*args: str, program: tuple[str, ...] = BENCH) -> CompletedProcess[str]:
    command = [*program, *args]
    return run(command, check=False, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_servers_are_measured_beside_each_other_and_gone_after(tmp_path: Path) -> None:
    model, file = light(tmp_path / "model"), tmp_path / "out.json"
    args = ["--model", str(model), "--tokens", "512", "--runs", "1", "--json", str(file)]
    args += ["--only", "warm"]
    args += ["--against", f"fake={sys.executable} {FAKE} {{port}} {{model}}"]
    done = bench(*args)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["failures"] == []
    assert list(found["servers"]) == ["mlxcache", "mlx_lm.server", "fake"]
    warm = found["scenarios"]["warm"]
    for name in ("mlxcache", "mlx_lm.server"):
        assert warm["medians"][name]["cached_tokens"] > 512
        assert warm["ratios"].keys() == {"mlx_lm.server", "fake"}
    assert found["overhead"].keys() >= {"render_s", "prefill_s", "the model's own time"}
    names = " ".join(check["name"] for check in found["checks"])
    assert "mlx_lm.server" in names
    assert "less the model's own time" in names


@pytest.mark.slow
def test_the_demo_model_is_measured_where_none_is_named(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    args = ["--tokens", "600", "--runs", "3", "--no-mlx-lm", "--json", str(file)]
    done = bench(*args, "--only", "cold", "--only", "warm", "--only", "restart")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["model"] == DEMO_ID
    assert found["failures"] == []
    cold, warm = (found["scenarios"][name]["medians"]["mlxcache"] for name in ("cold", "warm"))
    assert cold["cached_tokens"] < 10
    assert warm["cached_tokens"] >= 600
    rounds = found["restart"]["restart"]["rounds"]["mlxcache"]
    # a kill may come before the disk has the first turn, if other jobs keep both cores busy
    assert max(taken["restored_tokens"] for taken in rounds) >= 600


def test_asserting_fails_where_a_bound_breaks(tmp_path, monkeypatch):
    """Exit status 1 with --assert, 0 without; wrong usage is 2."""

    def broken(bench: Bench, *_: object) -> None:
        bench.checks.append(Check("never", 2.0, 1.0))

    monkeypatch.setattr(Bench, "speed", broken)
    monkeypatch.setattr(Bench, "restart", broken)
    app = typer.Typer()
    app.command()(command.bench)
    runner, model = CliRunner(), ["--model", str(tmp_path)]
    assert runner.invoke(app, model).exit_code == 0
    assert runner.invoke(app, [*model, "--assert"]).exit_code == 1
    assert runner.invoke(app, [*model, "--only", "nothing"]).exit_code == 2
    assert runner.invoke(app, [*model, "--against", "nothing"]).exit_code == 2


def test_the_help_names_the_sets_and_their_times(tmp_path, monkeypatch):
    """--only takes a set, or some of its measurements."""
    played: list[str] = []
    monkeypatch.setattr(Bench, "speed", lambda _, __, names: played.extend(names))
    monkeypatch.setattr(Bench, "restart", lambda *_: played.append("restart"))
    app = typer.Typer()
    app.command()(command.bench)
    told = " ".join(CliRunner().invoke(app, ["--help"], env={"COLUMNS": "300"}).output.split())
    for name, one in command.SETS.items():
        assert f"{name}, about {one.minutes} minutes" in told
        assert ", ".join(one.names) in told
        played.clear()
        model = ["--model", str(tmp_path)]
        assert CliRunner().invoke(app, [*model, "--only", name]).exit_code == 0
        assert set(played) == set(one.names)
    played.clear()
    assert CliRunner().invoke(app, [*model, "--only", "restart", "--only", "warm"]).exit_code == 0
    assert set(played) == {"restart", "warm"}


def test_a_model_that_is_not_there_is_a_sentence_and_exit_status_1() -> None:
    args = ["--model", "/absent", "--only", "warm"]
    done = bench(*args)
    assert done.returncode == 1
    assert "/absent" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
