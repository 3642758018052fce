"""What Claude Code tells of its environment behind the first message: rendered before it.

There it is part of what all sessions and sub-agents of a project begin with. Behind the message,
which is another in each, all of it would be computed anew. It stays behind the tools, for it
changes more often than they do.
"""

from __future__ import annotations

import re

from mlxcache.prompt.adapt import APART
from mlxcache.prompt.canonical.draft import Draft

_OPENS = re.compile(
    r"# Environment\nYou have been invoked in the following environment:"
    r"|The following deferred tools are now available via ToolSearch\."
    r"|Available agent types for the Agent tool:\n"
    r"|The following skills are available for use with the Skill tool:\n"
)
"""A paragraph that such a message begins with."""
_INVOKED = re.compile(r"^# Environment\nYou have been invoked in the following environment:", re.M)
_DATE = re.compile(r"\n\nToday's date is \d{4}-\d{2}-\d{2}\.\s*\Z")
"""What such a message holds, and what it ends with."""


def apply(draft: Draft) -> bool:
    """Put a system message of that shape, right behind the first message of all, before it."""
    first = draft.leading()
    at = first + 1
    if at >= len(draft.messages) or draft.role(first) != "user" or draft.role(at) != "system":
        return False
    text = draft.text(at)
    if not (_OPENS.match(text) and _INVOKED.search(text) and _DATE.search(text)):
        return False
    draft.exchange(first, at)
    draft.messages[first] = {**draft.messages[first], APART: True}
    return True
