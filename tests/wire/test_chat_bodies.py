"""Bodies without an endpoint: the API is detected, and prefixes to warm become chats."""

import json

import pytest

from mlxcache.errors import BadRequest
from mlxcache.wire.chat_bodies import chats_to_warm

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief"}
OPENAI_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
RESPONSES_TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}


def shape(body):
    """Return the roles of each chat, and the names of its tools."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return [
        ([m["role"] for m in chat.messages], [t["function"]["name"] for t in chat.tools])
        for chat in chats_to_warm(raw)
    ]


@pytest.mark.parametrize(
    ("body", "roles", "tools", "chats"),
    [
        ({"messages": [SYSTEM, USER]}, ["system", "user"], [], 1),
        ({"messages": [SYSTEM, USER], "tools": [OPENAI_TOOL]}, ["system", "user"], ["f"], 1),
        ({"system": "Be", "messages": [USER], "max_tokens": 1}, ["system", "user"], [], 1),
        ({"messages": [USER], "tools": [ANTHROPIC_TOOL]}, ["user"], ["f"], 1),
        ({"messages": [SYSTEM]}, ["system", "user"], [], 2),
        ({"messages": [{"role": "developer", "content": "x"}]}, ["system", "user"], [], 2),
        ({"system": "Be", "tools": [ANTHROPIC_TOOL]}, ["system", "user"], ["f"], 2),
        ({"tools": [OPENAI_TOOL]}, ["user"], ["f"], 2),
        ({"instructions": "Be", "input": "Hi"}, ["system", "user"], [], 1),
        ({"input": [SYSTEM, USER], "tools": [RESPONSES_TOOL]}, ["system", "user"], ["f"], 1),
        ({"instructions": "Be", "tools": [RESPONSES_TOOL]}, ["system", "user"], ["f"], 2),
        ({"input": [SYSTEM]}, ["system", "user"], [], 2),
        (b"Be brief.\nAlways.", ["system", "user"], [], 2),
    ],
)
def test_a_body_is_a_request_of_either_api_or_a_system_prompt(body, roles, tools, chats):
    """Without a user message there are two chats, which share the head."""
    found = shape(body)
    assert len(found) == chats
    for given_roles, given_tools in found:
        assert [role.replace("developer", "system") for role in given_roles] == roles
        assert given_tools == tools


def test_blocks_of_anthropics_are_told_by_their_types():
    """Also in a request without system and tools."""
    call = {"type": "tool_use", "id": "t", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "x"}
    messages = [
        USER,
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    assert shape({"messages": messages}) == [(["user", "assistant", "tool"], [])]


@pytest.mark.parametrize(
    "body",
    [b"", b" \n", b"{", b"{}", b'{"messages": 3}', b'{"messages": []}', b"\xff\xfe", b"{\xff}"],
)
def test_what_is_neither_is_refused(body):
    """As BadRequest."""
    with pytest.raises(BadRequest):
        chats_to_warm(body)
