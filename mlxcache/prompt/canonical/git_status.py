"""Rule `git_status`: move the git status from the system prompt to the turn in which it was new.

The status differs in each session. It becomes a system message after the last message of the turn
in which it was new, and stays there in later turns, so that no prefix changes. A newer status is
put after a later message.
"""

from __future__ import annotations

import re

from mlxcache.lru import LRU
from mlxcache.prompt.canonical.draft import Draft, History

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


def take(draft: Draft) -> str:
    """Remove the git status from the system messages before the first reply, and return its text.

    The text is empty if there is none.
    """
    blocks: list[str] = []
    for at in reversed(draft.head()):
        kept, found = _split(draft.text(at))
        if found:
            draft.rewrite(at, kept)
            blocks = found + blocks
    return "\n\n".join(blocks)


def place(draft: Draft, status: str, places: Places, session: str | None) -> None:
    """Insert a git status as a system message where the first request that had it ended.

    For a new status that is the end of this request. Older statuses of the session are inserted
    where the first requests that had them ended. `places` maps a digest of the messages before
    such a place to the status, and a new status is added to it. `session`: label of the session. If
    it is None, only `status` itself is inserted, because an older one may belong to another
    conversation with the same beginning.
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


def _split(text: str) -> tuple[str, list[str]]:
    """Return a system text without its git status blocks, and these blocks."""
    lines = text.split("\n")
    kept: list[str] = []
    blocks: list[str] = []
    at = 0
    while at < len(lines):
        end = _end(lines, at)
        if end == at:
            kept.append(lines[at])
            at += 1
            continue
        blocks.append("\n".join(lines[at:end]))
        at = end
        if kept and not kept[-1] and at < len(lines) and not lines[at]:
            at += 1
    return ("\n".join(kept).rstrip("\n") if blocks else text), blocks


def _end(lines: list[str], start: int) -> int:
    """Return the index after the last line of the git status block that begins at line `start`.

    This is `start` if no block begins there. A block may contain blank lines but does not end with
    one. The client Continue puts the status between two tags; such a block counts only if all lines
    between the tags are blank or lines of a git status.
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
