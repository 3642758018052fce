"""Rules that move a text to a place where it changes no prefix: `environment`, `git_status`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlxcache.lru import LRU
from mlxcache.prompt.adapt import SEPARATE
from mlxcache.prompt.canonical.draft import Draft, History

# -- environment: Claude Code's description of its environment, before the first message ------

# Claude Code sends the description after the first message, which differs in each session, so every
# session would compute it again. Before that message it is part of a prefix that all sessions and
# sub-agents of a project share. It stays after the tools: it changes more often than they do.
#
# After a compaction the client sends it again, with its sections in another order, after the
# messages that it kept. The order that they get here is that of a session's start.

_TOLD = re.compile(
    r"(# Environment\nYou have been \w+ in the following environment:)"
    r"|(The following deferred tools are now available\b)"
    r"|(Available agent types for the \w+ tool:(?:\n|\Z))"
    r"|(# MCP Server Instructions\Z)"
    r"|(The following skills are available for use with the \w+ tool:(?:\n|\Z))"
    r"|(Today's date is \d{4}-\d{2}-\d{2}\.\s*\Z)"
)
"""First paragraph of a section of the environment description, a group for each, in order."""
_DATE = _TOLD.groups
_STARTED = re.compile(r"SessionStart(?::\w+)? hook [a-z ]+: ")
"""Output of a `SessionStart` hook. At the start it is moved with the description, behind it."""
_CALLED = re.compile(r"Called the (?:Read|Bash) tool with the following input: ")
"""Start of the content of a file or folder that the user's first message names.

It may come before the description. Its paragraphs are unlikely to match another pattern.
"""
_ASKED = re.compile(r"Plan mode is active\b|UserPromptSubmit(?::\w+)? hook [a-z ]+: ")
"""First line of text that belongs to the first message and stays after it."""
_ENDS = re.compile(
    r"- [\w.:@/+-]+(?:: .*)?$|When you launch multiple agents\b|You are powered by \w", re.M
)
"""Line of the last paragraph: an agent, a skill, the model, or the text after the agents."""
_REMINDER = re.compile(r"<system-reminder>\n.*</system-reminder>\s*", re.S)
"""A whole user message of reminders from the client, sent before the user's own message."""
_COMPACTED = re.compile(r"^This session is being continued from a previous conversation\b", re.M)
"""Line of the first user message after a compaction; a summary follows it."""
_AGAIN = re.compile(r"^# Environment\nYou have been ", re.M)
"""A section that is in the whole description, but in no later message about new tools or skills."""


def move_environment(draft: Draft) -> bool:
    """Move Claude Code's environment description before the first user message; return whether."""
    first = draft.leading()
    at = _find_message(draft, first)
    told, rest = _split_environment(draft.text(at)) if at is not None else ("", "")
    if at is None or not told:
        return False
    if rest:
        draft.insert(at + 1, rest)
    draft.messages[at] = {**draft.messages[at], "content": told, SEPARATE: True}
    draft.move(at, first)
    return True


def _find_message(draft: Draft, at: int) -> int | None:
    end = len(draft.messages) - 1
    if at <= end and _COMPACTED.search(draft.text(at)):
        systems = (i for i in range(at, end + 1) if draft.role(i) == "system")
        again = next((i for i in systems if _AGAIN.search(draft.text(i))), None)
        if again is not None:
            return again
    while at < end and draft.role(at) == "user":
        at += 1
        if draft.role(at) == "system":
            return at
        if not _REMINDER.fullmatch(draft.text(at - 1)):
            return None
    return None


def _split_environment(text: str) -> tuple[str, str]:
    paragraphs = text.split("\n\n")
    end = len(paragraphs)
    start = next((i for i, p in enumerate(paragraphs) if _TOLD.match(p)), end)
    stays = (
        i for i, p in enumerate(paragraphs) if _ASKED.match(p) or (i > start and _STARTED.match(p))
    )
    end = next(stays, end)
    before, told = paragraphs[:start], paragraphs[start:end]
    if not told or any(map(_CALLED.match, told)):
        return "", text
    if not _TOLD.match(told[-1]) and not any(map(_ENDS.match, told[-1].splitlines())):
        return "", text
    if before and not (_STARTED.match(before[0]) or _CALLED.match(before[0])):
        return "", text
    sections = _sections(told)
    if len({kind for kind, _ in sections}) < len(sections) or sections[0][0] == _DATE:
        return "", text  # one is part of a file or a description
    told = [paragraph for _, section in sections for paragraph in section]
    if not any(map(_CALLED.match, before)):
        before, told = [], told + before
    return "\n\n".join(told), "\n\n".join(before + paragraphs[end:])


def _sections(told: Sequence[str]) -> list[tuple[int, list[str]]]:
    """Return the sections of the description, each with the number of its group, sorted."""
    sections: list[tuple[int, list[str]]] = []
    for paragraph in told:
        opened = _TOLD.match(paragraph)
        if opened:
            sections.append((opened.lastindex or 0, []))
        sections[-1][1].append(paragraph)
    return sorted(sections)


# -- git_status: from the system prompt to the turn in which it was new -----------------------

# The status differs in each session. It becomes a system message after the last message of the turn
# in which it was new, and stays there in later turns. A newer status is put after a later message.

FIRST = re.compile(r"gitStatus: \S.*")
"""First line of a git status in Claude Code's form; all further ones match `_LINE` or are blank."""
_OPENS = re.compile(r'<context name="gitStatus">\S.*')
_CLOSES = "</context>"
"""First and last line of a git status in Continue's form."""
_LINE = re.compile(
    r"Current branch: .*|Main branch[^:]*: .*|Git user: .*|Status:|Recent commits:"
    r"|\((?:clean|dirty|unavailable)\)"
    r"|[ MTADRCU?!]{1,2} \S.*"
    r"|[0-9a-f]{7,40} .*"
    r"|\.\.\. ?\(truncated.*"
    r"|Working tree clean|Not a git repository|Git status not available"
)
"""Further line of the status: a heading, a file of `git status --short`, or a commit."""
_SNAPSHOT = re.compile(r"Git snapshot at conversation start\. This snapshot is frozen in time .*")
"""First line of a git status in Qwen Code's form; the others are between lines of backticks."""

Places = LRU[bytes, str]
"""Git statuses, by a digest of the messages before each."""


def take_status(draft: Draft) -> str:
    blocks: list[str] = []
    for at in reversed(draft.head()):
        kept, found = split_status(draft.text(at))
        if found:
            draft.rewrite(at, kept)
            blocks = found + blocks
    return "\n\n".join(blocks)


def place_status(draft: Draft, status: str, places: Places, session: str | None) -> None:
    """Insert a git status as a system message where the first request that had it ended.

    For a new status that is the end of this request. Older statuses of the session are inserted
    too; not if `session` is None, because they may belong to another conversation with the same
    beginning.
    """
    history = History(f"git {session}" if session else f"git\n{status}")
    known: list[tuple[int, str]] = []
    end = draft.end()
    for at in range(end):
        history.add(draft.messages[at])
        if at < end - 1 and draft.role(at) in ("user", "tool"):
            placed = places.get(history.digest)
            if placed is not None:
                known.append((at + 1, placed))
    if not known or known[-1][1] != status:
        known.append((end, status))
        places.put(history.digest, status)
    for at, text in reversed(known):
        draft.insert(at, text)


def split_status(text: str) -> tuple[str, list[str]]:
    lines = text.split("\n")
    kept: list[str] = []
    blocks: list[str] = []
    at = 0
    while at < len(lines):
        end = _block_end(lines, at)
        if end == at:
            kept.append(lines[at])
            at += 1
            continue
        blocks.append("\n".join(lines[at:end]))
        at = end
        if kept and not kept[-1] and at < len(lines) and not lines[at]:
            at += 1
    return ("\n".join(kept).rstrip("\n") if blocks else text), blocks


def _block_end(lines: list[str], start: int) -> int:
    """Return the index after the git status block that begins at line `start`, or `start`.

    A block may contain blank lines but does not end with one.
    """
    if _SNAPSHOT.fullmatch(lines[start]) and lines[start + 1 : start + 2] == ["```text"]:
        others = (at for at in range(start + 2, len(lines)) if not lines[at].startswith("git: "))
        end = next(others, start)
        return end + 1 if end > start + 2 and lines[end].startswith("```") else start
    tagged = bool(_OPENS.fullmatch(lines[start]))
    if not tagged and not FIRST.fullmatch(lines[start]):
        return start
    end = start + 1
    for at in range(start + 1, len(lines)):
        if tagged and lines[at] == _CLOSES:
            return at + 1
        if _LINE.fullmatch(lines[at]):
            end = at + 1
        elif lines[at]:
            break
    return start if tagged else end
