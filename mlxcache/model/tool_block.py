"""One tool block of a reply while it arrives, and the positions at which it may end.

A tool block is the text between the markers that open and close tool calls. The marker that closes
it may also occur in an argument, spelled out or as a token. A marker inside a value belongs to that
value. A marker after which the block may be complete is an *end*, but the block waits for the text
that follows: white space and then another call, or the end of the reply, confirm the end. Any other
text may continue the argument. If several ends leave a block that can be read, the last of them
counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

from mlxcache.model.tool_syntax.syntax import Closing, Scanner
from mlxcache.types import ToolCall

LOOK_ON = 8_000
"""Characters after a complete call, about 2,000 tokens, that are searched for another end."""

_MOST_TRIED = 8  # ends of a block at which it is read, so that a long block takes linear time
_SHOWN = 64  # characters that tell if a marker follows


class Follow(Enum):
    """Kind of text that follows the last possible end of a tool block.

    NOTHING yet, a MARKER that confirms the end, or other TEXT, which may continue an argument.
    """

    NOTHING = auto()
    """Nothing yet, or the possible beginning of a marker."""
    MARKER = auto()
    """The marker of another call, or of thinking."""
    TEXT = auto()
    """Text that may continue an argument."""


@dataclass(frozen=True, slots=True)
class End:
    """A closing marker in a tool block, after which the block may be complete.

    It is at characters [body, after) of the block's text. `target`: the parser's state after it.
    `clean` is False if it may close an opening marker inside the block instead of the block: an
    opening marker before it has no other closing marker.
    """

    body: int
    after: int
    target: str
    clean: bool


Read = Callable[[str], list[ToolCall]]
"""Reader of the calls in a text; it returns an empty list if the text is not a block of calls."""


class ToolBlock:
    """A tool block that began while the parser was in the state `source`.

    `scanner`: tells which closing markers may end the block. `opening`: the marker that opened the
    block, as the model wrote it, with the message header before it if the format has one. `marker`:
    the marker that opens tool blocks in general, which is looked for inside the block; "" if there
    is none. `confirming`: markers that confirm a possible end if they follow it. `head`: `opening`
    if the syntax reads it as part of the block, otherwise empty.
    """

    def __init__(
        self,
        scanner: Scanner,
        *,
        opening: str,
        source: str,
        marker: str,
        confirming: Sequence[str],
        head: str = "",
    ):
        self.opening, self.source = opening, source
        self._scanner, self._head = scanner, head
        self._marker, self._confirming = marker, tuple(confirming)
        self._parts: list[str] = []
        self._size = 0
        self._run: list[str] = []
        self._depth = 0
        self._ends: list[End] = []
        self._first: int | None = None
        self._next, self._beyond, self._judged = "", 0, False
        scanner.add(head)

    @property
    def text(self) -> str:
        """Text of the tool block so far, without the marker that opened it."""
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    def add(self, text: str) -> None:
        """Append text to the tool block."""
        self._scanner.add(text)
        self._parts.append(text)
        self._run.append(text)
        self._size += len(text)
        if self._ends:
            self._beyond += len(text)
            if len(self._next) < _SHOWN:
                self._next = (self._next + text).lstrip()[:_SHOWN]

    def closing(self) -> Closing:
        """Return the `Closing`: the role that a closing marker would have if it came next."""
        return self._scanner.closing()

    def close(self, marker: str, target: str, verdict: Closing) -> None:
        """Append a closing marker to the tool block, as one of its possible ends.

        `verdict`: the role of the marker, as `closing` returns it. With INSIDE, the marker is
        appended as a part of a value, and not as an end. `target`: the parser's state after the
        marker.
        """
        clean = self._count_markers()
        body = self._size
        self.add(marker)
        self._run.clear()
        self._first = self._size if self._first is None else self._first
        if verdict is not Closing.INSIDE:
            self._ends.append(End(body, self._size, target, clean))
            self._next, self._beyond, self._judged = "", 0, False

    def _count_markers(self) -> bool:
        """Pair the closing marker that comes next with an unclosed opening marker inside the block.

        Returns True if no opening marker inside the block is unclosed, so that the closing marker
        closes the block itself. Arguments can have both markers, such as text about tool calls.
        """
        self._depth += "".join(self._run).count(self._marker) if self._marker else 0
        if not self._depth:
            return True
        self._depth -= 1
        return False

    def follow(self) -> Follow:
        """Return the kind of text that follows the last possible end of the tool block."""
        if any(self._next.startswith(marker) for marker in self._confirming):
            return Follow.MARKER
        if any(marker.startswith(self._next) for marker in ("", *self._confirming)):
            return Follow.NOTHING
        return Follow.TEXT

    def confirmed(self, read: Read) -> tuple[End, list[ToolCall]] | None:
        """Return the end of the tool block once later text confirms it, with the calls before it.

        A marker of another call or of thinking confirms the last possible end, if nothing but white
        space is between them. If more than `LOOK_ON` (8,000) characters of other text follow the
        last possible end, the result is that of `best`; if `best` finds none, all ends so far are
        discarded. Returns None if no end is confirmed, or if no calls can be read before it. `read`
        returns the calls in a text, and is called with the block's text before an end.
        """
        if not self._ends or self._judged:
            return None
        follow = self.follow()
        if follow is Follow.MARKER:
            self._judged = True
            last = self._ends[-1]
            if last.clean and len(self._ends) <= _MOST_TRIED and (calls := self._read(last, read)):
                return last, calls
        elif follow is Follow.TEXT and self._beyond > LOOK_ON:
            if found := self.best(read):
                return found
            self._ends.clear()
        return None

    def finished(
        self, read: Read, target: str, *, complete: bool
    ) -> tuple[End, list[ToolCall]] | None:
        """Choose the end of the tool block that is open when the reply ends.

        Returns the end with the calls before it, or None if no calls can be read. `read` returns
        the calls in a text, and is called with the block's text before an end. `complete`: the
        block may also end where the reply does, without a closing marker; `target` is the parser's
        state then. Otherwise calls are read only if nothing, white space or a confirming marker
        (see `ToolBlock`) follows the last possible end: other text may belong to an argument that
        was cut off.
        """
        ended = bool(self._ends) and self.follow() is not Follow.TEXT
        if not complete:
            return self.best(read) if ended else None
        if not ended and (self._first is None or self.closing() is not Closing.INSIDE):
            self.close("", target, Closing.MAYBE)
        return self.best(read)

    def best(self, read: Read) -> tuple[End, list[ToolCall]] | None:
        """Return the last end at which the tool block can be read, with the calls before it.

        An end can be read if `read` finds calls in the text of the block before it. The newest 8
        clean ends (see `End`) are tried first, the last one first. If none of them can be read:

        - If the block's first closing marker is an end, only that end is tried.
        - Otherwise the newest 8 of all ends are tried, the last one first. One of them counts only
          if the text after the last opening marker before it is not a call of its own.

        Returns None if no end can be read.
        """
        clean = [end for end in self._ends if end.clean][-_MOST_TRIED:]
        for end in reversed(clean):
            if calls := self._read(end, read):
                return end, calls
        if self._ends and self._ends[0].after == self._first:
            calls = self._read(self._ends[0], read)
            return (self._ends[0], calls) if calls else None
        for end in reversed(self._ends[-_MOST_TRIED:]):
            opened = self.text.rfind(self._marker, 0, end.body) + len(self._marker)
            if not read(self.text[opened : end.body]) and (calls := self._read(end, read)):
                return end, calls
        return None

    def _read(self, end: End, read: Read) -> list[ToolCall]:
        return read(self._head + self.text[: end.body])

    def whole(self, read: Read) -> list[ToolCall]:
        """Return the calls that `read` finds in all text of the tool block so far."""
        return read(self._head + self.text)

    def split(self, after: int | None) -> tuple[str, str]:
        """Return the tool block's text before position `after`, and the text from there on.

        The first of the two begins with the text that opened the block, which `after` does not
        count. `after` None stands for the end of the text.
        """
        after = self._size if after is None else after
        return self.opening + self.text[:after], self.text[after:]

    @property
    def first(self) -> int | None:
        """Length of the tool block's text up to the end of the first closing marker in it.

        In characters. None if the block has no closing marker so far. A closing marker inside an
        argument counts too, so the block may be longer.
        """
        return self._first
