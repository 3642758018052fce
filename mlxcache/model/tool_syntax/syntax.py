"""Interface of the syntaxes in which model families write tool calls."""

from __future__ import annotations

from enum import Enum, auto
from typing import Any, Protocol

from mlxcache.model.tool_syntax.schema import Tools

Call = dict[str, Any]
"""A call as it was read: `name`, `arguments` (a dict, or JSON text), and `id` if the model gave
one.
"""


class Malformed(ValueError):
    """Error for a text that is no tool call, or that can be read as two different ones."""


class Closing(Enum):
    """Role that a closing marker would have at the end of the text of a tool block so far.

    INSIDE: part of a value. MAYBE: part of a value, or the end of the block. FINAL: the block is
    complete or is no call, whatever follows. UNKNOWN: only reading the whole block can tell.
    """

    INSIDE = auto()
    """The text ends inside a value, so the marker belongs to that value."""
    MAYBE = auto()
    """The text may be complete, or may end inside a value."""
    FINAL = auto()
    """The text is complete, or is no call; more text does not change that."""
    UNKNOWN = auto()
    """Only reading the whole tool block can tell."""


class Scanner(Protocol):
    """Scanner of one tool block while it arrives.

    It tells which closing markers may end the block. Its time is linear in the length of the block,
    independent of the number of markers.
    """

    def add(self, text: str) -> None:
        """Scan `text`, which continues the tool block."""

    def closing(self) -> Closing:
        """Return the `Closing`: the role that a closing marker would have if it came next."""


class Syntax(Protocol):
    """Interface of a syntax in which a model family writes tool calls."""

    def scanner(self) -> Scanner:
        """Make a scanner that finds the end of one tool block while it arrives."""

    def read(self, text: str, tools: Tools) -> list[Call]:
        """Read the calls in a tool block.

        Raises Malformed, which is a ValueError, if the text is no call. The errors of a parser for
        JSON or of mlx-lm, such as ValueError, TypeError or RecursionError, are raised unchanged.
        """
