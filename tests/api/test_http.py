"""Request bodies are read whole within their limits, and request ids are unique."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request

from mlxcache.api.http import make_request_id, read_body
from mlxcache.errors import TooLarge


def request_of(*chunks: bytes | None, headers: dict[str, str] | None = None) -> Request:
    """Build a request whose body arrives in `chunks`; None is a disconnect."""
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


def test_request_ids_differ_and_have_their_shape() -> None:
    first, second = make_request_id(), make_request_id()
    assert first != second
    assert first.startswith("req_")
    assert len(first) == 28
    assert int(first[4:], 16) >= 0
