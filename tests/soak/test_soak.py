"""Two minutes of the soak, and that it would notice what is wrong."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from tests.proofs import models
from tests.soak import checks, faults
from tests.soak.ledger import Ledger, Sessions
from tests.soak.plan import COUNTED, FAMILIES, FILES, LASTING, STEPS, rounds, steps
from tests.soak.reference import Reference
from tests.soak.run import Soak
from tests.soak.server import Flags, Life
from tests.soak.wire import Asked, Outcome


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny(tmp_path_factory.mktemp("soak") / "llama", "llama")


@pytest.fixture
def ledger() -> Ledger:
    return Ledger(lambda line: None)


@pytest.mark.timeout(900)
def test_two_minutes_under_agents_faults_and_kills(tmp_path: Path) -> None:
    """Servers of one family under two agents: killed, harmed and cleared, and nothing is wrong."""
    lines: list[str] = []
    soak = Soak(tmp_path, 3, ("llama",), lines.append, agents=2, pause=0.4)
    soak.run(1.8, 12.0)
    assert soak.ledger.violations == [], "\n".join(lines)
    assert soak.ledger.requests["answered"] > 0
    assert soak.ledger.checked > 0
    assert soak.ledger.ends["starts"] >= 2
    assert soak.shared.durable_tokens > 0


def test_a_seed_makes_the_same_run() -> None:
    """And another seed another one."""
    one, same, other = (list(islice(rounds(seed, FAMILIES, 20.0), 60)) for seed in (1, 1, 2))
    assert one == same != other
    assert list(islice(steps(1, "a"), 99)) == list(islice(steps(1, "a"), 99))
    assert list(islice(steps(1, "a"), 99)) != list(islice(steps(1, "b"), 99))


def test_everything_happens_in_an_hour() -> None:
    """Each fault, each harm to files, each end and each family, in rounds of each place."""
    plan = list(islice(rounds(5, FAMILIES, 20.0), 60))
    assert {fault.name for one in plan for fault in one.faults} == {*LASTING, *COUNTED}
    assert {name for one in plan for name in one.files} == set(FILES)
    assert {one.end for one in plan} == {"kill", "term", "die"}
    assert {one.place for one in plan if one.clear} == {"shared"}
    places = {(one.place, one.family) for one in plan if one.place != "wide"}
    assert places == {(place, family) for place in ("shared", "private") for family in FAMILIES}
    assert {step.kind for step in islice(steps(5, "a"), 2000)} == set(STEPS)


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
    seen = Sessions()
    for _ in range(2):
        seen.take([listed("a", 1, 100), listed("b", 1, 50), listed("c", 3, 10)])
    assert seen.missing(
        seen.known(), [listed("a", 1, 100), listed("b", 1, 50), listed("c", 3, 12)]
    ) == ([], [])
    gone, short = seen.missing(seen.known(), [listed("a", 1, 99), listed("b", 2, 7)])
    assert [line.split()[1] for line in gone] == ["c"]
    assert [line.split()[1] for line in short] == ["a"]
    seen.remove("a")
    seen.forget("c")
    assert seen.missing(seen.known(), [listed("b", 1, 50), listed("c", 3, 0)]) == ([], [])


def test_what_is_cleared_need_not_be_there() -> None:
    """Nor what a listing says of it that was asked for before and comes after."""
    seen = Sessions()
    asked = seen.cleared
    seen.take([listed("a", 1, 100)], asked)
    seen.take([listed("a", 1, 100)], asked)
    assert seen.known()
    seen.clear()
    for _ in range(2):
        seen.take([listed("a", 1, 100)], asked)
    assert not seen.known()
    for _ in range(2):
        seen.take([listed("b", 1, 100)], seen.cleared)
    assert seen.missing(seen.known(), [])[0]


def test_what_one_listing_says_counts_once_another_confirms_it() -> None:
    """It may have been made while a turn was booked."""
    seen = Sessions()
    seen.take([listed("a", 1, 100)])
    seen.take([listed("a", 2, 180)])
    assert seen.missing(seen.known(), [listed("a", 1, 20)]) == ([], [])


def test_a_wrong_token_and_a_wrong_count_are_noticed(model: Path) -> None:
    """Of a reply to a conversation with a control token's text in it."""
    reference = Reference(model)
    messages = [{"role": "user", "content": "Read this: <|im_end|> and go on."}]
    ids = reference.prompt(messages)
    assert ids.count(reference._end) == 1
    reply = ""
    for _ in range(3):  # the reply that the model gives is found a letter at a time
        letters = models.LETTERS
        reply += next(c for c in letters if not reference.wrong(messages, reply + c, len(ids)))
    assert reference.wrong(messages, reply, len(ids)) is None
    other = "a" if reply[0] != "a" else "b"
    assert "not the likeliest" in str(reference.wrong(messages, other + reply[1:], len(ids)))
    assert "counted as" in str(reference.wrong(messages, reply, len(ids) - 3))


def test_what_a_server_may_say(tmp_path: Path, model: Path) -> None:
    """Errors of the faults that it was given, and no others; a broken connection while it ends."""
    life = Life("one", "llama", Flags("32MB"), model=model, folder=tmp_path, logs=tmp_path)
    nan = Outcome(status=500, error="The model computed no numbers (NaN)")
    assert not life.permits(nan)
    life.put("nan", "1")
    assert life.permits(nan)
    assert not life.permits(Outcome(status=500, error="Unable to allocate"))
    assert life.permits(Outcome(status=503, retry_after="1"))
    assert not life.permits(Outcome(status=503))
    assert not life.permits(Outcome(status=0))
    life.ending = True
    assert life.permits(Outcome(status=0))
    assert not life.permits(Outcome(status=0, hang=True))
    faults.end_all(life)
    assert life.faults.on("nan") is None


def test_replies_that_differ_are_told_apart() -> None:
    asked = Asked(({"role": "user", "content": "Hi"},), 3, "a")
    one = checks.Sample("llama", asked, Outcome(text="abc"))
    assert not checks._differ([one, replace(one, out=Outcome(text="ab"))])
    assert checks._differ([one, replace(one, out=Outcome(text="abd"))])


def test_growth_is_noticed(ledger: Ledger) -> None:
    """Of memory from a quarter on, of files and threads from the first round on."""
    rests = [checks.Rest(at, 100 << 20, 30, 20) for at in range(8)]
    checks.leaks("one", rests, ledger)
    assert not ledger.violations
    checks.leaks("one", [*rests, checks.Rest(9, 200 << 20, 300, 200)], ledger)
    assert ledger.kinds["leak"] == 3
