"""A conversation that canonicalisation rules rewrite, and digests of its leading messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcache.types import TEXTS, Chat, Image

Message = Mapping[str, Any]

SYSTEM = ("system", "developer")


class Draft:
    """Copies of a conversation's lists of messages and tools, which the rules change.

    `given`: the conversation without the keys `TEXTS` of users' messages, which only `parts` reads.
    `hits`: names of the rules that changed something. `names`: see `Canonical`.
    """

    def __init__(self, chat: Chat):
        self._parts: dict[int, Sequence[str]] = {
            at: one[TEXTS]
            for at, one in enumerate(chat.messages)
            if TEXTS in one and one.get("role") == "user"
        }
        if self._parts:
            messages = list(chat.messages)
            for at in self._parts:
                messages[at] = {k: value for k, value in messages[at].items() if k != TEXTS}
            chat = replace(chat, messages=messages)
        self.given = chat
        self._origins = list(range(len(chat.messages)))
        self.messages: list[Message] = list(chat.messages)
        self.tools: Sequence[Mapping[str, Any]] = chat.tools
        self.continues = chat.continue_final
        self.hits: set[str] = set()
        self.names: dict[str, str] = {}

    def text(self, at: int) -> str:
        """Return the content of message `at` if it is a string, else an empty string."""
        content = self.messages[at].get("content")
        return content if isinstance(content, str) else ""

    def parts(self, at: int) -> Sequence[str]:
        """Return the parts in which a client sent the text of a user's message."""
        return self._parts.get(self._origins[at], (self.text(at),))

    def role(self, at: int) -> str:
        return str(self.messages[at].get("role"))

    def leading(self) -> int:
        roles = (self.role(i) not in SYSTEM for i in range(len(self.messages)))
        return next((i for i, other in enumerate(roles) if other), len(self.messages))

    def head(self) -> list[int]:
        roles = [self.role(i) for i in range(len(self.messages))]
        end = roles.index("assistant") if "assistant" in roles else len(roles)
        return [i for i in range(end) if roles[i] in SYSTEM]

    def rewrite(self, at: int, text: str) -> None:
        """Replace the text of message `at`; an empty text removes the message."""
        if text:
            self.messages[at] = {**self.messages[at], "content": text}
        else:
            del self.messages[at], self._origins[at]

    def insert(self, at: int, text: str) -> None:
        self.messages.insert(at, {"role": "system", "content": text})
        self._origins.insert(at, self._origins[at - 1] if at else -1)

    def move(self, at: int, to: int) -> None:
        self.messages.insert(to, self.messages.pop(at))
        self._origins.insert(to, self._origins.pop(at))

    def end(self) -> int:
        """Return the index of a new last message, which is before a reply to be continued."""
        return len(self.messages) - self.continues

    def chat(self) -> Chat:
        """Return the rewritten chat.

        Its cache breakpoint is after the last of those messages that were before it, and after a
        message that a rule inserted directly after that one.
        """
        marked = self.given.breakpoint
        if marked:
            before = [i for i, origin in enumerate(self._origins) if origin < marked]
            marked = before[-1] + 1 if before else 0
        return replace(
            self.given, messages=tuple(self.messages), tools=self.tools, breakpoint=marked
        )


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def strings(value: Any, *, keys: bool = True) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if keys:
                yield str(key)
            yield from strings(item, keys=keys)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item, keys=keys)


class History:
    """A running digest of a conversation's messages; other seeds give other digests."""

    def __init__(self, seed: str):
        self._hash = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=16)

    @property
    def digest(self) -> bytes:
        return self._hash.digest()

    def add(self, message: Message) -> bytes:
        """Add a message; return the bytes that were added, for `add_bytes` of another history."""
        encoded = _ENCODER.encode(message).encode()
        self._hash.update(encoded)
        return encoded

    def add_bytes(self, encoded: bytes) -> None:
        self._hash.update(encoded)


def as_text(value: object) -> str:
    return value.digest.hex() if isinstance(value, Image) else repr(value)


_ENCODER = json.JSONEncoder(default=as_text)
