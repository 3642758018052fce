"""Tool results of every API are given the form in which a reply would write them again."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcache.prompt.builder import ResultForms
from mlxcache.types import Tokens, token_ids
from mlxcache.wire.chat_bodies import request_to_chat

CODE = "def add(a, b):\n    return a + b\n\nprint(add(1, 2))"
READ = "\n".join(f"{n:6d}→{line}" for n, line in enumerate(CODE.split("\n"), 1))
ASKED = {"role": "user", "content": "Read it."}


def anthropic(content: Any) -> dict[str, Any]:
    use = {"type": "tool_use", "id": "c1", "name": "Read", "input": {"path": "a.py"}}
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    said = {"type": "text", "text": "Go on."}
    messages = [ASKED, {"role": "assistant", "content": [use]}]
    return {"messages": [*messages, {"role": "user", "content": [result, said]}], "max_tokens": 9}


def chat(content: Any, role: str = "tool") -> dict[str, Any]:
    function = {"name": "Read", "arguments": "{}"}
    call = {"id": "c1", "type": "function", "function": function}
    asks = {"role": "assistant", "content": None, "tool_calls": [call]}
    result = {"role": role, "tool_call_id": "c1", "name": "Read", "content": content}
    return {"messages": [ASKED, asks, result]}


def responses(kind: str, output: Any) -> dict[str, Any]:
    call = {"type": "function_call", "call_id": "c1", "name": "shell", "arguments": "{}"}
    return {"input": [ASKED, call, {"type": kind, "call_id": "c1", "output": output}]}


BODIES = {
    "Anthropic, a string": anthropic(READ),
    "Anthropic, a list of texts": anthropic(
        [{"type": "text", "text": READ}, {"type": "text", "text": "<system-reminder>Hm."}]
    ),
    "Chat Completions, a string": chat(READ),
    "Chat Completions, a list of parts": chat([{"type": "text", "text": READ}]),
    "Chat Completions, a function": chat(READ, role="function"),
    "Responses, a string": responses("function_call_output", READ),
    "Responses, a list of parts": responses(
        "function_call_output", [{"type": "input_text", "text": READ}]
    ),
    "Responses, a custom tool": responses("custom_tool_call_output", READ),
    "Responses, the local shell": responses("local_shell_call_output", READ),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_results_of_every_api_have_a_form(body: dict[str, Any]) -> None:
    made: list[str] = []

    def encode(text: str) -> Tokens:
        made.append(text)
        return token_ids(range(len(text)))

    forms, messages = ResultForms(encode, escaped=False), request_to_chat(body).messages
    forms.learn(messages)
    assert [text[: len(CODE)] for text in made] == [CODE]
    assert len(forms.of(messages)) == 1
