"""What Claude Code tells of its environment behind the first message: rendered before it.

There it is part of what all sessions and sub-agents of a project begin with. Behind the message,
which is another in each, all of it would be computed anew. It stays behind the tools, for it
changes more often than they do.
"""

from __future__ import annotations

import re

from mlxcache.prompt.adapt import SEPARATE
from mlxcache.prompt.canonical.draft import Draft

_TOLD = re.compile(
    r"# Environment\nYou have been \w+ in the following environment:"
    r"|The following deferred tools are now available\b"
    r"|Available agent types for the \w+ tool:(?:\n|\Z)"
    r"|The following skills are available for use with the \w+ tool:(?:\n|\Z)"
)
"""A paragraph that opens something that is told to all sessions."""
_STARTED = re.compile(r"SessionStart(?::\w+)? hook [a-z ]+: ")
"""What a program said when the session began: it may come first, and stays with what follows."""
_CALLED = re.compile(r"Called the (?:Read|Bash) tool with the following input: ")
"""A file or folder that the first message names: it may come first. Its lines have numbers before
them or are names of files, so hardly a paragraph of it is taken for another."""
_ASKED = re.compile(r"Plan mode is active\b|UserPromptSubmit(?::\w+)? hook [a-z ]+: ")
"""A paragraph that opens what goes with the first message, and stays behind it."""
_ENDS = re.compile(
    r"- [\w.:@/+-]+(?:: .*)?$"
    r"|When you launch multiple agents\b"
    r"|You are powered by \w"
    r"|Today's date is \d{4}-\d{2}-\d{2}\.\s*\Z",
    re.M,
)
"""A line of the last paragraph: an agent or a skill, what is said behind agents, the date."""


_REMINDER = re.compile(r"<system-reminder>\n.*</system-reminder>\s*", re.S)
"""All of a user's message that comes before the person's own, as for a file that this one names."""


def apply(draft: Draft) -> bool:
    """Put what is told to all, in a system message right behind the first message, before it."""
    first = draft.leading()
    at = _behind(draft, first)
    if at is None:
        return False
    told, rest = _split(draft.text(at))
    if not told:
        return False
    if rest:
        draft.insert(at + 1, rest)
    draft.messages[at] = {**draft.messages[at], "content": told, SEPARATE: True}
    draft.move(at, first)
    return True


def _behind(draft: Draft, at: int) -> int | None:
    """Where a system message stands behind the first message, and reminders before that."""
    end = len(draft.messages) - 1
    while at < end and draft.role(at) == "user":
        at += 1
        if draft.role(at) == "system":
            return at
        if not _REMINDER.fullmatch(draft.text(at - 1)):
            return None
    return None


def _split(text: str) -> tuple[str, str]:
    """What is told to all, and what goes with the first message; nothing of the former in doubt.

    A description may hold any paragraph. So what is told ends with the text or before a known
    shape, and what its last paragraph is must be known too.
    """
    paragraphs = text.split("\n\n")
    end = next((i for i, p in enumerate(paragraphs) if _ASKED.match(p)), len(paragraphs))
    start = next((i for i, p in enumerate(paragraphs[:end]) if _TOLD.match(p)), end)
    before, told = paragraphs[:start], paragraphs[start:end]
    opens = [found.group() for found in map(_TOLD.match, told) if found]
    if not told or not _closes(told[-1]) or any(map(_CALLED.match, told)):
        return "", text
    if len(set(opens)) < len(opens):
        return "", text  # one of them is part of a file, or of a description
    if before and not (_STARTED.match(before[0]) or _CALLED.match(before[0])):
        return "", text
    if not any(map(_CALLED.match, before)):
        before, told = [], before + told
    return "\n\n".join(told), "\n\n".join(before + paragraphs[end:])


def _closes(paragraph: str) -> bool:
    """Whether it may be the last of what is told."""
    return bool(_TOLD.match(paragraph) or any(map(_ENDS.match, paragraph.splitlines())))
