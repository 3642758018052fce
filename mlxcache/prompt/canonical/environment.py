"""Rule `environment`: move Claude Code's description of its environment before the first message.

Claude Code sends the description after the first message, which differs in each session, so every
session would compute it again. Before that message it is part of a prefix that all sessions and
sub-agents of a project share. It stays after the tools, because it changes more often than they do.
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
"""First line of a paragraph of the environment description, which is equal in all sessions."""
_STARTED = re.compile(r"SessionStart(?::\w+)? hook [a-z ]+: ")
"""Output of a `SessionStart` hook.

It may be at the start of the system message, and stays before the text that follows it there.
"""
_CALLED = re.compile(r"Called the (?:Read|Bash) tool with the following input: ")
"""Start of the content of a file or folder that the user's first message names.

It may come before the environment description. Its lines start with numbers or are names of files,
so its paragraphs are unlikely to match another pattern.
"""
_ASKED = re.compile(r"Plan mode is active\b|UserPromptSubmit(?::\w+)? hook [a-z ]+: ")
"""First line of text that belongs to the first message and stays after it."""
_ENDS = re.compile(
    r"- [\w.:@/+-]+(?:: .*)?$"
    r"|When you launch multiple agents\b"
    r"|You are powered by \w"
    r"|Today's date is \d{4}-\d{2}-\d{2}\.\s*\Z",
    re.M,
)
"""Line that the last paragraph of the environment description must have.

It names an agent, a skill or the date, or is the text after the list of agents.
"""


_REMINDER = re.compile(r"<system-reminder>\n.*</system-reminder>\s*", re.S)
"""A whole user message of reminders from the client, sent before the user's own message."""


def apply(draft: Draft) -> bool:
    """Move Claude Code's environment description before the first user message.

    It is moved only if it is in the system message directly after the user's first message; see
    `_find_message`. Returns whether it was moved.
    """
    first = draft.leading()
    at = _find_message(draft, first)
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


def _find_message(draft: Draft, at: int) -> int | None:
    """Return the index of the system message directly after the user's first message, or None.

    `at`: index of the first message with the role `user`. Several such messages may come before the
    system message if all but the last of them consist only of a reminder from the client.
    """
    end = len(draft.messages) - 1
    while at < end and draft.role(at) == "user":
        at += 1
        if draft.role(at) == "system":
            return at
        if not _REMINDER.fullmatch(draft.text(at - 1)):
            return None
    return None


def _split(text: str) -> tuple[str, str]:
    """Split a system message into Claude Code's environment description and all other text.

    Returns (description, other text). If the description is not recognised for certain, it is
    empty, and the other text is all of `text`.
    """
    paragraphs = text.split("\n\n")
    end = next((i for i, p in enumerate(paragraphs) if _ASKED.match(p)), len(paragraphs))
    start = next((i for i, p in enumerate(paragraphs[:end]) if _TOLD.match(p)), end)
    before, told = paragraphs[:start], paragraphs[start:end]
    opens = [found.group() for found in map(_TOLD.match, told) if found]
    if not told or not _closes(told[-1]) or any(map(_CALLED.match, told)):
        return "", text
    if len(set(opens)) < len(opens):
        return "", text  # one is part of a file or a description
    if before and not (_STARTED.match(before[0]) or _CALLED.match(before[0])):
        return "", text
    if not any(map(_CALLED.match, before)):
        before, told = [], before + told
    return "\n\n".join(told), "\n\n".join(before + paragraphs[end:])


def _closes(paragraph: str) -> bool:
    """Return whether a paragraph may be the last one of Claude Code's environment text."""
    return bool(_TOLD.match(paragraph) or any(map(_ENDS.match, paragraph.splitlines())))
