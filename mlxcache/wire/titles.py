"""Titles of conversations: the beginning of the first text that a user typed."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

MAX_TITLE = 80
"""Characters of a title."""

_MAX_READ = 20_000
"""Characters of a message that are searched."""

_TYPED = frozenset({"task", "question", "query", "message", "prompt"})
"""Elements in which clients wrap typed text, also with `user` before their names."""

_ELEMENT = re.compile(r"\s*<([A-Za-z][\w:-]*)(?:\s[^<>]*)?>(.*?)</\1>", re.DOTALL)
_OPEN_END = re.compile(r"\s*<([a-z]\w*[-_:][\w:-]*)>")
_EMOJI_JOINERS = "\u200d\ufe0f"
"""Invisible characters to keep; others could hide or reverse text in a list."""


def title_from_messages(messages: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the title of a conversation, or None if no user message has typed text.

    At most `MAX_TITLE` characters, none of them a control character. Machine-made elements at the
    start, such as `<system-reminder>...</system-reminder>`, are skipped.
    """
    for message in messages:
        if message.get("role") == "user":
            title = title_from_text(_text(message.get("content")))
            if title:
                return title
    return None


def _text(content: Any) -> str:
    if isinstance(content, list):  # texts beside images
        return " ".join(part for part in content if isinstance(part, str))
    return str(content or "")


def title_from_text(text: str) -> str | None:
    """Return the beginning of `text` on one line, or None if nothing of it is typed."""
    title = to_one_line(_typed(text[:_MAX_READ]))
    if len(title) > MAX_TITLE:
        title = title[: MAX_TITLE - 1].rstrip() + "…"
    return title or None


def to_one_line(text: str) -> str:
    """Return `text` on one line, without control and other invisible characters."""
    return " ".join("".join(map(_visible, text)).split())


def _typed(text: str) -> str:
    """Remove machine-made elements from the start of `text`."""
    while (match := _ELEMENT.match(text)) is not None:
        name = re.sub(r"^user[-_]", "", match[1].lower())
        if name in _TYPED:
            return match[2]
        text = text[match.end() :]
    return "" if _OPEN_END.match(text) else text


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co")
    return "" if hidden and character not in _EMOJI_JOINERS else character
