"""Results of tools that a client cleared from its history: rendered as they were.

Clients clear old results to save a hosted service's tokens. Here the old result is computed
already, and everything behind it would have to be computed again without it.
"""

from __future__ import annotations

from collections.abc import Hashable

from mlxcache.lru import LRU
from mlxcache.prompt.canonical.draft import Draft, History

CLEARED = "[Old tool result content cleared]"
"""What stands for a cleared result; the whole of it."""

LEAST = 200
"""Characters of a result that is worth remembering."""

Results = LRU[Hashable, str]


def apply(draft: Draft, results: Results) -> bool:
    """Put back the results that stood in the same place of the same conversation."""
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
