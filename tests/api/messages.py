"""Requests to `POST /v1/messages`, and the events of a streamed reply."""

from __future__ import annotations

import json
from typing import Any

import httpx

HELLO: Any = [{"role": "user", "content": "Hi there"}]


async def post(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    whole = {"model": "m", "max_tokens": 9, "messages": HELLO} | body
    return await client.post("/v1/messages?beta=true", json=whole)


def events(stream: str) -> list[tuple[str, dict[str, Any]]]:
    """Parse a stream into (event name, data)."""
    found = []
    for chunk in stream.replace("\r\n", "\n").strip().split("\n\n"):
        name, data = chunk.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found
