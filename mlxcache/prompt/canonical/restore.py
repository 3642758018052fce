"""From what the model writes to what the client reads: its own UUIDs for the stable ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from mlxcache.types import Event, Finished, Text, Thinking, ToolCall


class NameRestorer:
    """Maps a text that arrives in pieces; at most the start of a name is held back.

    `names` are what to look for and what to put in its place. No name may begin with the end of
    one, itself included.
    """

    def __init__(self, names: Mapping[str, str]):
        self._names = names
        self._pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._starts = {name[:n] for name in names for n in range(1, len(name))}
        self._longest = max(map(len, self._starts), default=0)
        self._held = ""

    def feed(self, text: str) -> str:
        """The next piece, mapped, as far as no name may have begun in it."""
        text = self._held + text
        keep = len(text)
        for n in range(1, min(self._longest, len(text)) + 1):
            if text[-n:] in self._starts:
                keep = len(text) - n
        self._held = text[keep:]
        return self.whole(text[:keep])

    def flush(self) -> str:
        """What was held back: no name came of it."""
        held, self._held = self._held, ""
        return held

    def whole(self, text: str) -> str:
        """All of a text, mapped."""
        return self._pattern.sub(lambda match: self._names[match.group()], text)


class Reply:
    """The events of one reply, mapped; `on_call` is given each call as the model wrote it."""

    def __init__(self, names: Mapping[str, str], on_call: Callable[[ToolCall], None] | None = None):
        self._restored = NameRestorer(names) if names else None
        self._on_call = on_call
        self._kind: type[Text | Thinking] = Text

    def events(self, event: Event) -> Iterator[Event]:
        """What the client reads for one event, and what was held back before it."""
        if isinstance(event, ToolCall) and self._on_call is not None:
            self._on_call(event)
        if self._restored is None:
            yield event
            return
        if isinstance(event, Text | Thinking):
            if type(event) is not self._kind:
                yield from self.flush()
            self._kind = type(event)
            text = self._restored.feed(event.text)
            carries = isinstance(event, Text) and event.logprobs
            if text or carries or not event.text:
                yield replace(event, text=text)
            return
        if isinstance(event, ToolCall | Finished):
            yield from self.flush()
        if isinstance(event, ToolCall):
            event = replace(event, arguments=self._restored.whole(event.arguments))
        yield event

    def flush(self) -> Iterator[Event]:
        """What is held back, as an event of its kind."""
        held = self._restored.flush() if self._restored is not None else ""
        if held:
            yield self._kind(held)
