"""Rule `uuid`: replace session UUIDs in paths of the system prompt by stable ones.

The path is that of a temporary folder, or of a session's folder of Copilot CLI.

Two sessions of one project then begin with the same tokens. The model reads and writes the stable
UUIDs, the client its own; `restore` converts the reply.

The mapping is exact for whole UUIDs: a stable UUID never occurs in the conversation as sent, and no
two can overlap in a text. A part of a UUID that the model writes, or another form of it (upper
case, without dashes), is not converted.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxcache.prompt.canonical.draft import Draft, Message, map_strings, strings
from mlxcache.types import TEXTS

SEGMENT = re.compile(
    r"(?<=[/\\])[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}(?=[/\\\s\"'`<>(),;:\]]|\.?(?:\s|\Z))"
)
"""A UUID that is a whole segment of a path."""

TEMPORARY = frozenset({"tmp", "temp", "Temp", "T", "scratch", "scratchpad"})
"""Path segments that mark a path as temporary."""

SESSIONS = re.compile(r"[/\\]\.copilot[/\\]session-state[/\\]\Z")
"""End of the path of Copilot CLI's folder that has a folder for each session."""

_PATH_ENDS = re.compile(r"[\s\"'`<>(),;]")
_FAR = 512
"""Characters of a path before and after a UUID that are examined."""
_MOST = 16
"""Most UUIDs that are replaced in one conversation."""
_SHORTEST = 4
"""Fewest characters of a UUID at the end of a reply that count as its beginning."""


def apply(draft: Draft, stop: Sequence[str] = ()) -> bool:
    """Replace the UUIDs of a session's folders by stable ones, which are the same in all sessions.

    The UUIDs are those in temporary paths, and in paths of Copilot CLI's sessions, in the system
    messages before the first reply. They are replaced in the tools and in all messages except those
    of users. The client's UUIDs are added to `draft.names`, each under its replacement. Nothing is
    replaced if one of the stop strings `stop` could match part of a UUID, or if a reply to be
    continued ends inside one. Returns whether anything was replaced.
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
    draft.tools = tuple(_mapped_tool(tool, forward) for tool in draft.tools)
    draft.names |= {stable: real for real, stable in names.items()}
    return True


def _session_uuids(draft: Draft) -> list[str]:
    """Return the UUIDs of a session's folders in the system messages before the first reply.

    They are segments of temporary paths, or names of session folders of Copilot CLI. At most 16 are
    returned, in order of appearance, each once.
    """
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
    """Return the first `count` UUIDs of a fixed sequence that the conversation does not contain."""
    texts = [*strings(draft.messages), *strings(draft.tools)]
    found: list[str] = []
    attempt = 0
    while len(found) < count:
        candidate = _candidate(attempt)
        attempt += 1
        if not any(candidate in text for text in texts):
            found.append(candidate)
    return found


def _candidate(number: int) -> str:
    """Return the UUID with index `number` of a fixed sequence of stable UUIDs.

    Its only `d` is at its start, so that no two UUIDs of the sequence can overlap in a text.
    """
    digits = hashlib.blake2b(f"stable {number}".encode(), digest_size=16).hexdigest()
    digits = digits.replace("d", "e")
    return f"d{digits[1:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def _meets(stop: Sequence[str], uuids: Sequence[str]) -> bool:
    """Return whether a stop string could match characters of one of `uuids` within any text."""
    return any(
        text in uuid
        or uuid in text
        or any(text.startswith(uuid[-n:]) or text.endswith(uuid[:n]) for n in range(1, len(uuid)))
        for text in stop
        for uuid in uuids
    )


def _cut_short(draft: Draft, own: Sequence[str]) -> bool:
    """Return whether the request continues a reply that ends inside one of the UUIDs `own`.

    False if fewer than 4 characters of the UUID are at the end of the reply.
    """
    if not draft.continues:
        return False
    text = draft.text(len(draft.messages) - 1)
    return any(text.endswith(uuid[:n]) for uuid in own for n in range(_SHORTEST, len(uuid)))


def _mapped(message: Message, forward: Callable[[str], str]) -> Message:
    """Return a message with `forward` applied to its text, reasoning and calls' arguments."""
    mapped = dict(message)
    for key in ("content", TEXTS, "reasoning_content"):
        if key in mapped:
            mapped[key] = map_strings(mapped[key], forward)
    if mapped.get("tool_calls"):
        mapped["tool_calls"] = [_mapped_call(call, forward) for call in mapped["tool_calls"]]
    return mapped


def _mapped_call(call: Mapping[str, Any], forward: Callable[[str], str]) -> Mapping[str, Any]:
    function = call.get("function")
    if not function or "arguments" not in function:
        return call
    arguments = map_strings(function["arguments"], forward)
    return {**call, "function": {**function, "arguments": arguments}}


def _mapped_tool(tool: Mapping[str, Any], forward: Callable[[str], str]) -> Mapping[str, Any]:
    """Return a tool with `forward` applied to all texts except its name, which calls refer to."""
    function = {
        key: value if key == "name" else map_strings(value, forward)
        for key, value in (tool.get("function") or {}).items()
    }
    return {**tool, "function": function}
