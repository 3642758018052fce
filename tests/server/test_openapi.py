"""The OpenAPI document against a real server: no 500, no unnamed status, no hang."""

from __future__ import annotations

import re
import time
from itertools import product
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    allow_header_conformance,
    content_type_conformance,
    negative_data_rejection,
    positive_data_acceptance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.forked import served
from tests.server.api import Api

CASES = 80
"""Requests to each operation: over 2,000 in all."""

LEFT_OUT = ("/v1/live", "/v1/trace", "/v1/responses/compact")
"""Streams without an end, which a client of whole responses cannot read; and the summary that a
model of random weights may fail to write, which is a 500."""

LONGEST_S = 30.0

UNSAID = re.compile(
    r"got `float`|is empty|nothing to warm|no messages|needs |is required|has no format|one format"
    r"|not a token id|names token|invalid grammar|not a JSON object|must equal|not a complete"
    r"|no reply|of type .* (is|are) not|supported only where|Token ids must"
    r"|cannot be continued|a block of this type|names '|two tools are|Expected .* `input\["
)
"""Refusals of bodies that no schema tells from good ones: 1.0 as a whole number, a wrong grammar,
fields that contradict each other, content that another message may have."""


def positive_data(context: Any, response: Any, case: Any) -> bool | None:
    """Check that what the schema allows is accepted, unless it is `UNSAID`."""
    if response.status_code == 400 and UNSAID.search(response.json()["error"]["message"]):
        return None
    return positive_data_acceptance(context, response, case)


CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    response_headers_conformance,
    positive_data,
    negative_data_rejection,
    unsupported_method,
    allow_header_conformance,
]


def operations(url: str) -> list[Any]:
    schema: Any = schemathesis.openapi.from_url(f"{url}/openapi.json")
    return [one.ok() for one in schema.get_all_operations() if one.ok().path not in LEFT_OUT]


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

    for operation, mode in product(operations(url), GenerationMode):
        schemas = [one.definition.get("schema") for one in (*operation.body, *operation.query)]
        if mode.is_negative and not any(schemas):
            continue  # nothing of it can be wrong
        limits = settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        limits(given(case=operation.as_strategy(generation_mode=mode))(send))()
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
