"""The next turn of a conversation, constructed before the client sends it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcache.prompt.canonical.restore import NameRestorer
from mlxcache.types import Chat, Piece, Text, Thinking, ToolCall

OPENINGS = ("0", "x")
"""Two texts without a common prefix.

Prompts that differ only in these share everything before them.
"""


def append_reply(
    chat: Chat, pieces: Sequence[Piece], names: Mapping[str, str], *, thoughts: bool
) -> Chat:
    """Return a conversation with the reply `pieces`, as its client is expected to send it back.

    If the request continued a message, the reply is joined to it. `names` maps texts that the model
    wrote to those that the client got; see `Prompt.names`. `thoughts`: assume that the client sends
    thinking back, if there are no earlier replies to tell from.
    """
    shown = NameRestorer(names)
    messages = [*chat.messages]
    begun = messages.pop() if chat.continue_final else {"role": "assistant", "content": ""}
    reply = {**begun, "content": begun["content"] + shown.map_text(_joined(pieces, Text))}
    thinking = shown.map_text(_joined(pieces, Thinking))
    if thinking and _sends_thoughts(chat, otherwise=thoughts):
        reply["reasoning_content"] = thinking
    calls = [_call(piece, shown) for piece in pieces if isinstance(piece, ToolCall)]
    if calls:
        reply["tool_calls"] = calls
    return replace(chat, messages=[*messages, reply], breakpoint=None, continue_final=False)


def next_turns(chat: Chat) -> list[tuple[Chat, list[Mapping[str, Any]]]]:
    """Return possible next turns of a conversation that ends with a reply.

    Each is a pair of the conversation, ending with the reply, and the new messages: tool results
    if the reply has calls, otherwise a user message. The first two turns differ only in the text of
    the new messages, from its first character on. If the text of the reply has white space at its
    ends, a third turn has the reply without it.
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
    """Return whether the client sent thinking back with any earlier reply.

    Returns `otherwise` if the conversation has no replies.
    """
    replies = [message for message in chat.messages if message.get("role") == "assistant"]
    if not replies:
        return otherwise
    return any(reply.get("reasoning_content") for reply in replies)


def _joined(pieces: Sequence[Piece], kind: type[Text | Thinking]) -> str:
    return "".join(piece.text for piece in pieces if isinstance(piece, kind))


def _call(call: ToolCall, shown: NameRestorer) -> dict[str, Any]:
    arguments = json.loads(shown.map_text(call.arguments) or "{}")
    function = {"name": call.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}
