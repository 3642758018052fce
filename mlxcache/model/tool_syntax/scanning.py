"""Scanning of a tool block while it arrives, for syntaxes whose values are not escaped."""

from __future__ import annotations

from collections.abc import Callable

from mlxcache.model.tool_syntax.json_calls import JsonScanner
from mlxcache.model.tool_syntax.syntax import Closing

TAIL = 1_000
"""Characters at the end of a tool block that are examined at a closing marker."""


def begins_as_json(text: str) -> bool:
    """Return whether a tool block begins like JSON, which some models write instead of tags."""
    return text.lstrip().startswith(("{", "["))


class BlockScanner:
    """Scanner of one tool block that judges closing markers by the block's beginning and end.

    `begins(text)` returns whether a block begins with a call that has parameters, and `ends(tail)`
    whether a block that ends with `tail` may be complete. A block for which `as_json(text)` is true
    is scanned as JSON. The beginning is examined at closing markers, until it is a call with
    parameters or JSON.
    """

    def __init__(
        self,
        begins: Callable[[str], bool],
        ends: Callable[[str], bool],
        as_json: Callable[[str], bool] = begins_as_json,
    ):
        self._begins, self._ends, self._as_json = begins, ends, as_json
        self._parts: list[str] = []
        self._tail = ""
        self._json: JsonScanner | None = None
        self._begun = False

    def add(self, text: str) -> None:
        """Scan `text`, which continues the tool block."""
        self._tail = (self._tail + text)[-TAIL:]
        if self._json is not None:
            self._json.add(text)
        elif not self._begun:
            self._parts.append(text)

    def closing(self) -> Closing:
        """Return the `Closing`: the role that a closing marker would have if it came next."""
        if not self._begun and not self._begin("".join(self._parts)):
            return Closing.FINAL
        if self._json is not None:
            return self._json.closing()
        return Closing.MAYBE if self._ends(self._tail) else Closing.INSIDE

    def _begin(self, text: str) -> bool:
        """Examine the beginning of the tool block; return whether the block has values.

        Returns False if it is no call, or a call without parameters. A block in JSON counts as one
        with values.
        """
        if self._as_json(text):
            self._json = JsonScanner()
            self._json.add(text)
        elif not self._begins(text):
            return False
        self._begun = True
        self._parts.clear()
        return True
