"""Guesses bring the speed that they promise, in sessions of the shapes that agents have."""

from __future__ import annotations

import pytest

from tests.proofs import draft_wall, speculation_beside
from tests.proofs.speculation import CURVES, WORST, faults, main, simulate


@pytest.mark.parametrize("kind", ["edit", "write", "mixed", "prose"])
def test_replies_are_faster_and_none_is_slower(kind: str) -> None:
    """At the first curve. Prose gives few guesses, which only many replies average out."""
    curve, cost = next(iter(CURVES.items()))
    sessions = 12 if kind == "prose" else 1
    found = simulate((kind, "json"), cost, sessions=sessions)  # type: ignore[arg-type]
    assert list(faults({(f"{kind} json", curve): found})) == []


def test_without_the_forms_of_results_edits_are_slower() -> None:
    """Copies of a numbered file break at each line."""
    cost = CURVES["0.24 to 12"]
    without = simulate(("edit", "json"), cost, sessions=1, forms=False)
    assert without.speed < 0.8 * simulate(("edit", "json"), cost, sessions=1).speed


@pytest.mark.parametrize("curve", CURVES)
def test_a_model_that_feeds_tokens_again_gains_too(curve: str) -> None:
    """A recurrent one: what was right is fed again after a wrong token."""
    found = simulate(("edit", "xml"), CURVES[curve], sessions=1, redo=True)
    assert found.speed > 1.1
    assert found.worst >= WORST


@pytest.mark.slow
def test_conversations_that_never_repeat_are_as_fast_and_kept_as_well() -> None:
    """Tiny ones, of which only what was fed and kept can be compared."""
    lines: list[str] = []
    speculation_beside.main(lines.append, pairs=1, tokens=200, reply=20, hidden=96)
    fed = next(line for line in lines if "tokens fed" in line).split("tokens fed: ")[1]
    kept = [line.rsplit("  ", 1)[1].strip() for line in lines if "RAM" in line or "disk" in line]
    for one, other in (pair.split(", ") for pair in (fed, *kept)):
        assert one == other
    assert len(kept) == 5


@pytest.mark.slow
def test_drafts_that_do_not_pay_are_timed() -> None:
    """On a tiny model, whose time says nothing; the replies are the same."""
    lines: list[str] = []
    draft_wall.main(lines.append, hidden=64, pairs=1, tokens=60, families=("llama",))
    assert len(lines) == 1
    assert float(lines[0].split()[-1]) > 0.2


@pytest.mark.slow
def test_every_shape_at_every_curve() -> None:
    lines: list[str] = []
    assert main(lines.append) == 0, "\n".join(lines)
