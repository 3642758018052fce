"""Searching a growing text for strings that must not leak, and trimming around blocks."""

from __future__ import annotations

from collections.abc import Iterable


class Finder:
    """Looks for the first of several strings in text that arrives in pieces.

    The string that is completed first wins, and of several completed by the same character the
    longest. So the outcome does not depend on how the text is cut. What might yet become one of
    them is held back, and nothing else.
    """

    def __init__(self, patterns: Iterable[str]):
        self.patterns = tuple(dict.fromkeys(p for p in patterns if p))
        self._starts = frozenset(p[0] for p in self.patterns)
        self._reach = max(map(len, self.patterns), default=1) - 1
        self._held = ""

    def feed(self, text: str) -> tuple[str, str | None, str]:
        """The text now known to be free of all strings; the string found, if any; what follows it.

        After a find nothing is held: feed the rest to whoever goes on.
        """
        text = self._held + text
        found = min(
            ((at + len(p), -len(p), p) for p in self.patterns if (at := text.find(p)) >= 0),
            default=None,
        )
        if found is not None:
            end, less, pattern = found
            self._held = ""
            return text[: end + less], pattern, text[end:]
        cut = self._cut(text)
        self._held = text[cut:]
        return text[:cut], None, ""

    def _cut(self, text: str) -> int:
        """Where the longest tail that begins one of the strings starts."""
        for at in range(max(0, len(text) - self._reach), len(text)):
            if text[at] in self._starts and self._begins(text[at:]):
                return at
        return len(text)

    def _begins(self, tail: str) -> bool:
        return any(p.startswith(tail) for p in self.patterns)

    def flush(self) -> str:
        """What was held back, now that no more text comes."""
        held, self._held = self._held, ""
        return held


class Visible:
    """The reply's text as a reader sees it: cut at a stop string, free of template newlines.

    Templates put newlines between thinking, text and tool calls, and put them back when they
    render the message again. So newlines after a think block, one newline before a tool call,
    and blank text that precedes either are not part of the text.
    """

    def __init__(self, stop: Iterable[str]):
        self._finder = Finder(stop)
        self._held = ""
        self._after_thinking = False
        self._said = False
        self.begun = False
        """There is text other than white space, let out or still held."""
        self.stop: str | None = None
        """The stop string that ended the text."""

    def add(self, text: str) -> str:
        """The text to let out now. Once `stop` is set the text is over."""
        if self._after_thinking:
            text = text.lstrip("\n")
            self._after_thinking = not text
        self.begun = self.begun or bool(text.strip())
        safe, self.stop, _ = self._finder.feed(text)
        text = self._held + safe
        self._held = ""
        if self.stop is None:
            if not self._said and not text.strip():
                self._held, text = text, ""
            elif text.endswith("\n"):
                self._held, text = "\n", text[:-1]
        return self._out(text)

    def before_thinking(self) -> str:
        """The text still held, now that a think block begins; none if it is blank."""
        text = self.flush()
        return text if self._said else ""

    def after_thinking(self) -> None:
        """A think block ended: newlines that follow are the template's."""
        self._after_thinking = True

    def before_call(self) -> str:
        """The text still held, now that a tool call follows."""
        return self.before_thinking().removesuffix("\n")

    def flush(self) -> str:
        """The text still held, now that no more comes."""
        text, self._held = self._held + self._finder.flush(), ""
        return self._out(text)

    def _out(self, text: str) -> str:
        self._said = self._said or bool(text.strip())
        return text


class Thought:
    """One think block's text, without the newline after its opening marker and the one before
    its closing marker, which templates write themselves. All else is kept; a blank block is none.
    """

    def __init__(self) -> None:
        self._held = ""
        self._begun = False

    def add(self, text: str) -> str:
        """The text to let out now."""
        text, self._held = self._held + text, ""
        if not self._begun:
            if not text.strip():
                self._held = text
                return ""
            self._begun = True
            text = text.removeprefix("\n")
        if text.endswith("\n"):
            self._held, text = "\n", text[:-1]
        return text

    def flush(self) -> str:
        """The newline still held, where the block ends without its closing marker."""
        text, self._held = self._held if self._begun else "", ""
        return text
