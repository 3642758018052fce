"""Bodies of chat completions, and their responses."""

from __future__ import annotations

import json
from typing import Any

import httpx

from mlxcache.types import ToolCall

USER: Any = [{"role": "user", "content": "Hi there"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = ToolCall(0, "call_1", "weather", '{"city": "Oslo"}')


async def chat(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": USER} | body)


def events(text: str) -> list[Any]:
    """Parse the data of each event, without comments."""
    return [
        data if data == "[DONE]" else json.loads(data)
        for line in text.splitlines()
        if line.startswith("data: ") and (data := line.removeprefix("data: "))
    ]
