"""What a client that is turned away is told: when a place will be free, from measured rates."""

from __future__ import annotations

import pytest

from mlxcache.engine.requests import (
    FIRST_REPLY,
    MAX_RETRY_S,
    MIN_RETRY_S,
    Forecast,
    prefill_left_s,
)
from mlxcache.scheduling.prefill import DECODE_SHARE
from mlxcache.types import RequestRecord


def going(
    prompt: int, fed: int = 0, cached: int = 0, out: int = 0, limit: int | None = None
) -> tuple[RequestRecord, int | None]:
    record = RequestRecord("r", None, "t", None, "decode" if out else "prefill", 0.0, prompt)
    record.fed_tokens, record.cached_tokens, record.generated_tokens = fed, cached, out
    return record, limit


def test_the_first_that_ends_makes_room() -> None:
    said = Forecast().next_place(
        [going(1000, fed=1000, out=50, limit=150), going(60_000, limit=10)],
        rate=1000.0, round_s=0.1,
    )  # fmt: skip
    assert said == pytest.approx(2 * 100 * 0.1)  # half the time goes to the prefill beside it


def test_a_prefill_is_what_is_left_of_it() -> None:
    said = Forecast().next_place([going(60_000, fed=5000, cached=35_000, limit=10)], rate=100.0,
                                 round_s=0.1)  # fmt: skip
    assert said == pytest.approx(200 + 1)


def test_replies_are_taken_to_be_as_long_as_those_before() -> None:
    forecast = Forecast()
    running = [going(10, fed=10, out=1)]
    before = forecast.next_place(running, rate=1.0, round_s=1.0)
    assert before == pytest.approx(FIRST_REPLY - 1)
    for _ in range(60):
        record = going(10)[0]
        record.status, record.generated_tokens = "done", 40
        forecast.note_end(record)
    assert forecast.next_place(running, rate=1.0, round_s=1.0) == pytest.approx(39, rel=0.01)


def test_it_stays_within_bounds() -> None:
    assert Forecast().next_place([], rate=0.0, round_s=0.0) == MIN_RETRY_S
    assert Forecast().next_place([going(10**7)], rate=1.0, round_s=1.0) == MAX_RETRY_S


def test_the_rest_of_a_prefill_waits_for_shorter_prompts_and_replies() -> None:
    """A longer prompt beside it, and one that waits, take none of its time."""
    mine = going(60_000, fed=5000, cached=35_000)[0]
    shorter, longer, replies, waits = (
        one for one, _ in (going(4000), going(90_000), going(10, fed=10, out=1), going(10))
    )
    for number, one in enumerate((shorter, longer, replies, waits)):
        one.id = str(number)
    waits.status = "queued"

    def left(*running: RequestRecord) -> float:
        return prefill_left_s(mine, [mine, *running], lambda start, stop: (stop - start) / 100)

    assert left() == left(longer, waits) == pytest.approx(200)
    assert left(shorter) == pytest.approx(240)
    assert left(replies) == pytest.approx(200 * (1 + DECODE_SHARE))
