"""The OpenAPI document against a real server: no 500, no unnamed status, no hang."""

from __future__ import annotations

import time
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.forked import served
from tests.server.api import Api

CASES = 80
"""Requests to each operation: over 2,000 in all."""

ENDLESS = ("/v1/live", "/v1/trace")
"""Streams without an end, which a client of whole responses cannot read."""

LONGEST_S = 30.0
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


def operations(url: str) -> list[Any]:
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return [one.ok() for one in schema.get_all_operations() if one.ok().path not in ENDLESS]


def attack(url: str, cases: int) -> tuple[int, float]:
    """Send requests to all operations; returns their number and the longest in seconds."""
    sent, longest = 0, 0.0

    def send(case: Any) -> None:
        nonlocal sent, longest
        began = time.monotonic()
        response = case.call(timeout=LONGEST_S, allow_redirects=False)
        longest = max(longest, time.monotonic() - began)
        sent += 1
        case.validate_response(response, checks=CHECKS)

    for operation in operations(url):
        limits = settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        limits(given(case=operation.as_strategy())(send))()
    return sent, longest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_requests_find_nothing_that_the_document_does_not_say(toy, tmp_path):
    model = str(toy("llama", emits={"<|im_end|>": 20}))
    limits = ("--context", "2000", "--max-tokens", "9", "--ram", "200MB")
    with served("--model", model, *limits, home=tmp_path) as server:
        sent, longest = attack(server.url, CASES)
        assert server.process.poll() is None
        assert Api(server).http.get("/health").status_code == 200
    assert sent >= 2000
    assert longest < LONGEST_S


def test_a_few_requests_of_each_kind_find_nothing(strict: Api) -> None:
    sent, _ = attack(strict.url, 3)
    assert sent > 50
