"""Keeping the text of messages apart from the template's own control tokens.

Before rendering, every control token's text inside a message, a tool or an argument is replaced
by a sentinel; what a rendered text holds of control tokens is then the template's own. After
tokenisation's special cases are settled (see `codec`), the sentinels become text again.
"""

from __future__ import annotations

import json
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from mlxcache.prompt.tokenizer import any_of

OPEN, CLOSE = "\ue0f4", "\ue0f5"
_DIGITS = 7


class Escape:
    """Replaces control text by sentinels and back. Immutable, so safe in any thread.

    A sentinel is private-use characters around decimal digits: a nonce drawn per object, so
    that no text can hold one by accident or intent, then the characters' code points. It has
    no letters, quotes or blanks that a template could change by case, trim or escape; where a
    template writes JSON in ASCII, both the sentinel and what it stands for come out escaped.

    `controls` are the texts to keep out; those of `passing` may stand in an assistant's text.
    Where a tokenizer looks for some of them in text that its normaliser changed, `normalize`
    is that and `normalized` are those: a text that comes to hold one is replaced as a whole.
    """

    def __init__(
        self,
        controls: Iterable[str],
        passing: Iterable[str] = (),
        normalized: Iterable[str] = (),
        normalize: Callable[[str], str] | None = None,
    ):
        texts = {text for text in controls if text}
        self._normalize = normalize if normalized else None
        self._normal = any_of({normalize(text) for text in normalized} if normalize else ())
        self._all = _Finder(texts)
        self._assistant = _Finder(texts - set(passing))
        self._nonce = f"{secrets.randbelow(10**20):020d}"
        first, last = f"\\u{ord(OPEN):04x}", f"\\u{ord(CLOSE):04x}"
        self._sentinel = re.compile(
            f"(?:{OPEN}|{re.escape(first)}){self._nonce}"
            rf"((?:\d{{{_DIGITS}}})+)(?:{CLOSE}|{re.escape(last)})"
        )
        self.end = f"{OPEN}{self._nonce}{CLOSE}"
        """A mark that stands for no text, to find a place in a rendered conversation."""

    def text(self, text: str) -> str:
        """`text` with sentinels for control tokens, also for ones cut by its two ends."""
        return self._replace(text, self._all)

    def value(self, value: Any) -> Any:
        """A copy of a JSON value with every string in it escaped, keys too."""
        if isinstance(value, str):
            return self._replace(value, self._all)
        if isinstance(value, dict | Mapping):
            return {self.value(key): self.value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.value(item) for item in value]
        return value

    def message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a message, escaped; an assistant's content may hold the passing marks."""
        escaped: dict[str, Any] = self.value(message)
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            escaped["content"] = self._replace(content, self._assistant)
        return escaped

    def holds(self, rendered: str) -> bool:
        """Whether a rendered text holds a sentinel."""
        return self._nonce in rendered

    def steady(self, rendered: str) -> str:
        """The rendered text as any other object of this class would have it; as long."""
        return rendered.replace(self._nonce, "0" * len(self._nonce))

    def restore(self, rendered: str) -> str:
        """The rendered text with each sentinel turned back into what it stands for."""
        return "".join(text for text, _ in self.pieces(rendered))

    def pieces(self, rendered: str) -> list[tuple[str, bool]]:
        """The rendered text in order, as (text, whether it came from a sentinel)."""
        out: list[tuple[str, bool]] = []
        done = 0
        for match in self._sentinel.finditer(rendered):
            digits = match.group(1)
            points = [int(digits[i : i + _DIGITS]) for i in range(0, len(digits), _DIGITS)]
            if max(points) > sys.maxunicode:  # a template cut it up: no sentinel of ours
                continue
            out.append((rendered[done : match.start()], False))
            text = "".join(map(chr, points))
            in_json = rendered[match.start()] == "\\"
            out.append((json.dumps(text)[1:-1] if in_json else text, True))
            done = match.end()
        out.append((rendered[done:], False))
        return out

    def _replace(self, text: str, finder: _Finder) -> str:
        if self._normalize is not None:
            sound = text.encode("utf-8", "replace").decode()
            if self._normal.search(self._normalize(sound)):
                return self._sentinel_of(text)
        if finder.edge.search(text) is None:
            return text
        head, tail = finder.cut(text)
        if not head and not tail and finder.pattern.search(text) is None:
            return text
        body = text[head : len(text) - tail]
        return (
            self._sentinel_of(text[:head])
            + finder.pattern.sub(lambda match: self._sentinel_of(match.group()), body)
            + self._sentinel_of(text[len(text) - tail :])
        )

    def _sentinel_of(self, text: str) -> str:
        if not text:
            return ""
        return f"{OPEN}{self._nonce}{''.join(f'{ord(c):0{_DIGITS}d}' for c in text)}{CLOSE}"


class _Finder:
    """Finds control tokens in a text, and parts of them at its ends.

    Templates put strings side by side, so a token could be completed by its neighbour: at an
    end, two characters or more of a token count as that token. (One is too common to be worth
    the detour, and a token of two strings always has two at one side.)
    """

    def __init__(self, texts: set[str]):
        self.pattern = any_of(texts)
        self._longest = max(map(len, texts), default=0)
        self._heads = {text[i:] for text in texts for i in range(1, len(text) - 1)}
        self._tails = {text[:i] for text in texts for i in range(2, len(text))}
        edges = "".join(sorted({text[0] for text in texts} | {text[-1] for text in texts}))
        self.edge = re.compile(f"[{re.escape(edges)}]" if edges else "(?!)")
        self._last = {text[-1] for text in texts}
        self._first = {text[0] for text in texts}

    def cut(self, text: str) -> tuple[int, int]:
        """How many characters at the text's start and end are the end and start of a token."""
        near = text[: self._longest]
        head = 0
        for char in self._last:
            at = near.find(char)
            while at >= 0:
                if near[: at + 1] in self._heads:
                    head = max(head, at + 1)
                at = near.find(char, at + 1)
        far = text[max(head, len(text) - self._longest) :]
        tail = 0
        for char in self._first:
            at = far.find(char)
            while at >= 0:
                if far[at:] in self._tails:
                    tail = max(tail, len(far) - at)
                at = far.find(char, at + 1)
        return head, tail
