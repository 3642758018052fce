"""A reply that repeats itself is ended; what is meant to repeat is not."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.scheduling import loop_guard
from mlxcache.scheduling.loop_guard import BLOCK, LONGEST, LoopGuard
from mlxcache.types import Finished, Job, Prompt, Sampling, Text, token_ids
from tests.engine.running import started


def ends_at(tokens: Iterable[int]) -> int | None:
    """Tokens after which the guard speaks; None if it does not."""
    guard = LoopGuard()
    return next((i for i, token in enumerate(tokens, 1) if guard.add(token)), None)


def required(period: int) -> int:
    """Tokens of a loop of `period` tokens, as the documentation has it."""
    return min(max(50 * period, 1000), max(8 * period, 4000))


def loop(period: int, length: int, seed: int = 0) -> list[int]:
    block = random.Random(seed).sample(range(1_000_000), period)
    return (block * (length // period + 1))[:length]


@pytest.mark.parametrize("period", [1, 2, 7, 20, 21, 64, 333, 1000, LONGEST])
def test_a_loop_is_found_after_what_the_documentation_says(period: int) -> None:
    """Whatever precedes it, and a block late at most; one copy less is let be."""
    for before in (0, 5, 3 * LONGEST + 17):
        text = [-2 - i for i in range(before)]
        needed = before + required(period)
        at = ends_at([*text, *loop(period, required(period) + 2 * BLOCK)])
        assert at is not None
        assert needed <= at < needed + BLOCK
        assert ends_at([*text, *loop(period, required(period) - 1), *range(5000)]) is None


def test_the_period_is_the_shortest() -> None:
    guard = LoopGuard()
    assert any(guard.add(token) for token in loop(6, 2000))
    assert guard.period == 6


def test_periods_that_are_too_long_or_broken_are_no_loop() -> None:
    assert ends_at(loop(LONGEST + 1, 20 * LONGEST)) is None
    broken = [token for i in range(40) for token in (*loop(7, 210), -i - 5)]
    assert ends_at(broken) is None


def naive(tokens: list[int]) -> int | None:
    """The same by definition, at the ends of blocks."""
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        for period in range(1, min(LONGEST, end) + 1):
            start = end - required(period)
            if start >= 0 and tokens[start + period : end] == tokens[start : end - period]:
                return end
    return None


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=9), st.integers(1, 200)),
        min_size=1,
        max_size=6,
    )
)
def test_it_agrees_with_the_definition(parts: list[tuple[list[int], int]]) -> None:
    """On texts of a few different tokens, full of short repetitions within longer ones."""
    tokens = [token for block, times in parts for token in block * times][:2500]
    assert ends_at(tokens) == naive(tokens)


LEGITIMATE = {
    "a rule of dashes": "-" * 800,
    "a table": "".join(f"| {i:3} | ok     | 0.0 |\n" for i in range(1000)),
    "a board": ("0, " * 32 + "\n") * 32,
    "test output": "".join(f"tests/test_{i}.py::test_it PASSED [{i:3}%]\n" for i in range(500)),
    "a hex dump": "".join(f"{16 * i:08x}  {'00 ' * 16}\n" for i in range(200)),
    "equal functions": "".join(f"def f{i}():\n    return 0\n\n" for i in range(300)),
    "blank lines": "a\n" + "\n" * 400 + "b",
    "a chorus": "We all live in a yellow submarine\n" * 24,
}


@pytest.mark.parametrize("text", LEGITIMATE.values(), ids=LEGITIMATE)
def test_what_is_meant_to_repeat_is_no_loop(text: str) -> None:
    """Words, numbers digit by digit, and single marks as tokens, more of them than a model's."""
    tokens = [hash(word) & 0x7FFFFFFF for word in _words(text)]
    assert ends_at(tokens) is None


def _words(text: str) -> list[str]:

    return re.findall(r"[A-Za-z]+|-{1,8}|\n+| +|.", text)


async def reply(engine: Any, tokens: int, **more: Any) -> tuple[str, Finished]:
    prompt = Prompt(token_ids(range(10, 40)))
    events = [e async for e in await engine.submit(Job("r", prompt, max_tokens=tokens, **more))]
    assert isinstance(events[-1], Finished)
    return "".join(e.text for e in events if isinstance(e, Text)), events[-1]


STUCK = Sampling(logit_bias=((50, 100.0),))


async def test_a_reply_that_repeats_itself_is_ended(
    toy_llama: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With its reason in the last event and the record, counted and logged."""
    monkeypatch.setattr(loop_guard, "_REQUIRED", loop_guard._REQUIRED // 20)  # to be quick
    async with started(toy_llama, tmp_path) as engine:
        _, last = await reply(engine, 100, sampling=STUCK)
        record = await engine.request("r")
        assert record is not None
        assert record.finish_reason == last.reason == "repetition"
        assert engine.tally.repetitions == 1
        assert "reply ended: it repeats the same 1 tokens" in caplog.text
        assert last.generated_tokens == 2 * BLOCK
