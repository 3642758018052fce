"""A minute or two of the soak, and tests that its checks notice faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxcache.bench.random_model import LETTERS
from tests.proofs import models
from tests.soak import checks
from tests.soak.ledger import Ledger, SessionTracker
from tests.soak.reference import Reference
from tests.soak.round import end_faults
from tests.soak.run import Soak
from tests.soak.server import Flags, IdleUsage, SoakServer
from tests.soak.wire import Outcome


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
    lines: list[str] = []
    soak = Soak(tmp_path, 3, ("llama",), lines.append, agents=2, pause=0.4)
    soak.run(minutes, 12.0)
    assert soak.ledger.violations == [], "\n".join(lines)
    assert soak.ledger.requests["answered"] > 0
    assert soak.ledger.checks["checked"] > 0
    assert soak.ledger.ends["starts"] >= 2
    assert soak.shared_sessions.durable_tokens > 0


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


def test_growth_is_noticed(ledger: Ledger) -> None:
    """Memory counts from a quarter of the time on, files and threads from the first round on."""
    rests = [IdleUsage(at, 100 << 20, 30, 20) for at in range(8)]
    checks.check_leaks("one", rests, ledger)
    assert not ledger.violations
    checks.check_leaks("one", [*rests, IdleUsage(9, 200 << 20, 300, 200)], ledger)
    assert ledger.kinds["leak"] == 3
