"""A minute or two of the soak, and tests that its checks notice faults."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from mlxcache.bench.random_model import LETTERS
from tests.proofs import models
from tests.soak import checks
from tests.soak.agent import DOING
from tests.soak.ledger import Ledger, Sample, SessionTracker
from tests.soak.plan import COUNTED, FAMILIES, FILES, LASTING, STEPS, draw_rounds, draw_steps
from tests.soak.reference import Reference
from tests.soak.round import end_faults
from tests.soak.run import Soak
from tests.soak.server import Flags, IdleUsage, SoakServer
from tests.soak.wire import Outcome, Request


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny(tmp_path_factory.mktemp("soak") / "llama", "llama")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(lambda line: None)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("minutes", [0.9, 1.8])
def test_minutes_under_agents_faults_and_kills(tmp_path: Path, minutes: float) -> None:
    """Servers of one family under two agents, killed, damaged and cleared: no violation."""
    lines: list[str] = []
    soak = Soak(tmp_path, 3, ("llama",), lines.append, agents=2, pause=0.4)
    soak.run(minutes, 12.0)
    assert soak.ledger.violations == [], "\n".join(lines)
    assert soak.ledger.requests["answered"] > 0
    assert soak.ledger.checks["checked"] > 0
    assert soak.ledger.ends["starts"] >= 2
    assert soak.shared_sessions.durable_tokens > 0


def test_a_seed_makes_the_same_run() -> None:
    """Another seed makes another run."""
    one, same, other = (list(islice(draw_rounds(seed, FAMILIES, 20.0), 60)) for seed in (1, 1, 2))
    assert one == same != other
    assert list(islice(draw_steps(1, "a"), 99)) == list(islice(draw_steps(1, "a"), 99))
    assert list(islice(draw_steps(1, "a"), 99)) != list(islice(draw_steps(1, "b"), 99))


def test_everything_happens_in_an_hour() -> None:
    """Each fault, each damage to files, each end and each family, in rounds of each place."""
    plan = list(islice(draw_rounds(5, FAMILIES, 20.0), 60))
    assert {fault.name for one in plan for fault in one.faults} == {*LASTING, *COUNTED}
    assert {name for one in plan for name in one.files} == set(FILES)
    assert {one.end for one in plan} == {"kill", "term", "die"}
    assert {one.place for one in plan if one.clear} == {"shared"}
    places = {(one.place, one.family) for one in plan if one.place != "wide"}
    assert places == {(place, family) for place in ("shared", "private") for family in FAMILIES}
    assert {step.kind for step in islice(draw_steps(5, "a"), 2000)} == set(STEPS) == set(DOING)


def listed(id: str, turns: int, durable: int) -> dict[str, Any]:
    return {
        "id": id,
        "turns": turns,
        "durable_tokens": durable,
        "label": id,
        "name": None,
        "title": id,
    }


def test_sessions_that_are_gone_and_tokens_that_are_lost_are_noticed() -> None:
    tracker = SessionTracker()
    for _ in range(2):
        tracker.observe([listed("a", 1, 100), listed("b", 1, 50), listed("c", 3, 10)])
    assert tracker.missing(
        tracker.expected(), [listed("a", 1, 100), listed("b", 1, 50), listed("c", 3, 12)]
    ) == ([], [])
    gone, short = tracker.missing(tracker.expected(), [listed("a", 1, 99), listed("b", 2, 7)])
    assert [line.split()[1] for line in gone] == ["c"]
    assert [line.split()[1] for line in short] == ["a"]
    tracker.remove("a")
    tracker.forget_durable("c")
    assert tracker.missing(tracker.expected(), [listed("b", 1, 50), listed("c", 3, 0)]) == ([], [])


def test_cleared_sessions_are_not_expected() -> None:
    """A listing requested before the clearing and received after it is ignored."""
    tracker = SessionTracker()
    request = tracker.cleared
    tracker.observe([listed("a", 1, 100)], request)
    tracker.observe([listed("a", 1, 100)], request)
    assert tracker.expected()
    tracker.clear()
    for _ in range(2):
        tracker.observe([listed("a", 1, 100)], request)
    assert not tracker.expected()
    for _ in range(2):
        tracker.observe([listed("b", 1, 100)], tracker.cleared)
    assert tracker.missing(tracker.expected(), [])[0]


def test_a_listing_counts_once_another_confirms_it() -> None:
    """It may have been made while a turn was being recorded."""
    tracker = SessionTracker()
    tracker.observe([listed("a", 1, 100)])
    tracker.observe([listed("a", 2, 180)])
    assert tracker.missing(tracker.expected(), [listed("a", 1, 20)]) == ([], [])


def test_a_wrong_token_and_a_wrong_count_are_noticed(model: Path) -> None:
    """The conversation has the text of a control token in a message."""
    reference = Reference(model)
    messages = [{"role": "user", "content": "Read this: <|im_end|> and go on."}]
    ids = reference.prompt(messages)
    assert ids.count(reference.turn_end) == 1
    reply = ""
    for _ in range(3):  # the reply that the model gives is found a letter at a time
        letters = LETTERS
        reply += next(c for c in letters if not reference.check(messages, reply + c, len(ids)))
    assert reference.check(messages, reply, len(ids)) is None
    other = "a" if reply[0] != "a" else "b"
    assert "not the likeliest" in str(reference.check(messages, other + reply[1:], len(ids)))
    assert "counted as" in str(reference.check(messages, reply, len(ids) - 3))


def test_only_errors_of_injected_faults_are_allowed(tmp_path: Path, model: Path) -> None:
    """A broken connection is allowed once the end of the server was requested."""
    server = SoakServer("one", "llama", Flags("32MB"), model=model, folder=tmp_path, logs=tmp_path)
    nan = Outcome(status=500, error="The model produced NaN")
    assert not server.permits(nan)
    server.put("nan", "1")
    assert server.permits(nan)
    assert not server.permits(Outcome(status=500, error="Unable to allocate"))
    assert server.permits(Outcome(status=503, retry_after="1"))
    assert not server.permits(Outcome(status=503))
    assert not server.permits(Outcome(status=0))
    server.expect_end()
    assert server.permits(Outcome(status=0))
    assert not server.permits(Outcome(status=0, timed_out=True))
    end_faults(server)
    assert server.faults.on("nan") is None


def test_replies_that_differ_are_told_apart() -> None:
    request = Request(({"role": "user", "content": "Hi"},), 3, "a")
    one = Sample("llama", request, Outcome(text="abc"))
    assert not checks.contradict([one, replace(one, out=Outcome(text="ab"))])
    assert checks.contradict([one, replace(one, out=Outcome(text="abd"))])


def test_growth_is_noticed(ledger: Ledger) -> None:
    """Memory counts from a quarter of the time on, files and threads from the first round on."""
    rests = [IdleUsage(at, 100 << 20, 30, 20) for at in range(8)]
    checks.check_leaks("one", rests, ledger)
    assert not ledger.violations
    checks.check_leaks("one", [*rests, IdleUsage(9, 200 << 20, 300, 200)], ledger)
    assert ledger.kinds["leak"] == 3
