"""The interface of a syntax of tool calls."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Protocol

from mlxcache.model.tool_syntax.schema import Tools

Call = dict[str, Any]
"""A call as read: `name`, `arguments` (a dict, or JSON text), and `id` where the model gave one."""


class Malformed(ValueError):
    """The text is no call, or has two readings."""


class Closing(Enum):
    """The role of a closing marker, as far as the text before it tells."""

    INSIDE = auto()
    """The text ends within a value: the marker is part of it."""
    MAYBE = auto()
    """The text may be complete, and may as well end within a value."""
    FINAL = auto()
    """The text is complete, or is no call: more text changes nothing."""
    UNKNOWN = auto()
    """Only reading the block tells."""


class Scanner(Protocol):
    """Reads one block as it arrives. Linear in the block's length, whatever its markers."""

    def add(self, text: str) -> None:
        """Add text to the block."""

    def closing(self) -> Closing:
        """Judge a closing marker that follows the text added so far."""


class Syntax(Protocol):
    """A syntax of tool calls."""

    def scanner(self) -> Scanner:
        """Make the scanner of one block."""

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a block. Raises Malformed, or ValueError and the like for bad JSON."""
