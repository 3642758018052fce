"""A conversation's title: how the first message that a person wrote begins."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import Any

LONGEST = 80
"""Characters of a title."""

_READ = 20_000
"""Characters of a message that are looked at."""

_SPOKEN = frozenset({"task", "question", "query", "message", "prompt"})
"""Elements, also with `user` before them, in which clients wrap what a person wrote."""

_ELEMENT = re.compile(r"\s*<([A-Za-z][\w:-]*)(?:\s[^<>]*)?>(.*?)</\1>", re.DOTALL)
_OPEN_END = re.compile(r"\s*<([a-z]\w*[-_:][\w:-]*)>")
_KEPT_FORMATS = "\u200d\ufe0f"
"""Joiners inside emoji; other invisible characters could hide or reverse what a list shows."""


def title_of(messages: Iterable[Mapping[str, Any]]) -> str | None:
    """The title of a conversation by its messages, or None where nobody wrote anything.

    At most 80 characters without control characters. Elements in front that machines put there,
    such as `<system-reminder>...</system-reminder>`, are skipped.
    """
    for message in messages:
        if message.get("role") == "user":
            title = title_of_text(_written(message.get("content")))
            if title:
                return title
    return None


def _written(content: Any) -> str:
    """A message's text, also beside images."""
    if isinstance(content, list):
        return " ".join(part for part in content if isinstance(part, str))
    return str(content or "")


def title_of_text(text: str) -> str | None:
    """The first lines of a text that has any, as one."""
    title = clean(_spoken(text[:_READ]))
    if len(title) > LONGEST:
        title = title[: LONGEST - 1].rstrip() + "…"
    return title or None


def clean(text: str) -> str:
    """`text` on one line, without what is not to be seen."""
    return " ".join("".join(map(_shown, text)).split())


def _spoken(text: str) -> str:
    """`text` without the machine-made elements that it begins with."""
    while (match := _ELEMENT.match(text)) is not None:
        name = re.sub(r"^user[-_]", "", match[1].lower())
        if name in _SPOKEN:
            return match[2]
        text = text[match.end() :]
    return "" if _OPEN_END.match(text) else text


def _shown(character: str) -> str:
    if character.isspace():
        return " "
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co")
    return "" if hidden and character not in _KEPT_FORMATS else character
