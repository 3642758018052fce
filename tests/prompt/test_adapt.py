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


def test_a_system_message_stays_where_the_template_takes_it() -> None:
    """Order is the client's, and moving one would lose the prefix."""
    messages = [m("system", "s"), m("user", "u"), m("system", "later"), m("assistant", "a")]
    assert adapt(messages, (), ALL) == messages


def test_leading_system_messages_are_joined() -> None:
    """Templates look at the first one only."""
    assert short(adapt([m("system", "a"), m("system", "b"), m("user", "u")], (), FIRST)) == [
        ("system", "a\n\nb"),
        ("user", "u"),
    ]


def test_a_refused_system_message_joins_the_user_turn_before_it() -> None:
    """By a rule that looks only left."""
    messages = [m("user", "u"), m("system", "note"), m("assistant", "a")]
    assert short(adapt(messages, (), FIRST)) == [("user", "u\n\nnote"), ("assistant", "a")]


def test_a_refused_system_message_joins_the_result_before_it() -> None:
    """As a user message it would begin a new question, for which templates drop thinking."""
    reply = {**m("assistant", ""), "tool_calls": [call(1)]}
    messages = [m("user", "u"), reply, result(1, "found"), m("system", "note")]
    assert short(adapt(messages, (), FIRST))[2:] == [("tool", "found\n\nnote")]
    assert short(adapt(messages, (), ALL))[2:] == [("tool", "found"), ("system", "note")]


def test_after_an_assistant_it_becomes_a_user_message() -> None:
    """The next user message joins it only where turns must alternate."""
    messages = [m("user", "u"), m("assistant", "a"), m("system", "note"), m("user", "v")]
    assert short(adapt(messages, (), FIRST))[2:] == [("user", "note"), ("user", "v")]
    assert short(adapt(messages, (), GEMMA))[2:] == [("user", "note\n\nv")]


def test_a_system_message_that_is_never_taken_starts_the_first_user_turn() -> None:
    """Nothing is dropped."""
    messages = [m("system", "s"), m("developer", "d"), m("user", "u")]
    assert short(adapt(messages, (), GEMMA)) == [("user", "s\n\nd\n\nu")]


def test_developer_is_system_unless_the_template_names_it() -> None:
    """OpenAI's newer name for the same thing."""
    assert short(adapt([m("developer", "d"), m("user", "u")], (), ALL))[0][0] == "system"
    taken = adapt([m("developer", "d"), m("user", "u")], (), replace(ALL, developer=True))
    assert short(taken)[0][0] == "developer"


def test_neighbours_of_one_role_are_merged_only_where_turns_must_alternate() -> None:
    """Both users' and assistants'."""
    messages = [m("user", "u"), m("user", "v"), m("assistant", "a"), m("assistant", "b")]
    assert adapt(messages, (), ALL) == messages
    assert short(adapt(messages, (), GEMMA)) == [("user", "u\n\nv"), ("assistant", "a\n\nb")]


def test_calls_and_results_pass_through_with_the_tool_s_name() -> None:
    """Results stay separate, each with its id; the name is what the call said."""
    reply = {**m("assistant", "look"), "tool_calls": [call(1, path="x"), call(2, path="y")]}
    messages = [m("user", "u"), reply, result(1, "one"), result(2, "two")]
    adapted = adapt(messages, (), ALL)
    assert [c["function"]["arguments"] for c in adapted[1]["tool_calls"]] == [
        {"path": "x"},
        {"path": "y"},
    ]
    assert [(r["content"], r["name"]) for r in adapted[2:]] == [("one", "Read"), ("two", "Read")]
    assert adapted[2]["tool_call_id"] == adapted[1]["tool_calls"][0]["id"]


def test_arguments_are_text_for_templates_that_need_text() -> None:
    """JSON, with characters as they are."""
    reply = {**m("assistant", ""), "tool_calls": [call(1, path="é")]}
    traits = replace(ALL, string_arguments=True, absent_content=True)
    adapted = adapt([m("user", "u"), reply], (), traits)[1]
    assert adapted["tool_calls"][0]["function"]["arguments"] == '{"path": "é"}'
    assert "content" not in adapted


def test_arguments_that_came_as_text_become_an_object() -> None:
    """OpenAI sends them as text; what is no JSON object stays as it is."""
    for sent, taken in (('{"a": 1}', {"a": 1}), ("", {}), ("[1]", "[1]"), ("{x", "{x"), (None, {})):
        wire = {"id": "i", "function": {"name": "Read", "arguments": sent}}
        adapted = adapt([m("user", "u"), {**m("assistant", ""), "tool_calls": [wire]}], (), ALL)
        assert adapted[1]["tool_calls"][0]["function"]["arguments"] == taken


def test_ids_are_shortened_alike_in_calls_and_results() -> None:
    """Nine letters or digits, the same for the same id in every turn."""
    reply = {**m("assistant", ""), "tool_calls": [call(1), call(2)]}
    traits = replace(ALL, short_ids=True)
    adapted = adapt([m("user", "u"), reply, result(2, "r")], (), traits)
    ids = [c["id"] for c in adapted[1]["tool_calls"]]
    assert len(set(ids)) == 2
    assert all(len(i) == 9 and i.isalnum() for i in ids)
    assert adapted[2]["tool_call_id"] == ids[1]
    assert adapt([m("user", "u"), reply], (), traits)[1] == adapted[1]


def test_several_calls_with_text_become_a_message_each_where_needed() -> None:
    """In the order they were written."""
    reply = {**m("assistant", "look"), "tool_calls": [call(1, n=1), call(2, n=2)]}
    adapted = adapt([m("user", "u"), reply], (), LLAMA)[1:]
    assert short(adapted) == [("assistant", "look"), ("assistant", ""), ("assistant", "")]
    assert [len(a.get("tool_calls", ())) for a in adapted] == [0, 1, 1]


def test_calls_stay_calls_where_the_template_has_no_room_for_the_text_beside_them() -> None:
    """As such a template would write them itself."""
    reply = {**m("assistant", "look"), "tool_calls": [call(1, n=1)]}
    adapted = adapt([m("user", "u"), reply], (), MISTRAL)[1:]
    assert short(adapted) == [("assistant", "")]
    assert len(adapted[0]["tool_calls"]) == 1


def test_a_user_message_after_a_result_joins_it_where_it_must() -> None:
    """A reminder that comes with a result is not refused."""
    reply = {**m("assistant", ""), "tool_calls": [call(1)]}
    messages = [m("user", "u"), reply, result(1, "r"), m("user", "note"), m("system", "s")]
    assert short(adapt(messages, (), MISTRAL))[2:] == [("tool", "r\n\nnote\n\ns")]
    assert short(adapt(messages, (), ALL))[2:] == [("tool", "r"), ("user", "note"), ("system", "s")]


def test_without_the_tool_role_calls_and_results_are_text() -> None:
    """Calls as the description asks for them, results in the user's turn."""
    reply = {**m("assistant", "look"), "tool_calls": [call(1, path="x")]}
    messages = [m("user", "u"), reply, result(1, "one"), result(2, "two")]
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
    """With a form for calls that the output parser knows."""
    adapted = adapt([m("system", "s"), m("user", "u")], TOOLS, Traits())
    assert [message["role"] for message in adapted] == ["system", "user"]
    assert adapted[0]["content"].startswith("s\n\n")
    assert all(json.dumps(tool) in adapted[0]["content"] for tool in TOOLS)
    assert '<tool_call>{"name": NAME, "arguments": {...}}</tool_call>' in adapted[0]["content"]
    assert short(adapt([m("user", "u")], TOOLS, GEMMA))[0][1].endswith("\n\nu")
    assert adapt([m("user", "u")], TOOLS, ALL) == [m("user", "u")]


@given(agent_turns())
def test_the_first_messages_are_adapted_alike_whatever_follows(turns: list[Chat]) -> None:
    """Only the last of them may be added to, and only at its end."""
    messages = turns[-1].messages
    for traits in (ALL, FIRST, GEMMA, MISTRAL, LLAMA, Traits()):
        whole = adapt(messages, TOOLS, traits)
        for count in range(1, len(messages)):
            part = adapt(messages[:count], TOOLS, traits)
            assert part[:-1] == whole[: len(part) - 1]
            assert whole[len(part) - 1]["content"].startswith(part[-1]["content"])


def test_content_of_other_shapes_is_text_or_refused() -> None:
    """None is empty, a list of texts is joined, a picture is the client's mistake."""
    assert short(adapt([{"role": "user", "content": None}], (), ALL)) == [("user", "")]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert short(adapt([{"role": "user", "content": parts}], (), ALL)) == [("user", "a\n\nb")]
    with pytest.raises(BadRequest):
        adapt([{"role": "user", "content": [{"type": "image"}]}], (), ALL)


def test_an_unknown_role_is_refused() -> None:
    """Templates that print any role would print an attack."""
    with pytest.raises(BadRequest, match="robot"):
        adapt([m("robot", "x")], (), ALL)
