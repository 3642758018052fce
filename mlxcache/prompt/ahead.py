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


def following(chat: Chat) -> list[list[Mapping[str, Any]]]:
    """Two ways for a conversation to go on, which begin to differ where its client's text begins.

    Results of tools follow on calls, a user's message on all else.
    """
    calls = chat.messages[-1].get("tool_calls") or ()
    return [
        [{"role": "tool", "content": text, "tool_call_id": call["id"]} for call in calls]
        or [{"role": "user", "content": text}]
        for text in OPENINGS
    ]


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
