"""Plan, time limit, and what becomes of a scenario that cannot be played."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from mlxcache.bench import prove as run
from mlxcache.bench import random_model
from mlxcache.bench.context import QUICK, Clock, Context, Subject, TimeUp
from mlxcache.bench.findings import Findings, NotApplicable
from mlxcache.bench.prove import Options, Proof, children, describe_config, end_children, planned
from mlxcache.model.folder import checked_config
from tests.toys.toy import make_toy


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_toy(tmp_path_factory.mktemp("secret-name") / "secret-model")


def played(
    toy: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    minutes: float = 5.0,
    **scenarios: Callable[[Context], None],
) -> list[Findings]:
    monkeypatch.setattr(run, "SCENARIOS", scenarios)
    monkeypatch.setattr(run, "load_in_child", lambda model, folder: Path(model))
    proof = Proof(
        Options(str(toy), "tiny", ("bfloat16",), list(scenarios), QUICK, minutes),
        tmp_path,
        print,
        print,
    )
    proof.play()
    return proof.found


def measure(context: Context) -> None:
    context.found.add("T", "row", "column", "s", 1.0)


def test_a_failed_scenario_is_reported_and_the_others_go_on(toy, tmp_path, monkeypatch) -> None:
    """Without the folders that its error names; figures taken before are kept."""

    def fail(context: Context) -> None:
        measure(context)
        raise OSError(f"cannot read {context.subject.path}")

    def not_here(_: Context) -> None:
        raise NotApplicable("no such system")

    first, second, third = played(
        toy, tmp_path, monkeypatch, fail=fail, elsewhere=not_here, other=measure
    )
    assert (first.status, first.error) == ("failed", "OSError: cannot read ...")
    assert first.tables
    assert (second.status, second.error) == ("not applicable", "no such system")
    assert (third.status, third.error) == ("done", None)


def test_what_does_not_fit_the_time_is_listed(toy, tmp_path, monkeypatch) -> None:
    """A scenario is ended at the limit, with what it started; the next ones are not begun."""
    begun: list[str] = []
    child: list[subprocess.Popen[bytes]] = []

    def hang(context: Context) -> None:
        measure(context)
        child.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        time.sleep(60)

    def next_one(_: Context) -> None:
        begun.append("next")

    began = time.monotonic()
    first, second = played(toy, tmp_path, monkeypatch, 2 / 60, hang=hang, next=next_one)
    assert time.monotonic() - began < 30
    assert (first.status, first.error) == ("not run", "the time limit has passed")
    assert first.not_run == ["the rest of it: the time limit has passed"]
    assert (second.status, begun) == ("not run", [])
    assert not psutil.pid_exists(child[0].pid)


def test_a_step_that_would_take_too_long_is_left_out(toy, tmp_path, monkeypatch) -> None:
    """And one for which memory, disk or the model's context are too small."""
    found = Findings("x", "m")
    subject = Subject(toy, "m", checked_config(toy))
    context = Context(subject, QUICK, Clock(10), tmp_path, 3_000_000_000, found, lambda _: None)
    assert context.in_time("short", 5.0)
    assert not context.in_time("long", 50.0)
    assert context.fits("small", 60_000)
    assert not context.fits("beside another", 60_000, processes=2)
    assert not context.fits("huge", 66_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=10_000_000))
    assert not context.fits("disk", 60_000)
    left_out = [one.partition(":")[0] for one in found.not_run]
    assert left_out == ["long", "beside another", "huge", "disk"]
    assert found.not_run[-1].endswith("GB of disk, 0 GB are free")
    assert subject.kv_bytes_per_token == 2 * 2 * 4 * 2 * 32


def test_a_scenario_of_which_nothing_fits_was_not_run(toy, tmp_path, monkeypatch) -> None:
    """It has no figures, so it is not done."""

    def nothing(context: Context) -> None:
        context.found.not_run.append("20,000 tokens: no memory")

    (found,) = played(toy, tmp_path, monkeypatch, nothing=nothing)
    assert (found.status, found.error, found.not_run) == ("not run", "20,000 tokens: no memory", [])


def test_an_interrupt_ends_the_run_and_keeps_the_report(toy, tmp_path, monkeypatch) -> None:
    """The rest is listed as not run."""

    def interrupt(_: Context) -> None:
        raise KeyboardInterrupt

    first, second, third = played(toy, tmp_path, monkeypatch, a=measure, b=interrupt, c=measure)
    assert [one.status for one in (first, second, third)] == ["done", "not run", "not run"]
    assert third.error == "the run was interrupted"


def test_the_clock_rings_once_and_only_inside(tmp_path: Path) -> None:
    """No alarm is left over for later code."""
    with Clock(5).bounding():
        pass
    clock = Clock(0.2)
    with pytest.raises(TimeUp), clock.bounding():
        time.sleep(10)
    with pytest.raises(TimeUp), clock.bounding():
        pytest.fail("there is no time left")
    time.sleep(0.3)


def test_the_longest_scenarios_come_last_and_few_are_played_again() -> None:
    """So that a run that is cut off has the most of what it can have."""
    names = list(run.SCENARIOS)
    one, two = (Subject(Path(name), name, {}) for name in "ab")
    plan = [(name, subject.label) for name, subject in planned(names, [one, two], run.QUANTISED)]
    assert plan[-2:] == [("first_token_long", "a"), ("first_token_long", "b")]
    assert [name for name, label in plan if label == "a"] == names
    assert set(run.QUANTISED) == {name for name, label in plan if label == "b"}
    assert list(planned(["decode"], [one], ())) == [("decode", one)]


def test_a_model_is_described_by_its_sizes(toy: Path) -> None:
    """Never by its folder."""
    config = {**checked_config(toy), "torch_dtype": "float32"}
    assert describe_config(config) == "llama, 4 layers of 64, float32"
    quantised = {"model_type": "x", "quantization": {"bits": 4}, "text_config": config}
    assert describe_config(quantised) == "x, 4 layers of 64, 4 bits"


def test_no_child_is_left() -> None:
    """Nor a child's child in a session of its own; one that was there before is none of ours."""
    sleep = "import time; time.sleep(600)"
    nested = (
        "import subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', {sleep!r}], start_new_session=True)"
    )
    other = subprocess.Popen([sys.executable, "-c", sleep])
    before = children()
    process = subprocess.Popen([sys.executable, "-c", nested])
    deadline = time.monotonic() + 20
    while len(below := psutil.Process(process.pid).children()) < 1:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    end_children(before)
    assert not psutil.pid_exists(process.pid)
    assert not below[0].is_running() or below[0].status() == psutil.STATUS_ZOMBIE
    assert other.poll() is None
    other.kill()
    other.wait()


def made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, making_s: float, minutes: float
) -> tuple[list[Findings], list[str]]:
    """Findings and lines of a run with two models, each of which takes `making_s` to make."""

    def make(folder: Path, size: str, weights: str) -> Path:
        time.sleep(making_s)
        return make_toy(folder)

    lines: list[str] = []
    monkeypatch.setattr(run, "SCENARIOS", {"equality": measure, "decode": measure})
    monkeypatch.setattr(random_model, "make_random", make)
    options = Options(None, "4b", ("bfloat16", "4bit"), ["equality", "decode"], QUICK, minutes)
    proof = Proof(options, tmp_path, lambda _: None, lines.append)
    proof.play()
    return proof.found, lines


def test_the_time_limit_bounds_the_making_of_models(tmp_path, monkeypatch) -> None:
    """A model that is not made in time is left out, with its scenarios."""
    began = time.monotonic()
    found, _ = made(tmp_path, monkeypatch, 60.0, 1 / 60)
    assert time.monotonic() - began < 20
    assert {one.status for one in found} == {"not run"}
    assert found[0].error == "no model: the time limit has passed"


def test_a_second_model_that_does_not_fit_is_not_begun(tmp_path, monkeypatch) -> None:
    """It would take about as long as the first."""
    found, _ = made(tmp_path, monkeypatch, 2.0, 3.5 / 60)
    assert [one.status for one in found] == ["done", "done", "not run", "not run"]
    assert found[2].error is not None
    assert found[2].error.startswith("no model: about 2 s needed, ")


def test_each_scenario_begun_has_a_line(tmp_path, monkeypatch) -> None:
    """What a quick run does not play on a second model is listed as not run."""
    found, lines = made(tmp_path, monkeypatch, 0.0, 5.0)
    assert lines == [
        "1 of 4 equality, 0 min so far",
        "2 of 4 decode, 0 min so far",
        "3 of 4 equality, 0 min so far",
    ]
    assert [one.status for one in found] == ["done", "done", "done", "not run"]
    assert found[3].error == "on a second model, a quick run has only equality"
