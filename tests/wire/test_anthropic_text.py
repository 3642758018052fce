"""Each type of content block becomes a text."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcache.errors import BadRequest
from mlxcache.wire import anthropic_types as wire
from mlxcache.wire.anthropic_request import to_chat
from tests.wire.anthropic_bodies import (
    MARK,
    assistant,
    convert,
    read,
    rendered,
    result,
    text,
    tool,
    user,
)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "document", "title": "T", "source": {"type": "text", "data": "body"}},
        {"type": "document", "title": "T", "source": {"type": "content", "content": "body"}},
        {"type": "search_result", "title": "T", "source": "", "content": [text("body")]},
    ],
)
def test_plain_documents_and_search_results_are_inlined(block: dict[str, Any]) -> None:
    assert read(user(block)).messages[0]["content"] == "T\n\nbody"


@pytest.mark.parametrize("wrap", [user, lambda block: user(result([block]))])
@pytest.mark.parametrize("kind", ["document", "search_result"])
def test_citations_that_are_off_change_no_prompt(kind: str, wrap: Any) -> None:
    inner: dict[str, Any] = {"source": {"type": "text", "data": "body"}}
    if kind == "search_result":
        inner = {"title": "T", "source": "u", "content": [text("body")]}
    block = {"type": kind, **inner}
    plain = read(wrap(block))
    for off in (None, {}, {"enabled": False}):
        assert rendered(read(wrap(block | {"citations": off}))) == rendered(plain)


def test_citations_of_an_earlier_reply_change_no_prompt() -> None:
    cited = text("So.", citations=[{"type": "char_location", "cited_text": "x"}])
    history = (user("a"), assistant(cited), user("b"))
    assert rendered(read(*history)) == rendered(read(user("a"), assistant("So."), user("b")))


def test_what_another_server_searched_is_described_without_what_only_it_can_read() -> None:
    found = {"type": "web_search_result", "title": "T", "encrypted_content": "secret"}
    history = assistant(
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "s", "content": [found]},
        {"type": "redacted_thinking", "data": "secret"},
        "So.",
    )
    content = read(user("a"), history, user("b")).messages[1]["content"]
    assert "web_search" in content
    assert '"query": "q"' in content
    assert '"title": "T"' in content
    assert content.endswith("So.")
    assert "secret" not in content


def test_what_an_advisor_said_is_in_the_history() -> None:
    said = {"type": "advisor_result", "text": "Use a lock."}
    block = {"type": "advisor_tool_result", "tool_use_id": "s", "content": said}
    content = read(user("a"), assistant(block), user("b")).messages[1]["content"]
    assert content.startswith("[advisor_tool_result]")
    assert "Use a lock." in content


def test_a_note_that_is_to_be_cleared_is_gone_once_a_user_message_follows() -> None:
    """Tools that it defines can be called all the same."""
    change = {
        "type": "tool_addition",
        "tool": {"type": "tool_definition", "definition": tool("New")},
    }
    note = {"role": "system", "content": [text("brief", **MARK), change]}
    passing = note | {"clear_at": "next_user_message"}
    shown = read(user("a"), passing, assistant("b"))
    assert rendered(shown) == rendered(read(user("a"), note, assistant("b")))
    messages = [user("a"), passing, assistant("b"), user("c")]
    chat, tools = convert({"model": "m", "messages": messages})
    assert rendered(chat) == rendered(read(user("a"), assistant("b"), user("c")))
    assert chat.breakpoint == 1
    assert [t["function"]["name"] for t in tools] == ["New"]
    kept = note | {"clear_at": "never"}
    assert len(read(user("a"), kept, assistant("b"), user("c")).messages) == 4


def test_a_tool_that_a_message_brings_along_is_described_there() -> None:
    change = {
        "type": "tool_addition",
        "tool": {"type": "tool_definition", "definition": tool("New")},
    }
    messages = [user("a"), {"role": "system", "content": [change]}]
    chat, tools = convert({"model": "m", "messages": messages})
    assert "Does New." in chat.messages[1]["content"]
    assert chat.tools == ()
    assert [t["function"]["name"] for t in tools] == ["New"]


def test_a_tool_that_a_message_removes_is_not_called() -> None:
    removal = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "Old"}}
    messages = [user("a"), {"role": "system", "content": [removal]}]
    chat, tools = convert({"model": "m", "messages": messages, "tools": [tool("Old"), tool("New")]})
    assert len(chat.tools) == 2
    assert [t["function"]["name"] for t in tools] == ["New"]


def test_a_body_nested_beyond_reason_is_a_bad_request() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    block = {"type": "server_tool_use", "id": "s", "name": "x", "input": deep}
    message = wire.Message("assistant", [block])
    with pytest.raises(BadRequest, match="nested"):
        to_chat(wire.Conversation(model="m", messages=[message, wire.Message("user", "a")]))


def test_a_system_message_may_be_without_content() -> None:
    assert read(user("a"), {"role": "system"}).messages == read(user("a")).messages
