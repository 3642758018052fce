"""A conversation on its way through the rules."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcache.types import Chat, Image

Message = Mapping[str, Any]

SYSTEM = ("system", "developer")


class Draft:
    """A chat's messages and tools, which rules replace, drop and add to.

    The chat itself and its messages are never written to. `hits` are the rules that changed
    something, `names` what the client is to read in place of what the model writes.
    """

    def __init__(self, chat: Chat):
        self._chat = chat
        self._origins = list(range(len(chat.messages)))
        self.messages: list[Message] = list(chat.messages)
        self.tools: Sequence[Mapping[str, Any]] = chat.tools
        self.continues = chat.continue_final
        self.hits: set[str] = set()
        self.names: dict[str, str] = {}

    def text(self, at: int) -> str:
        """A message's content where that is a text; else nothing."""
        content = self.messages[at].get("content")
        return content if isinstance(content, str) else ""

    def role(self, at: int) -> str:
        """A message's role."""
        return str(self.messages[at].get("role"))

    def leading(self) -> int:
        """The number of system messages before all others."""
        roles = (self.role(i) not in SYSTEM for i in range(len(self.messages)))
        return next((i for i, other in enumerate(roles) if other), len(self.messages))

    def head(self) -> list[int]:
        """The system messages before the first reply, ascending."""
        end = next(
            (i for i in range(len(self.messages)) if self.role(i) == "assistant"),
            len(self.messages),
        )
        return [i for i in range(end) if self.role(i) in SYSTEM]

    def rewrite(self, at: int, text: str) -> None:
        """Give a message another text. One that is left without any goes."""
        if text:
            self.messages[at] = {**self.messages[at], "content": text}
        else:
            del self.messages[at], self._origins[at]

    def insert(self, at: int, text: str) -> None:
        """Put a system message before the message `at`, or behind all."""
        self.messages.insert(at, {"role": "system", "content": text})
        self._origins.insert(at, self._origins[at - 1] if at else -1)

    def move(self, at: int, to: int) -> None:
        """Put a message before an earlier one; the breakpoint counts what is before it by place."""
        self.messages.insert(to, self.messages.pop(at))

    def end(self) -> int:
        """Where a message at the end goes: before a reply that is to be continued."""
        return len(self.messages) - self.continues

    def chat(self) -> Chat:
        """The chat as it is now, its breakpoint behind the same messages as before."""
        marked = self._chat.breakpoint
        if marked is not None:
            marked = sum(origin < marked for origin in self._origins) if marked else 0
        return replace(
            self._chat, messages=tuple(self.messages), tools=self.tools, breakpoint=marked
        )


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with every string in it changed, keys too; images stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def strings(value: Any) -> Iterator[str]:
    """Every string in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield str(key)
            yield from strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from strings(item)


class History:
    """The digest of the messages so far. `seed` tells one use of it from another."""

    def __init__(self, seed: str):
        self._hash = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=16)

    @property
    def digest(self) -> bytes:
        """Of all that was added, 16 bytes."""
        return self._hash.digest()

    def add(self, message: Message) -> None:
        """Add a message: roles, texts, calls, images."""
        self._hash.update(_ENCODER.encode(message).encode())


def _plain(value: Any) -> Any:
    return value.digest.hex() if isinstance(value, Image) else repr(value)


_ENCODER = json.JSONEncoder(default=_plain)
