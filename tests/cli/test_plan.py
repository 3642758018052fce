"""`mlxcache plan` prints tables, JSON and a picture, and refuses what cannot be planned."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from mlxcache.cli.main import app
from tests.conftest import ToyMaker

WIDE = {"COLUMNS": "160", "NO_COLOR": "1"}


def plan(model: Path, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["plan", "--model", str(model), *arguments], env=WIDE)


def test_a_plan_for_some_users(toy: ToyMaker, tmp_path: Path) -> None:
    """With speeds it has times; the picture and the JSON have the same figures."""
    picture = tmp_path / "plan.svg"
    arguments = ["--users", "2", "--context", "3000", "--ram", "100MB", "--disk", "50MB"]
    arguments += ["--requests", "100"]
    arguments += ["--prefill-speed", "500", "--decode-speed", "30", "--disk-speed", "1GB"]
    result = plan(toy("llama"), *arguments, "--plot", str(picture), "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["trace"]["form"] == "agents"
    assert found["hit_rate"]["all"] <= found["hit_rate"]["ceiling"] < 1
    assert found["first_token_s"]["p50"] <= found["first_token_s"]["p95"]
    assert 0 < found["mlx_thread"]["busy"] <= 1
    assert found["disk"]["written_bytes_per_day"] > 0
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    shown = plan(toy("llama"), *arguments).output
    assert f"{found['hit_rate']['ceiling']:.1%}" in shown
    assert "First token" in shown
    assert found["waits_s"]["new"] > 0
    assert "in a day of 50 requests; without a cache" in shown
    assert "disk beside 100 MB RAM" in shown


def test_a_folder_with_only_the_config_is_planned_with_the_same_kv(
    toy: ToyMaker, tmp_path: Path
) -> None:
    arguments = ("--context", "3000", "--ram", "100MB", "--disk", "off", "--json")
    whole = toy("llama")
    config = json.loads((whole / "config.json").read_text()) | {"dtype": "float32"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = [json.loads(plan(one, *arguments).stdout) for one in (whole, tmp_path)]
    assert found[0]["machine"]["bytes_per_token"] == found[1]["machine"]["bytes_per_token"]
    assert found[0]["hit_rate"] == found[1]["hit_rate"]


def test_a_plan_without_a_model_says_what_to_type() -> None:
    result = CliRunner().invoke(app, ["plan"], env=WIDE)
    assert (result.exit_code, "plan --model mlx-community/" in result.output) == (2, True)


def test_a_plan_for_a_trace_without_speeds_has_no_times(toy: ToyMaker, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    row = {"timestamp": 0, "input_length": 300, "output_length": 5, "hash_ids": [1]}
    path.write_text(f"{json.dumps(row)}\n{json.dumps(row)}\n", encoding="utf-8")
    result = plan(toy("llama"), "--trace", str(path), "--ram", "100MB", "--disk", "off")
    assert result.exit_code == 0, result.output
    assert "No times" in result.output
    assert "49.8%" in result.output


def test_a_plan_in_a_process_of_its_own_leaves_nothing_to_warn_of(
    toy: ToyMaker, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"input_length": 300, "output_length": 5, "hash_ids": [1], "timestamp": 0}')
    command = [sys.executable, "-m", "mlxcache", "plan", "--model", str(toy("llama"))]
    command += ["--trace", str(path)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "status", "wrong"),
    [
        (("--users", "0"), 2, "--users"),
        (("--context", "99999999"), 2, "more than the"),
        (("--context", "8000", "--ram", "1MB"), 2, "raise --ram"),
        (("--context", "4000", "--disk-speed", "fast"), 2, "fast"),
        (("--trace", "/nonexistent"), 1, "cannot be read"),
        (("--trace", "/nonexistent", "--context", "4000"), 2, "exclude each other"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    toy: ToyMaker, arguments: tuple[str, ...], status: int, wrong: str
) -> None:
    result = plan(toy("llama"), *arguments)
    assert result.exit_code == status
    assert wrong in " ".join((result.output + (result.stderr or "")).split())
