"""Rule `uuid`: replace session UUIDs in paths of the system prompt by stable ones.

Two sessions of one project then begin with the same tokens. The model reads and writes the stable
UUIDs, the client its own.

The mapping is exact for whole UUIDs: a stable UUID never occurs in the conversation as sent, and no
two can overlap in a text. A part of a UUID that the model writes, or another form of it (upper
case, without dashes), is not converted.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mlxcache.prompt.canonical.draft import Draft, Message, map_strings, strings
from mlxcache.types import TEXTS, Event, Finished, Text, Thinking, ToolCall

SEGMENT = re.compile(
    r"(?<=[/\\])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?=[/\\\s\"'`<>(),;:\]]|\.?(?:\s|\Z))"
)

TEMPORARY = frozenset({"tmp", "temp", "Temp", "T", "scratch", "scratchpad"})

SESSIONS = re.compile(r"[/\\]\.copilot[/\\]session-state[/\\]\Z")
"""End of the path of Copilot CLI's folder that has a folder for each session."""

_PATH_ENDS = re.compile(r"[\s\"'`<>(),;]")
_FAR = 512
_MOST = 16
_SHORTEST = 4  # fewest characters of a UUID at the end of a reply that count as its beginning


def replace_uuids(draft: Draft, stop: Sequence[str] = ()) -> bool:
    """Replace the UUIDs of a session's folders everywhere except in messages of users.

    Nothing is replaced if one of the stop strings `stop` could match part of a UUID, or if a reply
    to be continued ends inside one.
    """
    own = _session_uuids(draft)
    if not own:
        return False
    names = dict(zip(own, _stable(draft, len(own)), strict=True))
    if _meets(stop, [*names, *names.values()]) or _cut_short(draft, own):
        return False
    pattern = re.compile("|".join(own))

    def forward(text: str) -> str:
        return pattern.sub(lambda match: names[match.group()], text)

    for at in range(len(draft.messages)):
        if draft.role(at) != "user":
            draft.messages[at] = _mapped(draft.messages[at], forward)
    draft.tools = tuple(_mapped_function(tool, forward) for tool in draft.tools)
    draft.names |= {stable: real for real, stable in names.items()}
    return True


def _session_uuids(draft: Draft) -> list[str]:
    """Return the UUIDs of temporary or Copilot CLI's folders in the first system messages."""
    found: dict[str, None] = {}
    for at in draft.head():
        text = draft.text(at)
        for match in SEGMENT.finditer(text):
            before = _PATH_ENDS.split(text[max(0, match.start() - _FAR) : match.start()])[-1]
            after = _PATH_ENDS.split(text[match.end() : match.end() + _FAR])[0].rstrip(".")
            segments = re.split(r"[/\\]", before + after)
            is_own = TEMPORARY.intersection(segments) or SESSIONS.search(before)
            if "://" not in before and is_own:
                found[match.group()] = None
    return list(found)[:_MOST]


def _stable(draft: Draft, count: int) -> list[str]:
    texts = (*strings(draft.messages), *strings(draft.tools))
    taken = {match[1] for text in texts for match in _CANDIDATE.finditer(text)}
    free = (one for one in map(_candidate, itertools.count()) if one not in taken)
    return list(itertools.islice(free, count))


_CANDIDATE = re.compile(r"(?=(d[0-9a-f]{7}-[0-9a-f]{4}-4[0-9a-f]{3}-a[0-9a-f]{3}-[0-9a-f]{12}))")


def _candidate(number: int) -> str:
    """Return the stable UUID with index `number`.

    Its only `d` is at its start, so that no two of them can overlap in a text.
    """
    digits = hashlib.blake2b(f"stable {number}".encode(), digest_size=16).hexdigest()
    digits = digits.replace("d", "e")
    return f"d{digits[1:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def _meets(stop: Sequence[str], uuids: Sequence[str]) -> bool:
    return any(
        text in uuid
        or uuid in text
        or any(text.startswith(uuid[-n:]) or text.endswith(uuid[:n]) for n in range(1, len(uuid)))
        for text in stop
        for uuid in uuids
    )


def _cut_short(draft: Draft, own: Sequence[str]) -> bool:
    if not draft.continues:
        return False
    text = draft.text(len(draft.messages) - 1)
    return any(text.endswith(uuid[:n]) for uuid in own for n in range(_SHORTEST, len(uuid)))


def _mapped(message: Message, forward: Callable[[str], str]) -> Message:
    mapped = dict(message)
    for key in ("content", TEXTS, "reasoning_content"):
        if key in mapped:
            mapped[key] = map_strings(mapped[key], forward)
    if mapped.get("tool_calls"):
        mapped["tool_calls"] = [_mapped_function(call, forward) for call in mapped["tool_calls"]]
    return mapped


def _mapped_function(one: Mapping[str, Any], forward: Callable[[str], str]) -> Mapping[str, Any]:
    """Return a tool or a call with `forward` applied to all texts of its function but the name."""
    function = {
        key: value if key == "name" else map_strings(value, forward)
        for key, value in (one.get("function") or {}).items()
    }
    return {**one, "function": function}


# -- replies -----------------------------------------------------------------------------------


class NameRestorer:
    """Replaces names, such as stable UUIDs, in a text that arrives in pieces.

    Only characters at the end of a piece that may begin a name are held back until the next piece.
    Names must not overlap: none may end with the beginning of a name.
    """

    def __init__(self, names: Mapping[str, str]):
        self._names = names
        self._pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")
        self._starts = {name[:n] for name in names for n in range(1, len(name))}
        self._longest = max(map(len, self._starts), default=0)
        self._held = ""

    def feed(self, text: str) -> str:
        text = self._held + text
        keep = len(text)
        for n in range(1, min(self._longest, len(text)) + 1):
            if text[-n:] in self._starts:
                keep = len(text) - n
        self._held = text[keep:]
        return self.map_text(text[:keep])

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held

    def map_text(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._names[match.group()], text)


class ReplyRestorer:
    def __init__(self, names: Mapping[str, str], on_call: Callable[[ToolCall], None] | None = None):
        self._restored = NameRestorer(names) if names else None
        self._on_call = on_call
        self._kind: type[Text | Thinking] = Text

    def events(self, event: Event) -> Iterator[Event]:
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
        held = self._restored.flush() if self._restored is not None else ""
        if held:
            yield self._kind(held)
