"""Rule `thinking`: restore the thinking that a client left out of the replies it sends back.

Many clients send back text and calls alone. A template that keeps thinking, as most do up to the
next user message, would then render a reply that differs from the computed one. Where a template
drops thinking, it also drops what is restored here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mlxcache.prompt.canonical.draft import Draft, History

Tools = Sequence[Mapping[str, Any]]
Thought = Callable[[bytes, Mapping[str, Any], Tools], str]
"""Looks up the thinking of a reply by the digest of the messages before it, a message with the same
text and calls, and the tools. Empty where there is none."""


def apply(draft: Draft, thought: Thought) -> bytes:
    """Restore thinking after the same messages; returns the digest of all messages."""
    history = History("replies")
    for at, message in enumerate(draft.messages):
        if message.get("role") == "assistant" and not message.get("reasoning_content"):
            found = thought(history.digest, message, draft.tools)
            if found:
                draft.messages[at] = {**message, "reasoning_content": found}
                draft.hits.add("thinking")
        history.add(draft.messages[at])
    return history.digest
