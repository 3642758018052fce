"""What a body to warm stands for."""

import json

import numpy as np
import pytest

from mlxcache.api.warm import chats_of, warm
from mlxcache.errors import BadRequest, GenerationFailed
from mlxcache.types import Finished, Prompt
from tests.api.fake import FakeEngine, reply

USER = {"role": "user", "content": "Hi"}
SYSTEM = {"role": "system", "content": "Be brief"}
OPENAI_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
ANTHROPIC_TOOL = {"name": "f", "input_schema": {"type": "object"}}


def shape(body):
    """Roles of each chat, and the names of its tools."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return [
        ([m["role"] for m in chat.messages], [t["function"]["name"] for t in chat.tools])
        for chat in chats_of(raw)
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
        (b"Be brief.\nAlways.", ["system", "user"], [], 2),
    ],
)
def test_a_body_is_a_request_of_either_api_or_a_system_prompt(body, roles, tools, chats):
    """Without a message of a person there are two, which share the head."""
    found = shape(body)
    assert len(found) == chats
    for given_roles, given_tools in found:
        assert [role.replace("developer", "system") for role in given_roles] == roles
        assert given_tools == tools


def test_blocks_of_anthropics_are_told_by_their_types():
    """A request without system and tools may still be one of theirs."""
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
    """With a sentence, and nothing is computed."""
    with pytest.raises(BadRequest):
        chats_of(body)


async def test_a_head_is_computed_up_to_where_messages_differ():
    """Only what every conversation under it shares."""
    engine, prompts = FakeEngine(), iter(([5, 6, 7, 8, 1, 9], [5, 6, 7, 8, 2, 9]))

    async def render(chat, *, session=None):
        return Prompt(np.array(next(prompts), np.int32), (4, 6))

    engine.render = render
    done = await warm(engine, b"Be brief.")
    (job,) = engine.jobs
    assert job.prompt.ids.tolist() == [5, 6, 7, 8]
    assert job.prompt.marks == ()
    assert done["prompt_tokens"] == 4
    assert engine.streams[0].closed.is_set()


async def test_a_failure_is_raised_and_the_stream_closed():
    """As for any request."""
    engine = FakeEngine()
    engine.script = [*reply("x")[:-1], Finished("error", 3, 0, 0, 0)]
    with pytest.raises(GenerationFailed):
        await warm(engine, json.dumps({"messages": [USER]}).encode())
    assert engine.streams[0].closed.is_set()
