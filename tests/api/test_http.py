"""Bodies, labels and names: from raw bytes to checked values."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from mlxcache.api.http import client_name, new_request_id, session_label
from mlxcache.api.receive import read_body
from mlxcache.errors import TooLarge

UUID = "0e2c1e36-6f0b-4c2e-9f5f-0a6c1b2d3e4f"


def request_of(*chunks: bytes | None, headers: dict[str, str] | None = None) -> Request:
    """A request whose body comes in `chunks`; None: the client goes away."""
    messages = [
        {"type": "http.disconnect"}
        if chunk is None
        else {"type": "http.request", "body": chunk, "more_body": i + 1 < len(chunks)}
        for i, chunk in enumerate(chunks)
    ]
    scope = {"type": "http", "headers": Headers(headers or {}).raw}

    async def receive() -> Any:
        return messages.pop(0)

    return Request(scope, receive)


async def test_a_body_comes_whole() -> None:
    assert await read_body(request_of(b"ab", b"", b"cd"), 4) == b"abcd"


async def test_a_body_beyond_the_limit_is_read_to_its_end_and_refused() -> None:
    request = request_of(b"ab", b"cde", b"f")
    with pytest.raises(TooLarge, match="4 bytes"):
        await read_body(request, 4)
    with pytest.raises(IndexError):  # nothing is left to receive
        await request.receive()


async def test_an_announced_length_beyond_the_limit_is_refused() -> None:
    with pytest.raises(TooLarge):
        await read_body(request_of(b"", headers={"content-length": "5"}), 4)


async def test_a_client_that_asks_first_is_told_before_it_sends() -> None:
    headers = {"content-length": "5", "expect": "100-continue"}
    request = request_of(b"abcde", headers=headers)
    with pytest.raises(TooLarge):
        await read_body(request, 4)
    assert (await request.receive())["body"] == b"abcde"


async def test_a_client_that_goes_away_while_sending_is_gone() -> None:
    with pytest.raises(ClientDisconnect):
        await read_body(request_of(b"ab", None), 4)


@pytest.mark.parametrize(
    ("headers", "fields", "label"),
    [
        ({}, {}, None),
        ({}, {"prompt_cache_key": "key"}, "key"),
        ({}, {"metadata_user_id": "plain"}, None),
        ({}, {"metadata_user_id": f"user_ab_account__session_{UUID}"}, UUID),
        ({}, {"metadata_user_id": f'{{"device_id":"d","session_id":"{UUID}"}}'}, UUID),
        ({}, {"metadata_user_id": '{"session_id":5}', "prompt_cache_key": "key"}, "key"),
        ({}, {"metadata_user_id": "[" * 100_000}, None),
        ({"x-claude-code-session-id": "cc"}, {"metadata_user_id": f"_session_{UUID}"}, "cc"),
        ({"x-session-id": "x", "x-claude-code-session-id": "cc"}, {}, "x"),
        ({"x-session-id": "  "}, {"prompt_cache_key": "key"}, "key"),
        ({"x-session-id": "a\tb\x7f"}, {}, "ab"),
        ({}, {"prompt_cache_key": "k" * 500}, "k" * 200),
    ],
)
def test_the_label_comes_from_the_first_place_that_has_one(
    headers: dict[str, str], fields: dict[str, str], label: str | None
) -> None:
    assert session_label(Headers(headers), **fields) == label


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
    assert client_name(Headers({"user-agent": agent})) == name


def test_no_user_agent_is_no_name() -> None:
    assert client_name(Headers({})) is None


def test_request_ids_differ_and_have_their_shape() -> None:
    first, second = new_request_id(), new_request_id()
    assert first != second
    assert first.startswith("req_")
    assert len(first) == 28
    assert int(first[4:], 16) >= 0
