"""Headers by which a client says that it tries again, and how long it will wait."""

from __future__ import annotations

import pytest

from mlxcache.api.terms import terms
from mlxcache.errors import BadRequest


def test_nothing_said() -> None:
    assert terms({}) == {"retry": False, "timeout_s": None}


@pytest.mark.parametrize(
    ("tries", "retry"), [("0", False), ("1", True), ("12", True), ("x", False)]
)
def test_the_sdks_count_their_tries(tries: str, retry: bool) -> None:
    assert terms({"x-stainless-retry-count": tries})["retry"] is retry


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), (" 1.5 ", 1.5), ("0.25", 0.25)])
def test_a_time_in_seconds(text: str, seconds: float) -> None:
    assert terms({"x-request-timeout": text})["timeout_s"] == seconds


@pytest.mark.parametrize("text", ["", "0", "0.0", "-1", "1e3", "nan", "inf", "10s", "9" * 40, "٣"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="X-Request-Timeout"):
        terms({"x-request-timeout": text})
