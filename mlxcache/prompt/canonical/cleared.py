"""Rule `cleared_results`: restore tool results that a client cleared from its history.

Clients clear old results to send fewer tokens to a hosted service. Here the KV of the result is
cached, and without the result everything after it would have to be computed again.
"""

from __future__ import annotations

from collections.abc import Hashable

from mlxcache.lru import LRU
from mlxcache.prompt.canonical.draft import Draft, History

CLEARED = "[Old tool result content cleared]"
"""Text that a client puts in place of a result that it cleared."""

LEAST = 200
"""Fewest characters of a result that is remembered."""

Results = LRU[Hashable, str]
"""Tool results, by a digest of the messages before each and the id of its call."""


def apply(draft: Draft, results: Results) -> bool:
    """Restore tool results that a client cleared, if an earlier request had them at the same place.

    The place is the same if the messages before the result and the id of its tool call are equal.
    `results` maps a digest of these messages and the id to the result. Results in `draft` that are
    not cleared and have at least 200 characters are added to `results`. Returns whether any result
    was restored.
    """
    if not any(message.get("role") == "tool" for message in draft.messages):
        return False
    history = History("results")
    found = False
    for at, message in enumerate(draft.messages):
        if message.get("role") == "tool":
            text = draft.text(at)
            key = (history.digest, message.get("tool_call_id"))
            if text == CLEARED:
                known = results.get(key)
                if known is not None:
                    draft.rewrite(at, known)
                    found = True
            elif len(text) >= LEAST:
                results.put(key, text)
        history.add(draft.messages[at])
    return found
