"""Pieces of a reply become the same content blocks, streamed and whole."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.errors import GenerationFailed
from mlxcache.types import Finished, Piece, Prompt, Text, Thinking, ToolCall, token_ids
from mlxcache.wire.anthropic_reply import ContentBlocks, count_usage, end_fields
from mlxcache.wire.signatures import SignatureReader

PIECES = st.lists(
    st.one_of(
        st.builds(Text, st.sampled_from(["", " ", "\n\n", "a", "one two", " b"])),
        st.builds(Thinking, st.sampled_from(["", "\n", "so", " then"])),
        st.builds(
            ToolCall,
            st.just(0),
            st.just("call_1"),
            st.just("Read"),
            st.sampled_from(["", "{}", '{"path": "a"}']),
        ),
    )
)


def play(pieces: list[Piece], *, show: bool = True) -> tuple[list[dict[str, Any]], ContentBlocks]:
    blocks = ContentBlocks(show_thinking=show)
    events = [event for piece in pieces for event in blocks.feed(piece)]
    return events + blocks.close(), blocks


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rebuild the content from events, as a client does."""
    content: list[dict[str, Any]] = []
    for event in events:
        index = event["index"]
        if event["type"] == "content_block_start":
            assert index == len(content)
            content.append(dict(event["content_block"], partial=""))
            continue
        assert index == len(content) - 1
        delta = event.get("delta", {})
        content[-1]["partial"] += delta.get("partial_json", "")
        for key in ("text", "thinking", "signature"):
            if key in delta:
                content[-1][key] += delta[key]
    for block in content:
        partial = block.pop("partial")
        if block["type"] == "tool_use":
            block["input"] = json.loads(partial)
    return content


@settings(deadline=None)
@given(PIECES, st.booleans())
def test_the_streamed_events_add_up_to_the_whole_content(pieces: list[Piece], show: bool) -> None:
    events, blocks = play(pieces, show=show)
    assert rebuilt(events) == blocks.content


@settings(deadline=None)
@given(PIECES)
def test_no_block_is_empty_or_white_space(pieces: list[Piece]) -> None:
    _, blocks = play(pieces)
    assert all(b["text"].strip() for b in blocks.content if b["type"] == "text")
    assert all(b["thinking"].strip() for b in blocks.content if b["type"] == "thinking")


def test_an_empty_reply_has_no_blocks_and_no_events() -> None:
    events, blocks = play([Text(""), Text("\n")])
    assert events == []
    assert blocks.content == []


def test_white_space_within_a_text_stays() -> None:
    _, blocks = play([Text("\n"), Text(" a"), Text("\n\n"), Text("b ")])
    assert blocks.content == [{"type": "text", "text": "\n a\n\nb "}]


def test_thinking_text_and_calls_become_blocks_in_order() -> None:
    pieces: list[Text | Thinking | ToolCall] = [
        Thinking("hm"),
        Text("Reading."),
        ToolCall(0, "call_1", "Read", '{"path": "a"}'),
        ToolCall(1, "call_2", "List", ""),
    ]
    _, blocks = play(pieces)
    assert [b["type"] for b in blocks.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert blocks.content[2]["input"] == {"path": "a"}
    assert blocks.content[3]["input"] == {}
    assert blocks.content[2]["id"].startswith("toolu_")


def test_a_call_streams_an_empty_input_and_then_its_json() -> None:
    events, _ = play([ToolCall(0, "1", "List", "")])
    assert events[0]["content_block"]["input"] == {}
    assert events[1]["delta"] == {"type": "input_json_delta", "partial_json": "{}"}


def test_a_shown_thinking_block_ends_with_its_signature() -> None:
    events, _ = play([Thinking("so "), Thinking("it is"), Text("yes")])
    kinds = [e["delta"]["type"] for e in events if "delta" in e]
    assert kinds == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]


def test_omitted_thinking_is_sent_in_the_signature_alone() -> None:
    events, blocks = play([Thinking("so it is"), Text("yes")], show=False)
    assert "so it is" not in json.dumps(events)
    thinking = blocks.content[0]
    assert thinking["thinking"] == ""
    assert SignatureReader().recover("", thinking["signature"]) == "so it is"


def test_half_an_emoji_in_a_call_is_mended_in_both_forms() -> None:
    events, blocks = play([ToolCall(0, "1", "Write", '{"text": "\\ud83d and more"}')])
    sent = msgspec.json.decode(msgspec.json.encode(blocks.content))
    assert sent[0]["input"] == {"text": "\ufffd and more"}
    assert rebuilt(events) == sent


def test_a_number_too_large_for_a_float_is_sent_as_it_was_written() -> None:
    """A schema that allows any value allows it, and OpenAI's form of the call has it, too."""
    events, blocks = play([ToolCall(0, "1", "Write", '{"count":54E7439394}')])
    assert msgspec.json.encode(blocks.content[0]["input"]) == b'{"count":54E7439394}'
    (written,) = [e["delta"]["partial_json"] for e in events if "delta" in e]
    assert written == '{"count":54E7439394}'


def test_arguments_that_are_no_json_object_fail_the_reply() -> None:
    with pytest.raises(GenerationFailed, match="Read"):
        play([ToolCall(0, "1", "Read", "[1]")])


@settings(deadline=None)
@given(st.integers(1, 50), st.integers(0, 49), st.none() | st.integers(0, 50))
def test_the_parts_of_the_usage_add_up_to_the_prompt(
    length: int, cached: int, breakpoint: int | None
) -> None:
    cached = min(cached, length - 1)
    at = None if breakpoint is None else min(breakpoint, length)
    counts = count_usage(Prompt(token_ids(range(length)), breakpoint=at), cached, 7)
    assert counts["cache_read_input_tokens"] == cached
    assert counts["cache_creation_input_tokens"] == max(0, (at or 0) - cached)
    assert sum(counts.values()) - 7 == length
    assert min(counts.values()) >= 0


def test_the_end_names_the_stop_sequence() -> None:
    last = Finished("stop_sequence", 1, 0, 0, 1, stop_sequence="END")
    assert end_fields(last) == {"stop_reason": "stop_sequence", "stop_sequence": "END"}
