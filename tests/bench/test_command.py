"""`mlxcache bench` from end to end, on a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import CompletedProcess, run

import pytest
from typer.testing import CliRunner

from mlxcache.bench.models import light
from tests.bench.test_process import FAKE


def bench(*args: str) -> CompletedProcess[str]:
    """A run in a process of its own."""
    command = [sys.executable, "-m", "mlxcache.bench", *args]
    return run(command, check=False, capture_output=True, text=True, timeout=240)


@pytest.mark.slow
def test_servers_are_measured_beside_each_other_and_gone_after(tmp_path: Path) -> None:
    """Two servers, two scenarios, a memory check: figures, ratios and bounds in the file."""
    model, file = light(tmp_path / "model"), tmp_path / "out.json"
    args = ["--model", str(model), "--tokens", "512", "--runs", "1", "--json", str(file)]
    args += ["--only", "warm", "--only", "shared_system"]
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
    assert found["memory"]["shared_system"]["reused_tokens"] >= 4000
    names = " ".join(check["name"] for check in found["checks"])
    assert "mlx_lm.server" in names
    assert "less the model's own time" in names


def test_asserting_fails_where_a_bound_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit status 1 with --assert, 0 without; wrong usage is 2."""
    import typer

    from mlxcache.bench import command
    from mlxcache.bench.checks import Check

    def broken(bench: command.Bench) -> None:
        bench.checks.append(Check("never", 2.0, 1.0))

    monkeypatch.setattr(command.Bench, "run", broken)
    app = typer.Typer()
    app.command()(command.bench)
    runner = CliRunner()
    assert runner.invoke(app, []).exit_code == 0
    assert runner.invoke(app, ["--assert"]).exit_code == 1
    assert runner.invoke(app, ["--only", "nothing"]).exit_code == 2
    assert runner.invoke(app, ["--against", "nothing"]).exit_code == 2


@pytest.mark.slow
def test_a_family_is_measured_beside_mlx_lm_server(tmp_path: Path) -> None:
    """On a recurrent model: what a branch feeds is counted at both, and compared."""
    file = tmp_path / "out.json"
    done = bench(
        *("--family", "qwen3_5", "--tokens", "512", "--runs", "1", "--reply", "4"),
        *("--only", "grown", "--only", "branched", "--json", str(file)),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())["families"]["qwen3_5"]
    assert found["failures"] == []
    branch = found["scenarios"]["branched"]
    fed = {name: medians["fed_tokens"] for name, medians in branch["medians"].items()}
    assert 0 < fed["mlxcache"] < fed["mlx_lm.server"]
    ratio = branch["ratios"]["mlx_lm.server"]["fed_tokens"]
    assert ratio == pytest.approx(fed["mlxcache"] / fed["mlx_lm.server"])


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--family", "qwen9"], "qwen3_5"),
        (["--family", "llama", "--model", "x"], "leave out --model"),
        (["--family", "llama", "--only", "restart"], "returned"),
    ],
)
def test_a_family_goes_with_no_model_and_with_scenarios_alone(
    arguments: list[str], word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What does not go together is wrong usage, and the error names what would."""
    import typer

    from mlxcache.bench import command

    monkeypatch.setattr(command.Bench, "run", lambda bench: pytest.fail("it ran"))
    app = typer.Typer()
    app.command()(command.bench)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert word in result.output


def test_a_model_that_is_not_there_is_a_sentence_and_exit_status_1() -> None:
    """No traceback."""
    args = ["--model", "/absent", "--only", "warm"]
    done = bench(*args)
    assert done.returncode == 1
    assert "/absent" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
