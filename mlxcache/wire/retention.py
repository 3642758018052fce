"""Keep hints from the fields of requests that ask to keep prompts. Hints do not change replies.

Sources: https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching (`cache_control`), and
https://platform.openai.com/docs/guides/prompt-caching (`prompt_cache_retention`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlxcache.wire import anthropic_types as types

MINUTES_5, HOUR, DAY = 300.0, 3600.0, 86_400.0

RetentionHints = tuple[tuple[int, float], ...]
"""Pairs of a number of leading messages and the seconds to keep them after each use.

0 messages stand for tools and system prompt only."""


def hints_from_marks(body: types.Conversation, breakpoint: int | None) -> RetentionHints:
    """Return the keep hints that the fields `cache_control` in `body` ask for.

    Each is a pair: the number of leading messages to keep (0: only tools and system prompt), and
    the seconds to keep them after each use. `breakpoint` is the number of leading messages up to
    and including the last one with such a field: 0 if only tools or the system prompt have one,
    None if there is none.
    """
    head = [tool.cache_control for tool in body.tools or ()]
    head += _marks(body.system)
    rest = [mark for message in body.messages for mark in _marks(message.content)]
    hints = {0: _longest(head)}
    if breakpoint:
        hints[breakpoint] = _longest([*rest, body.cache_control])
    return tuple((leading, seconds) for leading, seconds in hints.items() if seconds)


def hints_from_retention(retention: Any, messages: int) -> RetentionHints:
    """Return the keep hint that a value of `prompt_cache_retention` asks for.

    It is one pair: `messages`, the number of all messages, and the seconds to keep them after each
    use. Returns an empty tuple if the value is unknown.
    """
    known = {"in_memory": MINUTES_5, "in-memory": MINUTES_5, "24h": DAY}
    seconds = known.get(retention) if isinstance(retention, str) else None
    return ((messages, seconds),) if seconds else ()


def _marks(content: types.Content | None) -> list[Any]:
    if not isinstance(content, list):
        return []
    return [block.get("cache_control") for block in content]


def _longest(marks: Iterable[Any]) -> float:
    """Return the longest time, in seconds, that any of `marks` asks for; 0 if none does.

    `marks` are values of `cache_control`, or None. An unknown or missing `ttl` counts as 5 minutes.
    """
    given = [mark for mark in marks if isinstance(mark, dict)]
    return max((HOUR if mark.get("ttl") == "1h" else MINUTES_5 for mark in given), default=0.0)
