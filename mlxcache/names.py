"""Names that users give to sessions, and labels that clients give: their length and characters."""

from __future__ import annotations

import re
import unicodedata

from mlxcache.errors import BadRequest

MAX_NAME = 200

_EMOJI_JOINERS = "\u200d\ufe0f"
"""Invisible characters to keep; others could hide or reverse text in a list."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def clean_name(text: str) -> str:
    if len(text) > MAX_NAME:
        raise BadRequest(
            f"A name has at most {MAX_NAME} characters, this one has {len(text)}.", param="name"
        )
    return to_one_line(text)


def clean_label(text: str) -> str:
    return _CONTROL.sub("", text).strip()[:MAX_NAME]


def to_one_line(text: str) -> str:
    """Return `text` on one line, without control characters and other invisible characters."""
    return " ".join("".join(map(_visible, text)).split())


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    hidden = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Co")
    return "" if hidden and character not in _EMOJI_JOINERS else character
