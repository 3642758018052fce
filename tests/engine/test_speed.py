"""What reuse has saved: by measured speeds alone, and never more than it did."""

from __future__ import annotations

import pytest

from mlxcache.engine.cost import LEAST, PrefillSpeed, gain_of
from mlxcache.types import RequestRecord


def test_nothing_is_known_before_anything_was_measured():
    """But that reusing nothing saves nothing."""
    speed = PrefillSpeed()
    assert speed.seconds(500) is None
    assert speed.seconds(0) == 0.0


def test_a_short_chunk_does_not_tell():
    """What a pass takes however short it is would be taken for the price of a token."""
    speed = PrefillSpeed()
    speed.observe(LEAST - 1, 1.0, 0)
    speed.observe(LEAST, 0.0, 0)
    assert speed.seconds(500) is None


def test_tokens_further_on_have_a_speed_of_their_own():
    """By the range in which they stand; a later measurement moves the average."""
    speed = PrefillSpeed()
    speed.observe(1000, 1.0, 0)
    speed.observe(1000, 4.0, 1024)
    assert speed.seconds(500) == pytest.approx(0.5)
    assert speed.seconds(2024) == pytest.approx(1.024 + 4.0)
    speed.observe(1000, 2.0, 0)
    assert speed.seconds(1000) == pytest.approx(1.3)


def test_what_was_not_measured_counts_as_what_stands_before_it():
    """Which takes less time; and as nothing where nothing before it was measured."""
    speed = PrefillSpeed()
    speed.observe(1000, 1.0, 0)
    assert speed.seconds(4096) == pytest.approx(4.096)
    late = PrefillSpeed()
    late.observe(1000, 3.0, 5000)
    assert late.seconds(4096) is None
    assert late.seconds(5096) == pytest.approx(3.0)


def test_what_was_measured_now_counts_more_than_what_was_before():
    """Other ranges are taken over."""
    speed = PrefillSpeed()
    speed.observe(1000, 1.0, 0)
    speed.resume({0: 9.0, 1: 0.5})
    assert speed.seconds(1024 + 10) == pytest.approx(1.024 + 5.0)


def test_a_gain_without_a_speed_saves_no_known_time():
    """Which the session's figures keep apart from no time."""
    record = RequestRecord("r", "s", "chat", None, "done", 0.0, 100, 60, 0, 40, 5)
    figures = gain_of(record, PrefillSpeed()).figures
    assert (figures.saved_tokens, figures.first_tokens) == (0, 0)
    assert figures.as_object()["saved_s"] is None
    assert figures.as_object()["first_token_s"] is None
    speed = PrefillSpeed()
    speed.observe(200, 2.0, 0)
    record.timing["first_token_s"] = 0.25
    told = gain_of(record, speed).figures.as_object()
    assert told["saved_s"] == pytest.approx(0.6)
    assert told["first_token_s"] == 0.25
