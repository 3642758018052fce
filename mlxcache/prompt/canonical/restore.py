"""Conversion of names in a reply back to the client's, for the rule `uuid`.

A name is a stable UUID that replaced one of the client's before the model saw it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from mlxcache.types import Event, Finished, Text, Thinking, ToolCall


class NameRestorer:
    """Replaces names, such as stable UUIDs, in a text that arrives in pieces.

    `names` maps each name to its replacement. Only characters at the end of a piece that may begin
    a name are held back until the next piece. Names must not overlap: none may end with the
    beginning of a name.
    """

    def __init__(self, names: Mapping[str, str]):
        self._names = names
        self._pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._starts = {name[:n] for name in names for n in range(1, len(name))}
        self._longest = max(map(len, self._starts), default=0)
        self._held = ""

    def feed(self, text: str) -> str:
        """Add the next piece; return the text that can be sent now, with names replaced.

        Characters at the end that may begin a name are held back until the next call.
        """
        text = self._held + text
        keep = len(text)
        for n in range(1, min(self._longest, len(text)) + 1):
            if text[-n:] in self._starts:
                keep = len(text) - n
        self._held = text[keep:]
        return self.map_text(text[:keep])

    def flush(self) -> str:
        """Return and clear the characters that were held back because they may begin a name."""
        held, self._held = self._held, ""
        return held

    def map_text(self, text: str) -> str:
        """Replace the names in a complete text."""
        return self._pattern.sub(lambda match: self._names[match.group()], text)


class ReplyRestorer:
    """Replaces names, such as stable UUIDs, in the events of one reply.

    `names` maps each name to its replacement. `on_call` is called with each call as the model wrote
    it.
    """

    def __init__(self, names: Mapping[str, str], on_call: Callable[[ToolCall], None] | None = None):
        self._restored = NameRestorer(names) if names else None
        self._on_call = on_call
        self._kind: type[Text | Thinking] = Text

    def events(self, event: Event) -> Iterator[Event]:
        """Yield the events to send to the client for one event of the model."""
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
            event = replace(event, arguments=self._restored.map_text(event.arguments))
        yield event

    def flush(self) -> Iterator[Event]:
        """Yield an event with the text that was held back at the end of the reply, if any.

        It was held back because a name to replace could begin with it, such as a stable UUID.
        """
        held = self._restored.flush() if self._restored is not None else ""
        if held:
            yield self._kind(held)
