"""Parts of a rendered text that have ids of their own."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from mlxcache.types import Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Splice:
    """The characters `start` to `end` of a text are `ids`, shape (n,), in place of `shown`.

    `closing` is the text of the control token that the ids end with; empty where it is none.
    """

    start: int
    end: int
    shown: str
    ids: Tokens
    closing: str

    def holds(self, char: int) -> bool:
        """Whether a character is inside, its first one excepted."""
        return self.start < char < self.end

    def same(self, other: Splice) -> bool:
        """Whether both put the same ids in the same place."""
        return self.ids is other.ids and (self.start, self.end) == (other.start, other.end)


def parted(a: Sequence[Splice], b: Sequence[Splice]) -> int:
    """The character at which the first splice that only one has starts; at the end of all texts if
    they are equal."""
    for mine, theirs in zip(a, b, strict=False):
        if not mine.same(theirs):
            return min(mine.start, theirs.start)
    rest = a[len(b) :] or b[len(a) :]
    return rest[0].start if rest else sys.maxsize


def plain(text: str, splices: Sequence[Splice]) -> str:
    """A text as it was rendered, without its splices."""
    if not splices:
        return text
    parts, at = [], 0
    for splice in splices:
        parts += [text[at : splice.start], splice.shown]
        at = splice.end
    return "".join((*parts, text[at:]))


def place(char: int, splices: Sequence[Splice]) -> int:
    """Where a character of the rendered text stands among the splices; in one, its start."""
    moved = 0
    for splice in splices:
        start = splice.start - moved
        if char <= start:
            break
        if char < start + len(splice.shown):
            return splice.start
        moved += splice.end - splice.start - len(splice.shown)
    return char + moved
