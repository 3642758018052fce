"""Token ids of tool results as a later reply would repeat them, for guesses of its tokens.

A reply that edits a file repeats its text without the line numbers that the result showed, and in
JSON with escapes. `guess.forms` makes this form of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxcache.guess.forms import reply_form
from mlxcache.lru import LRU
from mlxcache.types import NO_TOKENS, Tokens

MOST_BYTES = 16 << 20
"""Most bytes of results and their forms that are kept for one owner."""


class ResultForms:
    """Tool results of one owner as a reply would repeat them, as token ids. Thread-safe.

    This form of a result has no line numbers; see `guess.forms.reply_form`. It is made once per
    result and kept; results and forms take at most `MOST_BYTES` bytes. `encode(text)` returns the
    token ids of a text. `escaped`: the model's tool calls write strings as JSON, so the form has
    the escapes of JSON.
    """

    def __init__(self, encode: Callable[[str], Tokens], *, escaped: bool):
        self.escaped = escaped
        self._encode = encode
        self._made: LRU[str, tuple[str, Tokens]] = LRU(MOST_BYTES, _size)

    def learn(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Make and keep the form of each tool result in `messages` for which none is kept.

        Blocks while these forms are tokenised.
        """
        for text in _results(messages):
            if self._made.get(text) is None:
                form = reply_form(text, escaped=self.escaped)
                ids = NO_TOKENS if form is None else self._encode(form)
                self._made.put(text, (text, ids))

    def of(self, messages: Sequence[Mapping[str, Any]]) -> Mapping[str, Tokens]:
        """Return the token ids that `learn` made of tool results in `messages`, by result text.

        Left out are results that a reply would repeat unchanged, those of fewer than 24 characters,
        and those whose form is not kept any more.
        """
        found = ((text, self._made.get(text)) for text in _results(messages))
        return {text: made[1] for text, made in found if made is not None and len(made[1])}


def _results(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    texts = (m.get("content") for m in messages if m.get("role") == "tool")
    return [text for text in texts if isinstance(text, str)]


def _size(made: tuple[str, Tokens]) -> int:
    text, ids = made
    return 2 * len(text) + ids.nbytes
