"""Rule `date_reminder`: remove Qwen Code's reminder of a date that its first message already has.

Qwen Code writes the reminder only into the newest message. When a conversation is continued with
`-c`, the older messages no longer have their reminders, so everything after them would be computed
again.
"""

from __future__ import annotations

import re

from mlxcache.prompt.canonical.draft import Draft

_STARTED = re.compile(
    r"<system-reminder>\nThis is the Qwen Code\. We are setting up the context for our chat\.\n"
    r"Today's date is ([^\n]{1,60})\.\n"
)
"""Start of Qwen Code's first message; the group is the date."""

_BLOCK = re.compile(r"<system-reminder>\n.*?\n</system-reminder>\n*", re.S)
"""A reminder, which clients put before the text of the user."""


def reminder(date: str) -> str:
    """Return the `<system-reminder>` by which Qwen Code states that the current date is `date`.

    `date`: as the client writes it. The tags are included.
    """
    return (
        f"<system-reminder>\nThe current date is: {date}. Note: This is the authoritative current "
        'date — it may differ from the "Today\'s date" mentioned earlier in the conversation '
        "startup context.\n</system-reminder>"
    )


def apply(draft: Draft) -> bool:
    """Remove Qwen Code's reminders of a date if the first user message states the same date.

    A reminder is removed only among the reminders at the start of a user message, and only if other
    text follows it. Reminders of another date are kept. Returns whether any reminder was removed.
    """
    first = draft.leading()
    started = _STARTED.search(draft.text(first)) if first < len(draft.messages) else None
    if started is None or draft.role(first) != "user":
        return False
    told = reminder(started[1])
    found = False
    for at in range(first, len(draft.messages)):
        if draft.role(at) == "user" and told in draft.text(at):
            kept = _without(draft.text(at), told)
            if kept is not None:
                draft.rewrite(at, kept)
                found = True
    return found


def _without(text: str, told: str) -> str | None:
    """Return the text of a user message without the reminder text `told`.

    Returns None if the reminder is not among the reminders at the start, or no other text follows
    it.
    """
    at = 0
    while block := _BLOCK.match(text, at):
        if block[0].rstrip("\n") == told and text[block.end() :].strip():
            return text[:at] + text[at + len(told) :]
        at = block.end()
    return None
