"""`bin/bench` from end to end, on tiny models."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.bench.test_command import bench
from tests.proofs import command
from tests.proofs.models import light

PROOFS = (sys.executable, "-m", "tests.proofs")


@pytest.mark.slow
def test_a_memory_check_is_played_beside_a_scenario(tmp_path: Path) -> None:
    model, file = light(tmp_path / "model"), tmp_path / "out.json"
    args = ["--model", str(model), "--tokens", "512", "--runs", "1", "--json", str(file)]
    args += ["--no-mlx-lm", "--only", "warm", "--only", "shared_system"]
    done = bench(*args, program=PROOFS)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_text())
    assert found["failures"] == []
    assert found["scenarios"]["warm"]["medians"]["mlxcache"]["cached_tokens"] > 512
    (_, reused) = found["memory"]["shared_system"]["checks"]
    assert reused["measured"] >= 4000


@pytest.mark.slow
def test_a_family_is_measured_beside_mlx_lm_server(tmp_path: Path) -> None:
    """On a recurrent model: what a branch feeds is counted at both, and compared."""
    file = tmp_path / "out.json"
    done = bench(
        *("--family", "qwen3_5", "--tokens", "512", "--runs", "1", "--reply", "4"),
        *("--only", "grown", "--only", "branched", "--json", str(file)),
        program=PROOFS,
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
        (["--only", "nothing"], "restore_speed"),
    ],
)
def test_a_family_goes_with_no_model_and_with_scenarios_alone(arguments, word, monkeypatch):
    """What does not go together is wrong usage, and the error names what would."""
    monkeypatch.setattr(command.Suite, "play", lambda *_: pytest.fail("it ran"))
    app = typer.Typer()
    app.command()(command.bench)
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert word in result.output
