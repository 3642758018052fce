"""Conversations as agents have them, for hypothesis to draw from."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from mlxcache.prompt.codec import Escape
from mlxcache.types import Chat
from tests.prompt.kinds import CONTROL, MARKS

Message = dict[str, Any]

PIECES = (
    *CONTROL[:6],
    *MARKS[:4],
    "<|im_",
    "<|im_end",
    "end|>",
    "s>",
    "|>",
    "<",
    "hello",
    " two  blanks ",
    "\n\n",
    "\tx = 1234567",
    "naïve",
    "日本",
    "🦀",
    "é",
    "{'a': \"b\"}",
    "\\n",
)

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a file.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
    for name in ("Read", "Write")
]


def restored(escape: Escape, rendered: str) -> str:
    """A rendered text with each sentinel replaced by its text."""
    return "".join(text for text, _ in escape.split(rendered))


def texts(*, size: int = 6) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(PIECES), min_size=1, max_size=size).map("".join)


def call(number: int, **arguments: Any) -> Message:
    function = {"name": "Read", "arguments": arguments}
    return {"id": f"toolu_{number:020d}", "type": "function", "function": function}


def result(number: int, text: str) -> Message:
    return {"role": "tool", "tool_call_id": f"toolu_{number:020d}", "content": text}


@st.composite
def agent_turns(draw: st.DrawFn, *, words: st.SearchStrategy[str] | None = None) -> list[Chat]:
    """The requests of one agent's conversation, each the last one continued."""
    words = words or texts()
    messages: list[Message] = [{"role": "system", "content": draw(words)}]
    tools = TOOLS if draw(st.booleans()) else []
    messages += [{"role": "user", "content": draw(words)}]
    chats = []
    for number in range(draw(st.integers(2, 4))):
        if draw(st.booleans()):
            messages.append({"role": "system", "content": draw(words)})
        chats.append(Chat(list(messages), tools))
        reply: Message = {"role": "assistant", "content": draw(words)}
        calls = draw(st.integers(0, 2))
        if calls:
            numbers = [10 * number + i for i in range(calls)]
            reply["tool_calls"] = [call(n, path=draw(words)) for n in numbers]
            messages += [reply, *(result(n, draw(words)) for n in numbers)]
        else:
            messages += [reply, {"role": "user", "content": draw(words)}]
    return chats
