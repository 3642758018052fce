"""Thinking that a client left out of the replies that it sends back: put in again.

Many clients send back text and calls alone. A template that keeps thinking, as most do up to the
next message of a person, would then render another reply than the one that was computed. Where it
does not keep thinking, it leaves out what is put in here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxcache.prompt.canonical.draft import Draft, History

Tools = Sequence[Mapping[str, Any]]
Thought = Callable[[bytes, Mapping[str, Any], Tools], str]
"""What was thought in a reply, by the digest of the messages before it: the one whose text and
calls are those of a message; empty if there is none."""


def apply(draft: Draft, thought: Thought) -> bytes:
    """Put thinking back behind the very same messages; returns the digest of all messages."""
    history = History("replies")
    for at, message in enumerate(draft.messages):
        if message.get("role") == "assistant" and not message.get("reasoning_content"):
            found = thought(history.digest, message, draft.tools)
            if found:
                draft.messages[at] = {**message, "reasoning_content": found}
                draft.hits.add("thinking")
        history.add(draft.messages[at])
    return history.digest
