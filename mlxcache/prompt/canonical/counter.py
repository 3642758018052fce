"""Rules `counter` and `newest_counter`: remove Claude Code's counters of remaining tokens."""

from __future__ import annotations

import re

from mlxcache.prompt.canonical.draft import SYSTEM, Draft

COUNTER = re.compile(r"<total_tokens>[0-9][0-9,]{0,30} tokens left</total_tokens>")
"""Pattern of a counter, for example `<total_tokens>199000 tokens left</total_tokens>`."""


def apply(draft: Draft, *, keep: bool = False) -> bool:
    """Remove Claude Code's counters of remaining tokens from system messages.

    `keep`: append the newest counter as a system message at the end of the conversation, after
    everything that the next request has in common with this one. Returns whether there were any.
    """
    newest = ""
    leading = draft.leading()
    for at in reversed(range(len(draft.messages))):
        if draft.role(at) not in SYSTEM:
            continue
        text, counters = (split if at < leading else without)(draft.text(at))
        if counters:
            newest = newest or counters[-1]
            draft.rewrite(at, text)
    if newest and keep:
        draft.insert(draft.end(), newest)
    return bool(newest)


def without(text: str) -> tuple[str, list[str]]:
    """Remove counters of remaining tokens from a system message between turns.

    Removes every paragraph that is a counter, and counters in the last lines. Unlike a system
    prompt, such a message is written by the client alone, so none of it is a user's text. Returns
    the remaining text and the counters.
    """
    paragraphs = text.split("\n\n")
    counters = [part.strip() for part in paragraphs if COUNTER.fullmatch(part.strip())]
    if counters:
        kept = [part for part in paragraphs if not COUNTER.fullmatch(part.strip())]
        text = "\n\n".join(kept)
    text, trailing = split(text)
    return text, counters + trailing


def split(text: str) -> tuple[str, list[str]]:
    """Remove counters of remaining tokens from the start and end of a system prompt.

    A counter at the start must be a whole paragraph, one at the end a line of its own. Elsewhere a
    counter could be a user's text, so it stays. Returns the remaining text and the counters.
    """
    leading: list[str] = []
    first, blank, rest = text.partition("\n\n")
    while blank and COUNTER.fullmatch(first.strip()):
        text = rest.lstrip("\n")
        leading.append(first.strip())
        first, blank, rest = text.partition("\n\n")
    trailing: list[str] = []
    while True:
        before, _, line = text.rstrip().rpartition("\n")
        if not COUNTER.fullmatch(line.strip()):
            return text, leading + trailing[::-1]
        text = before.rstrip()
        trailing.append(line.strip())
