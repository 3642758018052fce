"""A conversation while the rules rewrite it, and digests of its beginnings."""

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
    """A chat's messages and tools, which rules replace, remove and insert.

    The chat itself and its messages are never changed. `hits`: the rules that changed something.
    `names`: texts that the model may write, each with the text that the client reads instead.
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
        """A message's content if it is a string, else an empty string."""
        content = self.messages[at].get("content")
        return content if isinstance(content, str) else ""

    def role(self, at: int) -> str:
        """The role of a message."""
        return str(self.messages[at].get("role"))

    def leading(self) -> int:
        """The number of system messages at the start."""
        roles = (self.role(i) not in SYSTEM for i in range(len(self.messages)))
        return next((i for i, other in enumerate(roles) if other), len(self.messages))

    def head(self) -> list[int]:
        """The indices of the system messages before the first reply, ascending."""
        end = next(
            (i for i in range(len(self.messages)) if self.role(i) == "assistant"),
            len(self.messages),
        )
        return [i for i in range(end) if self.role(i) in SYSTEM]

    def rewrite(self, at: int, text: str) -> None:
        """Replace a message's text; an empty text removes the message."""
        if text:
            self.messages[at] = {**self.messages[at], "content": text}
        else:
            del self.messages[at], self._origins[at]

    def insert(self, at: int, text: str) -> None:
        """Insert a system message at an index."""
        self.messages.insert(at, {"role": "system", "content": text})
        self._origins.insert(at, self._origins[at - 1] if at else -1)

    def move(self, at: int, to: int) -> None:
        """Move a message to an earlier index. The breakpoint keeps its position."""
        self.messages.insert(to, self.messages.pop(at))

    def end(self) -> int:
        """Index for a new last message; a reply that the request continues stays after it."""
        return len(self.messages) - self.continues

    def chat(self) -> Chat:
        """Return the rewritten chat; its cache breakpoint still follows the same messages."""
        marked = self._chat.breakpoint
        if marked is not None:
            marked = sum(origin < marked for origin in self._origins) if marked else 0
        return replace(
            self._chat, messages=tuple(self.messages), tools=self.tools, breakpoint=marked
        )


def map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value with `change` applied to every string and key; images stay."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(str(key)): map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_strings(item, change) for item in value]
    return value


def strings(value: Any) -> Iterator[str]:
    """Every string and key in a JSON value."""
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
    """A running digest of messages. `seed` separates different uses."""

    def __init__(self, seed: str):
        self._hash = hashlib.blake2b(seed.encode("utf-8", "surrogatepass"), digest_size=16)

    @property
    def digest(self) -> bytes:
        """The digest of all messages added so far, 16 bytes."""
        return self._hash.digest()

    def add(self, message: Message) -> None:
        """Add a message with its role, texts, calls and images."""
        self._hash.update(_ENCODER.encode(message).encode())


def as_text(value: object) -> str:
    """A value that is not JSON, for `json.dumps`: an image is its digest."""
    return value.digest.hex() if isinstance(value, Image) else repr(value)


_ENCODER = json.JSONEncoder(default=as_text)
