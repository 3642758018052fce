"""What clients wish kept, and for how long, from either API."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlxcache.wire import anthropic_types as wire
from mlxcache.wire.anthropic_request import to_chat
from mlxcache.wire.retention import of_retention

FIVE, HOUR = 300.0, 3600.0


def text(words: str, ttl: Any = None, *, marked: bool = False) -> dict[str, Any]:
    """A block of text, with a mark if there is a time or one is asked for."""
    mark = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
    return {"type": "text", "text": words} | ({"cache_control": mark} if ttl or marked else {})


def keeps(**body: Any) -> dict[int, float]:
    """What the marks of a body wish, by its leading messages."""
    raw = {"model": "m", "messages": [{"role": "user", "content": "a"}]} | body
    chat, _ = to_chat(msgspec.convert(raw, wire.Conversation))
    return dict(chat.keeps)


def test_without_marks_nothing_is_wished():
    """Also where there is a null."""
    assert keeps(system="s") == keeps(cache_control=None) == {}


@pytest.mark.parametrize(("ttl", "seconds"), [(None, FIVE), ("5m", FIVE), ("1h", HOUR), (7, FIVE)])
def test_a_mark_on_the_system_is_of_what_comes_before_the_messages(ttl, seconds):
    """Five minutes unless it says an hour; so is one on a tool."""
    assert keeps(system=[text("s", ttl, marked=True)]) == {0: seconds}
    tool = {"name": "t", "input_schema": {"type": "object"}}
    mark = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
    assert keeps(tools=[tool | {"cache_control": mark}]) == {0: seconds}


def test_the_last_mark_of_the_messages_and_the_heads_are_apart():
    """Each with the longest of its times."""
    messages = [
        {"role": "user", "content": [text("a", "5m"), text("b")]},
        {"role": "assistant", "content": "c"},
        {"role": "user", "content": [text("d", marked=True)]},
        {"role": "assistant", "content": "e"},
        {"role": "user", "content": "f"},
    ]
    assert keeps(system=[text("s", "1h")], messages=messages) == {0: HOUR, 4: FIVE}
    assert keeps(messages=messages, cache_control={"type": "ephemeral", "ttl": "1h"}) == {5: HOUR}


@pytest.mark.parametrize("junk", [True, 3, "x", ["1h"], {"ttl": ["1h"]}])
def test_a_mark_that_is_junk_is_no_reason_to_refuse(junk):
    """It is a hint."""
    assert set(keeps(system=[text("s") | {"cache_control": junk}]).values()) <= {FIVE}


def test_retention():
    """OpenAI's words for it; what is not known wishes nothing."""
    assert of_retention("24h", 3) == ((3, 86_400.0),)
    assert of_retention("in_memory", 3) == of_retention("in-memory", 3) == ((3, FIVE),)
    for junk in (None, "", "1y", 5, ["24h"], {}):
        assert of_retention(junk, 3) == ()
