"""Each type of content block becomes a text, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from mlxcache.errors import BadRequest, Unsupported
from mlxcache.wire import anthropic_types as wire
from mlxcache.wire.anthropic_request import to_chat
from tests.wire.anthropic_bodies import assistant, convert, read, result, text, tool, user


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


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
PDF = {"type": "document", "source": {"type": "base64", "media_type": "application/pdf"}}


@pytest.mark.parametrize(
    ("message", "named"),
    [
        (user("look", IMAGE), r"messages\[0\].content\[1\].*'image'"),
        (user(result([IMAGE])), r"messages\[0\].content\[0\].content\[0\].*'image'"),
        (user(PDF), r"messages\[0\].content\[0\].*'base64'"),
        (user({"type": "hologram"}), "'hologram'"),
    ],
)
def test_content_that_cannot_be_rendered_is_refused_by_name(
    message: dict[str, Any], named: str
) -> None:
    with pytest.raises(Unsupported, match=named):
        read(message)


@pytest.mark.parametrize(
    "message",
    [
        user({"text": "no type"}),
        user({"type": "text"}),
        user({"type": "text", "text": 1}),
        user({"type": "tool_use", "id": "1", "name": "A", "input": {}}),
        user({"type": "thinking", "thinking": "x"}),
        assistant(result()),
        assistant({"type": "tool_use", "id": "1", "name": "A", "input": "{}"}),
        {"role": "system", "content": [result()]},
        user({"type": "tool_addition", "tool": {"type": "tool_reference"}}),
    ],
)
def test_a_malformed_or_misplaced_block_is_named(message: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=r"messages\[0\].content\[0\]"):
        read(message)


def test_a_body_nested_beyond_reason_is_a_bad_request() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"a": deep}
    block = {"type": "server_tool_use", "id": "s", "name": "x", "input": deep}
    message = wire.Message("assistant", [block])
    with pytest.raises(BadRequest, match="nested"):
        to_chat(wire.Conversation(model="m", messages=[message, wire.Message("user", "a")]))
