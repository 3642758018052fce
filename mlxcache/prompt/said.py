"""What a reply says, however it is written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlxcache.prompt.canonical.argument_order import alike
from mlxcache.types import Piece, Text, Thinking, ToolCall

Tools = Sequence[Mapping[str, Any]]


class Read(Protocol):
    """Reads a reply's ids; see `model.output.reader`."""

    def __call__(
        self,
        ids: Sequence[int],
        *,
        tools: Tools,
        thinking_open: bool,
        generic_tools: bool,
    ) -> Sequence[Piece]: ...


@dataclass(frozen=True, slots=True)
class Said:
    """Text and thinking without white space around them, and each call's name and arguments."""

    text: str
    thinking: str
    calls: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Said:
        """What a reply's pieces say. Raises ValueError where arguments are no JSON."""
        text, thinking, calls = "", "", []
        for piece in pieces:
            if isinstance(piece, Text):
                text += piece.text
            elif isinstance(piece, Thinking):
                thinking += piece.text
            elif isinstance(piece, ToolCall):
                calls.append((piece.name, json.loads(piece.arguments)))
        return cls(text.strip(), thinking.strip(), tuple(calls))

    @classmethod
    def in_message(cls, message: Mapping[str, Any]) -> Said | None:
        """What a message of the assistant's says; None where it is not only text and calls."""
        content, thinking = message.get("content") or "", message.get("reasoning_content") or ""
        if not isinstance(content, str) or not isinstance(thinking, str):
            return None
        functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
        calls = tuple((str(one.get("name")), one.get("arguments")) for one in functions)
        return cls(content.strip(), thinking.strip(), calls)

    def same(self, other: Said) -> bool:
        """Whether both say the same: key order and `1` for `1.0` do not count, all else does."""
        return self.thinking == other.thinking and self.same_but_thinking(other)

    def same_but_thinking(self, other: Said) -> bool:
        """Whether both have the same text and calls."""
        return (
            self.text == other.text
            and len(self.calls) == len(other.calls)
            and all(
                mine[0] == theirs[0] and alike(mine[1], theirs[1])
                for mine, theirs in zip(self.calls, other.calls, strict=True)
            )
        )

    @property
    def strings(self) -> tuple[str, ...]:
        """All of it as texts."""
        calls = (json.dumps(call, ensure_ascii=False) for call in self.calls)
        return (self.text, self.thinking, *calls)
