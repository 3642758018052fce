"""Headers: session label, client name, retries and time limits."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from mlxcache.api.http import (
    is_retry,
    read_client_name,
    read_session_label,
    read_time_limit,
    session_of_user_id,
)
from mlxcache.errors import BadRequest

UUID = "0e2c1e36-6f0b-4c2e-9f5f-0a6c1b2d3e4f"


def test_the_defaults_are_no_retry_and_no_limit() -> None:
    assert not is_retry({})
    assert read_time_limit({}) is None


@pytest.mark.parametrize(
    ("tries", "retry"), [("0", False), ("1", True), ("12", True), ("x", False)]
)
def test_a_counted_attempt_is_a_retry(tries: str, retry: bool) -> None:
    assert is_retry({"x-stainless-retry-count": tries}) is retry


@pytest.mark.parametrize(("text", "seconds"), [("30", 30.0), (" 1.5 ", 1.5), ("0.25", 0.25)])
def test_a_time_in_seconds(text: str, seconds: float) -> None:
    assert read_time_limit({"x-request-timeout": text}) == seconds


@pytest.mark.parametrize("text", ["", "0", "0.0", "-1", "1e3", "nan", "inf", "10s", "9" * 40, "٣"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="X-Request-Timeout"):
        read_time_limit({"x-request-timeout": text})


@pytest.mark.parametrize(
    ("headers", "own", "label"),
    [
        ({}, None, None),
        ({}, "key", "key"),
        ({"x-claude-code-session-id": "cc"}, "key", "cc"),
        ({"x-session-id": "x", "x-claude-code-session-id": "cc"}, None, "x"),
        ({"x-session-id": "  "}, "key", "key"),
        ({"x-session-id": "a\tb\x7f"}, None, "ab"),
        ({}, "k" * 500, "k" * 200),
    ],
)
def test_the_label_comes_from_the_first_place_that_has_one(
    headers: dict[str, str], own: str | None, label: str | None
) -> None:
    assert read_session_label(Headers(headers), own) == label


@pytest.mark.parametrize(
    ("user_id", "session"),
    [
        ("plain", None),
        ("", None),
        (f"user_ab_account__session_{UUID}", UUID),
        (f'{{"device_id":"d","session_id":"{UUID}"}}', UUID),
        ('{"session_id":5}', None),
        ("[" * 100_000, None),
    ],
)
def test_the_session_in_anthropics_user_id(user_id: str, session: str | None) -> None:
    assert session_of_user_id(user_id) == session


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        ("claude-cli/2.1.329 (external, cli)", "claude-cli/2.1.329"),
        ("OpenAI/Python 3.52.0", "OpenAI/Python 3.52.0"),
        ("codex", "codex"),
        ("Mozilla (X11)", "Mozilla"),
        ("", None),
        ("x" * 500, "x" * 80),
    ],
)
def test_the_clients_name(agent: str, name: str | None) -> None:
    assert read_client_name(Headers({"user-agent": agent})) == name


def test_no_user_agent_is_no_name() -> None:
    assert read_client_name(Headers({})) is None
