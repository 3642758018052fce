"""What the next turn of a conversation will begin with, before anybody has asked for it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcache.prompt.canonical.restore import Restored
from mlxcache.types import Chat, Piece, Text, Thinking, ToolCall

OPENINGS = ("0", "x")
"""Two texts that share no character: what prompts that differ in them alone share stands before."""


def continued(
    chat: Chat, pieces: Sequence[Piece], names: Mapping[str, str], *, thoughts: bool
) -> Chat:
    """A conversation as its client will send it once it has the reply that `pieces` make.

    `names`: see `Prompt.names`. `thoughts`: the client sends back what it was told of the model's
    thinking, where it has not shown yet whether it does.
    """
    shown = Restored(names)
    reply: dict[str, Any] = {"role": "assistant", "content": shown.whole(_joined(pieces, Text))}
    thinking = shown.whole(_joined(pieces, Thinking))
    if thinking and _sends_thoughts(chat, otherwise=thoughts):
        reply["reasoning_content"] = thinking
    calls = [_call(piece, shown) for piece in pieces if isinstance(piece, ToolCall)]
    if calls:
        reply["tool_calls"] = calls
    return replace(chat, messages=[*chat.messages, reply], breakpoint=None)


def following(chat: Chat) -> list[tuple[Chat, list[Mapping[str, Any]]]]:
    """Ways for a conversation to go on: it and what follows.

    The first two begin to differ where the client's own text begins. If there is a third, its
    client has taken the white space off the last reply. Results of tools follow on calls, a user's
    message on all else.
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


def _sends_thoughts(chat: Chat, *, otherwise: bool) -> bool:
    """Whether the client sends thinking back: as it does with its earlier replies."""
    replies = [message for message in chat.messages if message.get("role") == "assistant"]
    if not replies:
        return otherwise
    return any(reply.get("reasoning_content") for reply in replies)


def _joined(pieces: Sequence[Piece], kind: type[Text | Thinking]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def _call(call: ToolCall, shown: Restored) -> dict[str, Any]:
    arguments = json.loads(shown.whole(call.arguments) or "{}")
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
