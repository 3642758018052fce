"""`mlxcache prove` from end to end, on a tiny model."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from subprocess import PIPE, CompletedProcess, Popen, run

import psutil
import pytest
from typer.testing import CliRunner

from mlxcache.bench import findings
from mlxcache.bench.context import QUICK
from mlxcache.bench.findings import Check, Findings
from mlxcache.bench.machine import private_strings
from mlxcache.bench.prove import (
    IF_NAMED,
    SCENARIOS,
    Options,
    Proof,
    why_failed,
)
from mlxcache.cli.main import app
from tests.toys.toy import make_toy

PROVE = (sys.executable, "-m", "mlxcache.cli.main", "prove", "--quick")


def prove(folder: Path, *args: str) -> CompletedProcess[str]:
    command = [*PROVE, "--out", str(folder / "report.md"), *args]
    return run(command, check=False, capture_output=True, text=True, timeout=900)


@pytest.mark.slow
def test_a_quick_run_measures_everything_and_tells_nothing_private(tmp_path: Path) -> None:
    done = prove(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    played = {(one["name"], one["model"]): one for one in found["scenarios"]}
    assert {name for name, _ in played} == set(SCENARIOS) - set(IF_NAMED)
    assert {model.rpartition(" ")[2] for _, model in played} == {"bfloat16", "4bit"}
    for one in played.values():
        if "quick run has only" in (one["error"] or ""):
            assert one["model"].endswith("4bit")
            continue
        mac = one["name"] in ("awake", "command_buffers")
        assert one["status"] == "done" or mac, one
        assert one["tables"] or mac, one
        assert one["not_run"] == []
    figures = played["first_token_long", "tiny with random weights, bfloat16"]["tables"]
    ours = figures["First token"]["600 tokens, mlxcache"]
    assert set(ours) == {"cold", "warm", "the model's own", "restored", "after kill -9"}
    fed = figures["Prompt tokens computed, of all"]["600 tokens, mlxcache"]
    assert fed["cold"]["median"] > 600 > 10 * fed["restored"]["median"] > 0
    page = (tmp_path / "report.md").read_text() + (tmp_path / "report.json").read_text()
    for private in private_strings(tempfile.gettempdir()):
        assert private not in page


@pytest.mark.slow
def test_one_scenario_on_a_model_of_the_users(tmp_path: Path) -> None:
    model = make_toy(tmp_path / "secret-model")
    names = ("growth", "peak_memory", "churn")
    done = prove(tmp_path, "--model", str(model), *(f"--only={name}" for name in names))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "report.json").read_text())
    assert [one["status"] for one in found["scenarios"]] == ["done"] * 3, found
    assert found["scenarios"][0]["model"].startswith("llama, 4 layers of 64")
    grown = found["scenarios"][1]["tables"]["Growth of a KV buffer"]["1,248 tokens"]
    assert grown["where it grows"]["median"] > 0
    page = (tmp_path / "report.md").read_text() + json.dumps(found)
    assert "secret" not in page


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_closed_terminal_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    """No process and no folder; nobody reads the output any more."""
    command = [*PROVE, "--out", str(tmp_path / "r.md"), "--only", "growth", "--only", "equality"]
    temp = tmp_path / "temp"
    temp.mkdir()
    # under nohup the suite itself ignores SIGHUP, and so would what it starts
    process = Popen(
        command,
        stdout=PIPE,
        stderr=PIPE,
        env={**os.environ, "TMPDIR": str(temp)},
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),  # noqa: PLW1509
    )
    assert process.stdout is not None
    assert process.stderr is not None
    deadline = time.monotonic() + 120
    children: list[psutil.Process] = []
    while not (children and any(temp.glob("mlxcache-bench-*/within-equality.log"))):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.05)
        children = psutil.Process(process.pid).children(recursive=True)
    process.stdout.close()
    process.stderr.close()
    for _ in range(2):
        process.send_signal(number)
        time.sleep(0.2)
    process.wait(60)
    assert children
    assert not any(child.is_running() for child in children)
    assert list(temp.glob("mlxcache-bench-*")) == []
    statuses = [one["status"] for one in json.loads((tmp_path / "r.json").read_text())["scenarios"]]
    assert set(statuses) == {"not run"}


def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *args: str, fails: bool) -> int:
    """Exit status of a run whose one scenario fails, or breaks a bound."""

    def play(proof: Proof) -> None:
        found = Findings("growth", "m", "failed" if fails else "done")
        found.hold("never", 2.0, 1.0)
        proof.found.append(found)

    monkeypatch.setattr(Proof, "play", play)
    out = tmp_path / "r.md"
    return CliRunner().invoke(app, ["prove", "--out", str(out), *args]).exit_code


def test_the_exit_status_tells_failures_and_with_assert_bounds(tmp_path, monkeypatch) -> None:
    assert invoke(tmp_path, monkeypatch, fails=True) == 1
    assert "**failed**" in (tmp_path / "r.md").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["scenarios"][0]["status"] == "failed"
    assert invoke(tmp_path, monkeypatch, fails=False) == 0
    assert invoke(tmp_path, monkeypatch, "--assert", fails=False) == 1


@pytest.mark.parametrize(
    "args",
    [
        ["--only", "nothing"],
        ["--size", "70b"],
        ["--weights", "8bit"],
        ["--minutes", "0"],
        ["--out", "report.json"],
        ["--out", "absent/report.md"],
        ["--out", "."],
        ["--out", "tests"],
    ],
)
def test_wrong_usage_is_exit_status_2(tmp_path, monkeypatch, args: list[str]) -> None:
    assert invoke(tmp_path, monkeypatch, *args, fails=False) == 2


def test_a_report_that_cannot_be_written_is_shown(tmp_path, monkeypatch) -> None:
    """What was measured is not lost with a disk that became full meanwhile."""

    def refuse(*_: object) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(findings, "write", refuse)
    monkeypatch.setattr(Proof, "play", lambda proof: proof.found.append(Findings("growth", "m")))
    done = CliRunner().invoke(app, ["prove", "--out", str(tmp_path / "r.md")])
    assert done.exit_code == 1
    assert isinstance(done.exception, SystemExit)
    assert "growth" in done.output
    assert "Not written: [Errno 28] No space left" in done.output


def test_a_model_that_cannot_be_loaded_is_one_sentence(tmp_path: Path) -> None:
    broken = make_toy(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"no weights")
    empty = tmp_path / "empty"
    empty.mkdir()
    for model, why in [(broken, "broken"), (empty, "has no config.json"), ("/absent", "no folder")]:
        done = prove(tmp_path, "--model", str(model))
        assert done.returncode == 2
        assert done.stderr.startswith("Error: ")
        assert why in done.stderr
        assert "Traceback" not in done.stdout + done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "report.md").exists()


@pytest.mark.parametrize(
    ("found", "interrupted", "status", "strict_status"),
    [
        (Findings("a", "m"), None, 0, 1),
        (Findings("a", "m", checks=[Check("x", 1.0, 2.0)]), None, 0, 0),
        (Findings("a", "m", checks=[Check("x", 3.0, 2.0)]), None, 0, 1),
        (Findings("a", "m"), "the run was interrupted", 1, 1),
        (Findings("a", "m", "not applicable"), None, 1, 1),
        (Findings("a", "m", "not run"), None, 1, 1),
    ],
)
def test_a_run_that_proves_nothing_is_exit_status_1(
    tmp_path: Path, found: Findings, interrupted: str | None, status: int, strict_status: int
) -> None:
    """Also one that was interrupted; with --assert also one that checked no bound."""
    options = Options(None, "tiny", (), (), QUICK, 1.0)
    proof = Proof(options, tmp_path, print, print, [found], interrupted)
    assert bool(why_failed(proof, strict=False)) == bool(status)
    assert bool(why_failed(proof, strict=True)) == bool(strict_status)


def test_a_report_does_not_replace_an_earlier_one(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Proof, "play", lambda proof: proof.found.append(Findings("growth", "m")))
    (tmp_path / "mlxcache-proof.md").write_text("earlier")
    assert CliRunner().invoke(app, ["prove"]).exit_code == 0
    assert (tmp_path / "mlxcache-proof.md").read_text() == "earlier"
    (page,) = tmp_path.glob("mlxcache-proof-*.md")
    assert re.fullmatch(r"mlxcache-proof-\d{8}-\d{6}", page.stem)
    assert page.with_suffix(".json").exists()
    for row in ("date", "mlxcache", "load average before", "load average after"):
        assert f"| {row} | " in page.read_text()
