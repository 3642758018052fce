import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given

from mlxcache.errors import BadRequest
from mlxcache.prompt.adapt import adapt
from mlxcache.prompt.template import Traits
from mlxcache.types import Chat
from tests.prompt.chats import TOOLS, agent_turns, call, result

ALL = Traits(tools=True, tool_calls=True, tool_role=True)
FIRST = replace(ALL, system_anywhere=False)
GEMMA = Traits(system=False, system_anywhere=False, alternates=True, user_after_tool=False)
MISTRAL = replace(
    ALL, system_anywhere=False, alternates=True, user_after_tool=False, text_with_calls=False
)
LLAMA = replace(ALL, calls_at_once=False, text_with_calls=False)


def m(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def short(messages: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(message["role"], message.get("content", "-")) for message in messages]


USER = m("user", "u")
CALLED = {**m("assistant", ""), "tool_calls": [call(1)]}
ANSWERED = [USER, CALLED, result(1, "r")]
NOTE = m("system", "note")
TWICE = [USER, m("user", "v"), m("assistant", "a"), m("assistant", "b")]
LATER = [USER, m("assistant", "a"), NOTE, m("user", "v")]
REMINDED = [*ANSWERED, m("user", "note"), m("system", "s")]
TEXTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


@pytest.mark.parametrize(
    ("messages", "traits", "expected"),
    [
        # Templates look at the first system message only.
        ([m("system", "a"), m("system", "b"), USER], FIRST, ["a\n\nb", "u"]),
        # One that is refused later joins what is left of it; taken as it is, the prefix stays.
        ([USER, NOTE, m("assistant", "a")], FIRST, ["u\n\nnote", "a"]),
        ([USER, NOTE, m("assistant", "a")], ALL, ["u", "system: note", "a"]),
        # As a user message it would begin a new question, for which templates drop thinking.
        ([*ANSWERED, NOTE], FIRST, ["u", "", "tool: r\n\nnote"]),
        ([*ANSWERED, NOTE], ALL, ["u", "", "tool: r", "system: note"]),
        # The next user message joins it only where turns must alternate.
        (LATER, FIRST, ["u", "a", "user: note", "v"]),
        (LATER, GEMMA, ["u", "a", "user: note\n\nv"]),
        # One that is never taken starts the first user turn.
        ([m("system", "s"), m("developer", "d"), USER], GEMMA, ["user: s\n\nd\n\nu"]),
        # OpenAI's newer name for the same thing.
        ([m("developer", "d"), USER], ALL, ["system: d", "u"]),
        ([m("developer", "d"), USER], replace(ALL, developer=True), ["developer: d", "u"]),
        # Neighbours of one role are merged only where turns must alternate.
        (TWICE, ALL, ["u", "v", "a", "b"]),
        (TWICE, GEMMA, ["u\n\nv", "a\n\nb"]),
        # Where the template has no room for the text beside calls, as it would write them itself.
        ([USER, {**CALLED, "content": "look"}], MISTRAL, ["u", ""]),
        # A reminder that comes with a result is not refused.
        (REMINDED, MISTRAL, ["u", "", "tool: r\n\nnote\n\ns"]),
        (REMINDED, ALL, ["u", "", "tool: r", "user: note", "system: s"]),
        ([{"role": "user", "content": None}], ALL, [""]),
        ([{"role": "user", "content": TEXTS}], ALL, ["a\n\nb"]),
    ],
)
def test_messages_stand_where_the_template_takes_them(
    messages: list[dict[str, Any]], traits: Traits, expected: list[str]
) -> None:
    """Nothing is dropped, and the order stays. `expected` says the role where it is not plain."""
    adapted = short(adapt(messages, (), traits))
    assert len(adapted) == len(expected)
    for (role, content), wanted in zip(adapted, expected, strict=True):
        assert wanted in (content, f"{role}: {content}")


def test_calls_and_results_pass_through_with_the_tool_s_name() -> None:
    reply = {**m("assistant", "look"), "tool_calls": [call(1, path="x"), call(2, path="y")]}
    messages = [USER, reply, result(1, "one"), result(2, "two")]
    adapted = adapt(messages, (), ALL)
    assert [c["function"]["arguments"] for c in adapted[1]["tool_calls"]] == [
        {"path": "x"},
        {"path": "y"},
    ]
    assert [(r["content"], r["name"]) for r in adapted[2:]] == [("one", "Read"), ("two", "Read")]
    assert adapted[2]["tool_call_id"] == adapted[1]["tool_calls"][0]["id"]


def test_arguments_are_text_for_templates_that_need_text() -> None:
    reply = {**m("assistant", ""), "tool_calls": [call(1, path="é")]}
    traits = replace(ALL, string_arguments=True, absent_content=True)
    adapted = adapt([USER, reply], (), traits)[1]
    assert adapted["tool_calls"][0]["function"]["arguments"] == '{"path": "é"}'
    assert "content" not in adapted


def test_arguments_that_came_as_text_become_an_object() -> None:
    """OpenAI sends them as text; what is no JSON object stays as it is."""
    for sent, taken in (('{"a": 1}', {"a": 1}), ("", {}), ("[1]", "[1]"), ("{x", "{x"), (None, {})):
        wire = {"id": "i", "function": {"name": "Read", "arguments": sent}}
        adapted = adapt([USER, {**m("assistant", ""), "tool_calls": [wire]}], (), ALL)
        assert adapted[1]["tool_calls"][0]["function"]["arguments"] == taken


def test_ids_are_shortened_alike_in_calls_and_results() -> None:
    reply = {**m("assistant", ""), "tool_calls": [call(1), call(2)]}
    traits = replace(ALL, short_ids=True)
    adapted = adapt([USER, reply, result(2, "r")], (), traits)
    ids = [c["id"] for c in adapted[1]["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert adapted[2]["tool_call_id"] == ids[1]
    assert adapt([USER, reply], (), traits)[1] == adapted[1]


def test_several_calls_with_text_become_a_message_each_where_needed() -> None:
    reply = {**m("assistant", "look"), "tool_calls": [call(1, n=1), call(2, n=2)]}
    adapted = adapt([USER, reply], (), LLAMA)[1:]
    assert short(adapted) == [("assistant", "look"), ("assistant", ""), ("assistant", "")]
    assert [len(a.get("tool_calls", ())) for a in adapted] == [0, 1, 1]
    assert "tool_calls" in adapt([USER, reply], (), MISTRAL)[1]


def test_without_the_tool_role_calls_and_results_are_text() -> None:
    reply = {**m("assistant", "look"), "tool_calls": [call(1, path="x")]}
    messages = [USER, reply, result(1, "one"), result(2, "two")]
    adapted = adapt(messages, (), GEMMA)
    text = '<tool_call>{"name": "Read", "arguments": {"path": "x"}}</tool_call>'
    assert adapted[1] == m("assistant", "look\n" + text)
    assert short(adapted)[2:] == [
        (
            "user",
            "<tool_response>\none\n</tool_response>\n\n<tool_response>\ntwo\n</tool_response>",
        )
    ]


def test_tools_are_described_in_the_system_text_where_the_template_knows_none() -> None:
    adapted = adapt([m("system", "s"), USER], TOOLS, Traits())
    assert [message["role"] for message in adapted] == ["system", "user"]
    assert adapted[0]["content"].startswith("s\n\n")
    assert all(json.dumps(tool) in adapted[0]["content"] for tool in TOOLS)
    assert '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>' in adapted[0]["content"]
    assert short(adapt([USER], TOOLS, GEMMA))[0][1].endswith("\n\nu")
    assert adapt([USER], TOOLS, ALL) == [USER]


@given(agent_turns())
def test_the_first_messages_are_adapted_alike_whatever_follows(turns: list[Chat]) -> None:
    messages = turns[-1].messages
    for traits in (ALL, FIRST, GEMMA, MISTRAL, LLAMA, Traits()):
        whole = adapt(messages, TOOLS, traits)
        for count in range(1, len(messages)):
            part = adapt(messages[:count], TOOLS, traits)
            assert part[:-1] == whole[: len(part) - 1]
            assert whole[len(part) - 1]["content"].startswith(part[-1]["content"])


def test_a_picture_and_an_unknown_role_are_refused() -> None:
    """Templates that print any role would print an attack."""
    with pytest.raises(BadRequest):
        adapt([{"role": "user", "content": [{"type": "image"}]}], (), ALL)
    with pytest.raises(BadRequest, match="robot"):
        adapt([m("robot", "x")], (), ALL)
