"""For how long clients wish prompts kept: hints for eviction, which change nothing else.

Sources: https://docs.anthropic.com/en/docs/build-with-claude/prompt-caching (`cache_control`), and
https://platform.openai.com/docs/guides/prompt-caching (`prompt_cache_retention`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mlxcache.wire import anthropic_types as wire

MINUTES_5, HOUR, DAY = 300.0, 3600.0, 86_400.0

Keeps = tuple[tuple[int, float], ...]
"""Leading messages, 0 for tools and system, and seconds after each use."""


def of_marks(body: wire.Conversation, breakpoint: int | None) -> Keeps:
    """What the `cache_control` marks of a body wish, of which `breakpoint` is the last."""
    head = [tool.cache_control for tool in body.tools or ()]
    head += _marks(body.system)
    rest = [mark for message in body.messages for mark in _marks(message.content)]
    wishes = {0: _longest(head)}
    if breakpoint:
        wishes[breakpoint] = _longest([*rest, body.cache_control])
    return tuple((leading, seconds) for leading, seconds in wishes.items() if seconds)


def of_retention(retention: Any, messages: int) -> Keeps:
    """What `prompt_cache_retention` wishes of all `messages`; nothing where it is not known."""
    known = {"in_memory": MINUTES_5, "in-memory": MINUTES_5, "24h": DAY}
    seconds = known.get(retention) if isinstance(retention, str) else None
    return ((messages, seconds),) if seconds else ()


def _marks(content: wire.Content | None) -> list[Any]:
    if not isinstance(content, list):
        return []
    return [block.get("cache_control") for block in content]


def _longest(marks: Iterable[Any]) -> float:
    """Seconds; 0 without a mark. A time that is not known counts as the shorter one."""
    given = [mark for mark in marks if isinstance(mark, dict)]
    return max((HOUR if mark.get("ttl") == "1h" else MINUTES_5 for mark in given), default=0.0)
