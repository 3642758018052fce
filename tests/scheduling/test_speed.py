"""The time saved by reuse: from measured speeds alone, and never more than computing it took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxcache.engine.figures import figures_of
from mlxcache.scheduling.cost import NEAR, range_of
from mlxcache.scheduling.prefill import LEAST_MEASURED, PrefillSpeed
from mlxcache.types import RequestRecord


def measured(*chunks: tuple[int, float, int]) -> PrefillSpeed:
    speed = PrefillSpeed()
    for chunk in chunks:
        speed.observe(*chunk)
    return speed


@pytest.mark.parametrize(
    ("chunks", "tokens", "seconds"),
    [
        ([], 500, None),
        ([], 0, 0.0),  # reusing nothing saves nothing
        (
            [(LEAST_MEASURED - 1, 1.0, 0), (LEAST_MEASURED, 0.0, 0)],
            500,
            None,
        ),  # mostly a pass's fixed cost
        ([(1000, 1.0, 0), (1000, 4.0, 1024)], 500, 0.5),
        ([(1000, 1.0, 0), (1000, 4.0, 1024)], 2024, 1.024 + 4.0),
        ([(1000, 1.0, 0), (1000, 2.0, 0), (500, 0.5, 0)], 1000, 1.4),
        ([(1000, 1.0, 0)], 4096, 4.096),  # unmeasured: as what stands before it
        ([(1000, 3.0, 5000)], 4096, None),
        ([(1000, 3.0, 5000)], 5096, 3.0),
        ([(4000, 8.0, 96)], 4096, 8.192),
    ],
)
def test_tokens_have_the_measured_speed_of_their_range(chunks, tokens, seconds):
    """All its seconds by all its tokens."""
    assert measured(*chunks).seconds(tokens) == (
        seconds if seconds is None else pytest.approx(seconds)
    )


def test_what_is_known_is_kept_by_range():
    """And handed out for the index once, without what earlier servers measured."""
    speed = measured((4000, 8.0, 96))
    assert speed.take_unsaved() == {0: (928, 1.856), 1: (1024, 2.048), 2: (2048, 4.096)}
    assert speed.take_unsaved() == {}
    assert (measured().known_tokens(500), measured((1000, 3.0, 5000)).known_tokens(5096)) == (
        0,
        1000,
    )
    speed = measured((1000, 1.0, 0))
    speed.resume({0: (1000, 3.0), 1: (1000, 5.0)})
    assert speed.seconds(1024 + 10) == pytest.approx(2.048 + 0.05)
    assert speed.take_unsaved() == {0: (1000, 1.0)}


chunks = st.lists(
    st.tuples(st.integers(LEAST_MEASURED, 5000), st.floats(1e-3, 100.0)), min_size=1, max_size=12
)


@given(st.lists(chunks, min_size=1, max_size=4), st.data())
def test_reuse_saves_no_more_than_computing_it_took(prompts, data):
    """However the speed varied: prompts fed in chunks, each reused once, save what they took."""
    speed, took = PrefillSpeed(), 0.0
    for prompt in prompts:
        at = 0
        for tokens, seconds in prompt:
            speed.observe(tokens, seconds, at)
            at += tokens
            took += seconds
    lengths = [sum(tokens for tokens, _ in prompt) for prompt in prompts]
    whole = sum(speed.seconds(length) or 0.0 for length in lengths)
    assert whole == pytest.approx(took)
    reused = [data.draw(st.integers(0, length)) for length in lengths]
    assert sum(speed.seconds(length) or 0.0 for length in reused) <= took * (1 + 1e-9)


def test_ranges_double_in_length():
    """Their bounds are `NEAR` times powers of two."""
    assert [range_of(n) for n in (0, NEAR - 1, NEAR, 2 * NEAR - 1, 2 * NEAR)] == [0, 0, 1, 1, 2]


def test_a_gain_without_a_speed_saves_no_known_time():
    """Which the session's figures keep apart from no time."""
    record = RequestRecord("r", "s", "chat", None, "done", 0.0, 100, 60, 0, 40, 5)
    figures = figures_of(record, PrefillSpeed())
    assert (figures.saved_tokens, figures.first_tokens) == (0, 0)
    assert figures.as_object()["saved_s"] is None
    assert figures.as_object()["first_token_s"] is None
    speed = PrefillSpeed()
    speed.observe(200, 2.0, 0)
    record.timing["first_token_s"] = 0.25
    told = figures_of(record, speed).as_object()
    assert told["saved_s"] == pytest.approx(0.6)
    assert told["first_token_s"] == 0.25
