"""The next turn of a conversation, constructed before the client sends it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcache.prompt.canonical.uuids import NameRestorer
from mlxcache.types import Chat, Piece, Text, Thinking, ToolCall

OPENINGS = ("0", "x")
"""Two texts without a common prefix: prompts that differ only in these share all before them."""


def append_reply(
    chat: Chat, pieces: Sequence[Piece], names: Mapping[str, str], *, thoughts: bool
) -> Chat:
    """Return a conversation with the reply `pieces`, as its client is expected to send it back.

    If the request continued a message, the reply is joined to it. `thoughts`: assume that the
    client sends thinking back, if there are no earlier replies to tell from.
    """
    shown = NameRestorer(names)

    def joined(kind: type[Text | Thinking]) -> str:
        return shown.map_text("".join(piece.text for piece in pieces if isinstance(piece, kind)))

    messages = [*chat.messages]
    begun = messages.pop() if chat.continue_final else {"role": "assistant", "content": ""}
    reply = {**begun, "content": begun["content"] + joined(Text)}
    replies = [message for message in chat.messages if message.get("role") == "assistant"]
    if replies:
        thoughts = any(message.get("reasoning_content") for message in replies)
    if thoughts and (thinking := joined(Thinking)):
        reply["reasoning_content"] = thinking
    calls = [
        {
            "id": piece.id,
            "type": "function",
            "function": {
                "name": piece.name,
                "arguments": json.loads(shown.map_text(piece.arguments) or "{}"),
            },
        }
        for piece in pieces
        if isinstance(piece, ToolCall)
    ]
    if calls:
        reply["tool_calls"] = calls
    return replace(chat, messages=[*messages, reply], breakpoint=None, continue_final=False)


def next_turns(chat: Chat) -> list[tuple[Chat, list[Mapping[str, Any]]]]:
    """Return possible next turns of a conversation that ends with a reply, each with new messages.

    The first two differ only in the text of the new messages, from its first character on. If the
    text of the reply has white space at its ends, a third one has the reply without it.
    """
    reply = chat.messages[-1]
    calls = reply.get("tool_calls") or ()
    ways: list[tuple[Chat, list[Mapping[str, Any]]]] = []
    for text in OPENINGS:
        results = [{"role": "tool", "content": text, "tool_call_id": c["id"]} for c in calls]
        ways.append((chat, [*results] or [{"role": "user", "content": text}]))
    content = reply["content"]
    if content != content.strip():
        messages = [*chat.messages[:-1], {**reply, "content": content.strip()}]
        ways.append((replace(chat, messages=messages), ways[0][1]))
    return ways
