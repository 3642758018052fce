"""A Messages body becomes the same chat for each spelling of the same conversation."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.errors import BadRequest, ContextLengthExceeded
from mlxcache.types import Chat
from mlxcache.wire.signatures import sign_thinking
from tests.wire.anthropic_bodies import (
    MARK,
    SCHEMA,
    assistant,
    convert,
    read,
    rendered,
    result,
    text,
    tool,
    use,
    user,
)

# -- shapes ----------------------------------------------------------------------------------


def test_system_comes_first_and_its_blocks_are_joined_as_if_it_were_one_text() -> None:
    blocks = read(system=[text("one"), text(""), text("two", **MARK)])
    assert blocks.messages[0] == {"role": "system", "content": "one\n\ntwo"}
    assert rendered(blocks) == rendered(read(system="one\n\ntwo"))


@pytest.mark.parametrize("system", [None, "", [], [text("")]])
def test_an_empty_system_prompt_is_none(system: Any) -> None:
    assert [m["role"] for m in read(system=system).messages] == ["user"]


def test_a_system_message_between_others_stays_where_it_is() -> None:
    chat = read(user("a"), {"role": "system", "content": "note"}, assistant("b"), user("c"))
    assert [m["role"] for m in chat.messages] == ["user", "system", "assistant", "user"]
    assert chat.messages[1]["content"] == "note"


def test_an_assistant_turn_is_one_message() -> None:
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s"}
    chat = read(user("a"), assistant(thinking, "Reading.", use(path="x")), user(result()))
    assert chat.messages[1] == {
        "role": "assistant",
        "content": "Reading.",
        "reasoning_content": "hm",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "Read", "arguments": {"path": "x"}},
            }
        ],
    }


def test_results_become_tool_messages_and_the_text_after_them_a_users() -> None:
    calls = assistant(use("toolu_1"), use("toolu_2", "List"))
    chat = read(user("a"), calls, user(result([text("r2")], "toolu_2"), result("r1"), "go on"))
    assert chat.messages[2:] == (
        {"role": "tool", "tool_call_id": "1", "content": "r1", "name": "Read"},
        {"role": "tool", "tool_call_id": "2", "content": "r2", "name": "List"},
        {"role": "user", "content": "go on"},
    )


def test_a_text_before_a_result_stays_before_it() -> None:
    chat = read(user("a"), assistant(use()), user("first", result()))
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "user", "tool"]


def test_a_failed_call_says_so() -> None:
    chat = read(user("a"), assistant(use()), user(result("no such file", is_error=True)))
    assert chat.messages[2]["content"] == "Error: no such file"


@pytest.mark.parametrize("content", [None, "", [], [text("")]])
def test_a_result_may_be_empty(content: Any) -> None:
    assert read(user("a"), assistant(use()), user(result(content))).messages[2]["content"] == ""


def test_a_user_message_without_any_text_is_an_empty_turn() -> None:
    assert read(user("")).messages == ({"role": "user", "content": ""},)


# -- stability -------------------------------------------------------------------------------

WORDS = st.sampled_from(["", "one", "two\nlines", " padded ", "\U0001f600 é"])
TEXTS = st.lists(WORDS, min_size=1, max_size=3).map(lambda ws: [text(w) for w in ws])
USERS = st.builds(
    lambda blocks, results: {
        "role": "user",
        "content": [result([text(w)], f"toolu_{i}") for i, w in enumerate(results)] + blocks,
    },
    TEXTS,
    st.lists(WORDS, max_size=2),
)
ASSISTANTS = st.builds(
    lambda blocks, calls: {
        "role": "assistant",
        "content": blocks + [use(f"toolu_{i}", path=w) for i, w in enumerate(calls)],
    },
    TEXTS,
    st.lists(WORDS, max_size=2),
)
SYSTEMS = TEXTS.map(lambda blocks: {"role": "system", "content": blocks})
HISTORIES = st.lists(USERS | ASSISTANTS | SYSTEMS, max_size=5).map(lambda ms: [*ms, user("last")])


def as_strings(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rewrite every list of one text as a string."""
    messages = copy.deepcopy(messages)
    holders = messages + [b for m in messages for b in m["content"] if b["type"] == "tool_result"]
    for holder in holders:
        content = holder["content"]
        if len(content) == 1 and content[0]["type"] == "text":
            holder["content"] = content[0]["text"]
    return messages


def marked(messages: list[dict[str, Any]], draw: st.DataObject) -> list[dict[str, Any]]:
    messages = copy.deepcopy(messages)
    for message in messages:
        for block in message["content"]:
            if draw.draw(st.booleans()):
                block.update(MARK)
    return messages


@settings(deadline=None)
@given(HISTORIES)
def test_a_string_and_a_list_of_one_text_are_the_same(messages: list[dict[str, Any]]) -> None:
    assert rendered(read(*as_strings(messages))) == rendered(read(*messages))


@settings(deadline=None)
@given(HISTORIES, st.data())
def test_cache_control_changes_nothing_but_the_breakpoint(
    messages: list[dict[str, Any]], data: st.DataObject
) -> None:
    plain = read(*messages, tools=[tool("A")], system=[text("s")])
    noted = read(*marked(messages, data), tools=[tool("A", **MARK)], system=[text("s", **MARK)])
    assert rendered(noted) == rendered(plain)
    assert plain.breakpoint is None
    assert noted.breakpoint is not None


@settings(deadline=None)
@given(HISTORIES, HISTORIES)
def test_a_longer_conversation_begins_with_the_shorter_ones_messages(
    before: list[dict[str, Any]], after: list[dict[str, Any]]
) -> None:
    short, long = read(*before), read(*before, *after)
    assert long.messages[: len(short.messages)] == short.messages


def test_thinking_left_out_of_what_is_shown_comes_back_from_its_signature() -> None:
    def turn(shown: str) -> Chat:
        block = {"type": "thinking", "thinking": shown, "signature": sign_thinking("so it is")}
        return read(user("a"), assistant(block, "yes"), user("b"))

    assert turn("").messages[1]["reasoning_content"] == "so it is"
    assert rendered(turn("")) == rendered(turn("so it is"))


def test_loading_a_deferred_tool_later_leaves_the_head_and_earlier_messages_as_they_were() -> None:
    begun = [user("find a tool")]
    search = tool("ToolSearch")
    head = [tool("Apply"), tool("Zip"), search]
    loaded = [tool("Apply"), tool("Memo", defer_loading=True), tool("Zip"), search]
    references = [{"type": "tool_reference", "tool_name": "Memo"}]
    call = assistant(use(name="ToolSearch", query="memo"))
    before = read(*begun, tools=head)
    after = read(*begun, call, user(result(references)), tools=loaded)
    assert after.tools == before.tools
    assert after.messages[:1] == before.messages
    description = after.messages[2]["content"]
    assert "Memo" in description
    assert "Does Memo." in description
    assert json.dumps(SCHEMA) in description


def test_what_a_body_names_again_and_again_fills_no_memory() -> None:
    """The description of a tool in a reference, its name in a result."""
    long = tool("Memo", description="d" * 1_000_000, defer_loading=True)
    references = [{"type": "tool_reference", "tool_name": "Memo"}]
    with pytest.raises(ContextLengthExceeded):
        read(user("a"), assistant(use()), user(result(references * 9)), tools=[long])
    results = [result("done") for _ in range(9)]
    messages = read(user("a"), assistant(use(name="n" * 10_000)), user(*results)).messages
    assert len(json.dumps(messages)) < 20_000


def test_a_deferred_tool_may_be_called_once_it_is_loaded() -> None:
    body = {"model": "m", "messages": [user("a")], "tools": [tool("Memo", defer_loading=True)]}
    chat, tools = convert(body)
    assert chat.tools == ()
    assert [t["function"]["name"] for t in tools] == ["Memo"]


# -- the breakpoint --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({}, None),
        ({"system": "s", "cache_control": None}, None),
        ({"tools": [tool("A", **MARK)]}, 0),
        ({"system": [text("s", **MARK)]}, 0),
        ({"system": "s", "messages": [user(text("a", **MARK)), user("b")]}, 2),
        ({"messages": [user(text("a", **MARK)), user("b")]}, 1),
        ({"messages": [user("a"), user(result("done", "toolu_1", **MARK), "t")]}, 2),
        ({"messages": [user("a"), user(result([text("r", **MARK)]), "t")]}, 2),
        ({"messages": [user("a"), user(result(), text("t", **MARK)), user("c")]}, 3),
        ({"messages": [user("a"), user(result(), text("", **MARK)), user("c")]}, 2),
        ({"system": "s", "messages": [user("a"), user("b")], "cache_control": MARK}, 3),
        ({"system": [text("s", **MARK)], "messages": [user(text("a", **MARK))]}, 2),
    ],
)
def test_the_last_mark_is_counted_in_chat_messages(
    body: Mapping[str, Any], expected: int | None
) -> None:
    messages = body.get("messages", [user("a")])
    rest = {k: v for k, v in body.items() if k != "messages"}
    assert read(*messages, **rest).breakpoint == expected


# -- a last message of the assistant's -------------------------------------------------------


def test_a_last_assistant_message_is_continued() -> None:
    chat = read(user("a"), assistant("The answer is"))
    assert chat.continue_final
    assert chat.messages[-1]["content"] == "The answer is"


def test_an_empty_last_assistant_message_is_the_turn_that_begins_anyway() -> None:
    chat = read(user("a", text("b", **MARK)), assistant(text("", **MARK)))
    assert rendered(chat) == rendered(read(user("a", "b")))
    assert chat.breakpoint == 1


@pytest.mark.parametrize(
    "block", ["ends in a space ", use(), {"type": "thinking", "thinking": "hm"}]
)
def test_what_cannot_be_continued_is_refused_for_a_reply_but_counted(block: Any) -> None:
    with pytest.raises(BadRequest, match="final assistant message"):
        read(user("a"), assistant(block))
    counted = read(user("a"), assistant(block), strict=False)
    assert not counted.continue_final
    assert len(counted.messages) == 2
