"""The beginning of the next turn is predicted, for each way in which templates rewrite history."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxcache.common_prefix import common_length
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.next_turn import append_reply
from mlxcache.types import Chat, Piece, Text, Thinking, ToolCall
from tests.prompt import kinds, templates
from tests.prompt.chats import TOOLS

TEMPLATES = {
    "drops thinking": templates.chatml(thinks="true"),
    "keeps the last thinking": templates.QWEN3,
    "keeps thinking": templates.chatml(keep="true", thinks="true"),
    "llama3": templates.LLAMA3,
    "gemma": templates.GEMMA,
    "mistral": templates.MISTRAL,
}
MESSAGES = [
    {"role": "system", "content": "You help. " * 8},
    {"role": "user", "content": "Which files are there? " * 5},
]
THOUGHT = Thinking("I look at the folder first, " * 4)
CALLS = [
    ToolCall(0, "call_1", "Read", '{"path": "a.py"}'),
    ToolCall(1, "call_2", "Read", '{"path": "b.py"}'),
]
REPLIES: dict[str, list[Piece]] = {
    "text": [THOUGHT, Text("There are "), Text("two of them. " * 6)],
    "one call": [THOUGHT, Text("I read it."), CALLS[0]],
    "calls": [THOUGHT, *CALLS],
}


def next_turns(chat: Chat, begins: str) -> list[dict[str, Any]]:
    """The messages that a client sends after `chat`: results of calls, else a user's message."""
    calls = chat.messages[-1].get("tool_calls") or ()
    results = [{"role": "tool", "tool_call_id": c["id"], "content": begins} for c in calls]
    return results or [{"role": "user", "content": begins}]


@pytest.mark.parametrize("reply", REPLIES)
@pytest.mark.parametrize("thoughts", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_the_next_turn_begins_so(name: str, reply: str, thoughts: bool) -> None:
    builder = PromptBuilder(kinds.tokenizer("byte_level", TEMPLATES[name]))
    chat = append_reply(Chat(MESSAGES, TOOLS), REPLIES[reply], {}, thoughts=thoughts)
    ahead = builder.next_turn(chat, "s").ids[:-1]
    for begins in ("go on, please", "0 is it", "Éa", "{}"):
        turns = next_turns(chat, begins)
        prompt = builder.chat(Chat([*chat.messages, *turns], TOOLS), "s").ids
        assert common_length(ahead, prompt) == len(ahead)
        added = len(builder.text(begins).ids) * len(turns)
        assert len(prompt) - len(ahead) <= added + 40 * len(turns)


@pytest.mark.parametrize("before", [None, "reasoning_content", "content"])
def test_a_client_that_has_left_thinking_out_does_so_again(before: str | None) -> None:
    """Before the first reply, the API tells whether the client sends thinking back."""
    earlier = [] if before is None else [{"role": "assistant", "content": "", before: "hm"}]
    chat = Chat([*MESSAGES, *earlier, *MESSAGES[1:]] if earlier else MESSAGES)
    for thoughts in (True, False):
        reply = append_reply(chat, REPLIES["text"], {}, thoughts=thoughts).messages[-1]
        sent = {None: thoughts, "reasoning_content": True, "content": False}[before]
        assert ("reasoning_content" in reply) is sent
        assert reply["content"] == "There are " + "two of them. " * 6


def test_names_are_those_that_the_client_reads() -> None:
    """The model wrote a stable UUID in the place of the client's."""
    call = ToolCall(0, "call_1", "Read", json.dumps({"path": "/tmp/stable/a"}))
    pieces: list[Piece] = [Thinking("/tmp/sta"), Thinking("ble"), Text("in sta"), Text("ble"), call]
    reply = append_reply(Chat(MESSAGES), pieces, {"stable": "own"}, thoughts=True).messages[-1]
    assert reply["reasoning_content"] == "/tmp/own"
    assert reply["content"] == "in own"
    assert reply["tool_calls"][0]["function"]["arguments"] == {"path": "/tmp/own/a"}


def test_a_placeholder_is_never_remembered() -> None:
    """A result that a rule of canonicalisation puts back is the client's own."""
    builder = PromptBuilder(kinds.tokenizer("byte_level", TEMPLATES["llama3"]))
    chat = append_reply(Chat(MESSAGES, TOOLS), REPLIES["one call"], {}, thoughts=False)
    builder.next_turn(chat, "s")
    cleared = "[Old tool result content cleared]"
    prompt = builder.chat(Chat([*chat.messages, *next_turns(chat, cleared)], TOOLS), "s")
    assert cleared in builder.decode(prompt.ids.tolist())
