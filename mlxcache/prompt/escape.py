"""Escaping of control tokens in messages, so that only the template's own become control tokens.

Before rendering, the text of a control token inside a message, a tool or an argument is replaced by
a sentinel, a sequence of characters that stands for it. `codec` converts sentinels back to text
when it encodes.
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
    """Replaces the text of control tokens by sentinels, and back. Immutable and thread-safe.

    A sentinel consists of decimal digits between two private-use characters: a nonce of this
    object, so that no text contains one by accident or intent, then the code points of the replaced
    text. It contains no letters, quotes or white space, which a template could change. If a
    template writes JSON in ASCII, the sentinel gets JSON escapes, and so does the text that `split`
    returns for it.

    `controls`: the texts to escape; those in `passing` are not escaped in an assistant's content.
    `normalized`: those of `controls` that the tokenizer matches after its normaliser `normalize`; a
    text that contains one after normalisation is replaced as a whole.
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
        """A sentinel of an empty text, used to find a position in a rendered conversation."""

    def escape_value(self, value: Any) -> Any:
        """Return a copy of a JSON value with every string and key escaped."""
        if isinstance(value, str):
            return self._replace(value, self._all)
        if isinstance(value, dict | Mapping):
            return {self.escape_value(key): self.escape_value(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.escape_value(item) for item in value]
        return value

    def escape_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return an escaped copy of a message; an assistant's content keeps the `passing` texts.

        Those are the texts given to the constructor as `passing`.
        """
        escaped: dict[str, Any] = self.escape_value(message)
        content = message.get("content")
        if message.get("role") == "assistant" and isinstance(content, str):
            escaped["content"] = self._replace(content, self._assistant)
        return escaped

    def has_sentinel(self, rendered: str) -> bool:
        """Return whether a rendered text contains a sentinel."""
        return self._nonce in rendered

    def without_nonce(self, rendered: str) -> str:
        """Return the rendered text with the random nonce replaced by zeros, of the same length.

        The result is the same in all processes.
        """
        return rendered.replace(self._nonce, "0" * len(self._nonce))

    def split(self, rendered: str) -> list[tuple[str, bool]]:
        """Split a rendered text into pieces (text, whether it came from a sentinel), in order."""
        out: list[tuple[str, bool]] = []
        done = 0
        for match in self._sentinel.finditer(rendered):
            digits = match.group(1)
            points = [int(digits[i : i + _DIGITS]) for i in range(0, len(digits), _DIGITS)]
            if max(points) > sys.maxunicode:  # a template cut the sentinel
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

    Templates concatenate strings, so the text next to a string may complete a token. Therefore two
    or more characters of a token at an end count as the token. One character would be too common,
    and if two strings form a token of three or more characters, one of them has at least two of
    these.
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
        """Return how many characters at a text's start and end may belong to a control token.

        At the start these are the last two or more characters of a token, which text before this
        one may complete; at the end they are a token's first two or more. 0 where there are none.
        """
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
