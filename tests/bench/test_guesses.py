"""Guesses from the conversation are measured, and their text is compared, on tiny models."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from mlxcache.bench.context import QUICK
from mlxcache.bench.equality import AGAIN, COSTS, DRAFTS, NEW, SAME, SPEED, Unequal, speculation
from mlxcache.bench.findings import Findings, NotApplicable
from mlxcache.bench.random_model import make_random
from mlxcache.model.recurrence import Tape
from tests.conftest import ToyMaker
from tests.scheduling.heads import add_heads

SCALE = replace(QUICK, equal=(60,), reply=24, decode=(60,))


@pytest.mark.slow
def test_costs_text_and_speed_are_reported(tmp_path: Path) -> None:
    """In the model's own dtype; most guesses of a text that was said before are right."""
    model, found = make_random(tmp_path / "model", "tiny"), Findings("speculation", "")
    asyncio.run(speculation(model, tmp_path / "cache", SCALE, found))
    for cached in ("256", "4,096"):
        assert found.tables[COSTS][f"after {cached} tokens"]["one token"].median > 0
        assert found.tables[COSTS][f"after {cached} tokens"]["32 tokens"].median >= 1
    same = found.tables[SAME]["60 tokens"]
    assert same["same reply again: right"].median > 10
    assert same["first reply: guessed"].median > same["first reply: right"].median
    assert same["same reply again: apart"].median <= same["tolerance"].median
    for kind in (NEW, AGAIN):
        assert found.tables[SPEED][kind]["with guesses"].median > 0
    assert found.tables[SPEED][NEW]["tokens a pass"].median < 1.2
    assert [one.why for one in found.unchecked] == ["a quick run's replies are too short"]


@pytest.mark.slow
def test_a_text_that_guesses_change_is_a_fault(toy, tmp_path, monkeypatch):
    """Here a recurrent state is not recomputed."""
    monkeypatch.setattr(Tape, "end_at", lambda tape, count: None)
    found = Findings("speculation", "")
    with pytest.raises(Unequal, match="apart, tolerance"):
        asyncio.run(speculation(toy("qwen3_5"), tmp_path / "cache", SCALE, found))


@pytest.mark.slow
def test_a_model_that_cannot_guess_is_left_out(toy: ToyMaker, tmp_path: Path) -> None:
    """Its cache is in chunks."""
    found = Findings("speculation", "")
    with pytest.raises(NotApplicable, match="nothing is guessed"):
        asyncio.run(speculation(toy("llama4"), tmp_path / "cache", SCALE, found))


@pytest.mark.slow
def test_drafts_of_heads_are_measured(toy: ToyMaker, tmp_path: Path) -> None:
    """Of heads that are hardly ever right some are tried, and the text is the same."""
    model, found = add_heads(toy("qwen3_5"), tmp_path / "toy"), Findings("speculation", "")
    asyncio.run(speculation(model, tmp_path / "cache", SCALE, found))
    rows = found.tables[DRAFTS]
    assert list(rows) == ["1 tokens", "2 tokens", "3 tokens"]
    assert rows["1 tokens"]["all right"].median < 70
    assert rows["3 tokens"]["passes over one token, after 256"].median > 1
