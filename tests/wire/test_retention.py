"""Retention hints of both APIs: which messages, for how many seconds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlxcache.wire import anthropic_types as wire
from mlxcache.wire.anthropic_request import to_chat
from mlxcache.wire.chat_parts import keep_hints

FIVE, HOUR = 300.0, 3600.0


def text(words: str, ttl: Any = None, *, marked: bool = False) -> dict[str, Any]:
    """A text block; a `ttl` implies a mark."""
    mark = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
    return {"type": "text", "text": words} | ({"cache_control": mark} if ttl or marked else {})


def keeps(**body: Any) -> dict[int, float]:
    """Seconds by leading messages, from the marks of a body."""
    raw = {"model": "m", "messages": [{"role": "user", "content": "a"}]} | body
    chat, _ = to_chat(msgspec.convert(raw, wire.Conversation))
    return dict(chat.keeps)


def test_without_marks_there_is_no_hint():
    """A null counts as no mark."""
    assert keeps(system="s") == keeps(cache_control=None) == {}


@pytest.mark.parametrize(("ttl", "seconds"), [(None, FIVE), ("5m", FIVE), ("1h", HOUR), (7, FIVE)])
def test_a_mark_on_system_or_tools_covers_the_head(ttl, seconds):
    """Five minutes unless it says an hour."""
    assert keeps(system=[text("s", ttl, marked=True)]) == {0: seconds}
    tool = {"name": "t", "input_schema": {"type": "object"}}
    mark = {"type": "ephemeral"} | ({"ttl": ttl} if ttl else {})
    assert keeps(tools=[tool | {"cache_control": mark}]) == {0: seconds}


def test_head_and_messages_have_a_hint_each():
    """Each with the longest of its times; the last mark says how many messages."""
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
def test_a_malformed_mark_is_accepted(junk):
    """It is only a hint."""
    assert set(keeps(system=[text("s") | {"cache_control": junk}]).values()) <= {FIVE}


def test_retention():
    """OpenAI's `prompt_cache_retention`; an unknown value gives no hint."""
    assert keep_hints("24h", 3) == ((3, 86_400.0),)
    assert keep_hints("in_memory", 3) == keep_hints("in-memory", 3) == ((3, FIVE),)
    unknown: tuple[Any, ...] = (None, "", "1y", 5, ["24h"], {})
    for junk in unknown:
        assert keep_hints(junk, 3) == ()
