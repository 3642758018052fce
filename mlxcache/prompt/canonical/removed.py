"""Rules that remove lines of the client: `attribution`, `counter`, `date_reminder`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mlxcache.prompt.canonical.draft import SYSTEM, Draft

# -- attribution: the billing header line of Claude Code's system prompt ----------------------

_PAIR = r" {0,4}cc[a-z_]{0,40}=[^\s;=]{0,200}"
LINE = re.compile(
    rf"x-anthropic-billing-header:(?:(?:{_PAIR};)*{_PAIR};?[ \t]*(?:(?:\r?\n)+|\Z)"
    rf"|(?:{_PAIR};)+ (?!cc[a-z_]*=)(?=\S[^\r\n]*\Z))"
)
"""The whole attribution line, only `key=value` pairs, with the line ends after it.

For example `x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=cli; cch=36ee5;`. In
a system prompt that is one line, as anyclaude sends it, the pairs end before a space.
"""


def remove_attribution(draft: Draft) -> bool:
    found = False
    for at in reversed(range(draft.leading())):
        match = LINE.match(draft.text(at))
        if match:
            draft.rewrite(at, draft.text(at)[match.end() :])
            found = True
    return found


# -- counter, newest_counter: Claude Code's counters of remaining tokens ----------------------

COUNTER = re.compile(r"<total_tokens>[0-9][0-9,]{0,30} tokens left</total_tokens>")


_NEWLINES = re.compile(r"\n*")


def remove_counters(draft: Draft, *, keep: bool = False) -> bool:
    """Remove counters of remaining tokens from system messages.

    `keep`: append the newest one to the conversation, after everything shared with the next
    request.
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
    """Remove paragraphs that are counters, and counters in the last lines, and return them too.

    Unlike a system prompt, such a message is written by the client alone.
    """
    paragraphs = text.split("\n\n")
    counters = [part.strip() for part in paragraphs if COUNTER.fullmatch(part.strip())]
    if counters:
        kept = [part for part in paragraphs if not COUNTER.fullmatch(part.strip())]
        text = "\n\n".join(kept)
    text, trailing = split(text)
    return text, counters + trailing


def split(text: str) -> tuple[str, list[str]]:
    """Remove counters from the start and end of a system prompt, and return them too.

    Elsewhere, or beside other text, a counter could be a user's text, so it stays.
    """
    leading: list[str] = []
    start = 0
    while (end := text.find("\n\n", start)) >= 0:
        if not COUNTER.fullmatch(first := text[start:end].strip()):
            break
        leading.append(first)
        start = _NEWLINES.match(text, end).end()  # type: ignore[union-attr]
    trailing: list[str] = []
    end = kept = len(text)
    while end > start:
        at = max(text.rfind("\n", start, end), start)
        line = text[at:end].strip()
        if COUNTER.fullmatch(line):
            trailing.append(line)
            kept = at
        elif line:
            break
        end = at
    text = text[start:kept]
    return text.rstrip() if trailing else text, leading + trailing[::-1]


# -- date_reminder: Qwen Code's reminder of a date that its first message already has ---------

# Qwen Code writes the reminder only into the newest message. When a conversation is continued with
# `-c`, the older messages no longer have it, so everything after them would be computed again.

_STARTED = re.compile(
    r"<system-reminder>\nThis is the Qwen Code\. We are setting up the context for our chat\.\n"
    r"Today's date is ([^\n]{1,60})\.\n"
)
"""Start of Qwen Code's first message; the group is the date."""

_BLOCK = re.compile(r"<system-reminder>\n.*?\n</system-reminder>|(?<=>)\n+", re.S)


def reminder(date: str) -> str:
    return (
        f"<system-reminder>\nThe current date is: {date}. Note: This is the authoritative current "
        'date — it may differ from the "Today\'s date" mentioned earlier in the conversation '
        "startup context.\n</system-reminder>"
    )


def remove_date_reminders(draft: Draft) -> bool:
    """Remove Qwen Code's reminders of a date if the first user message states the same date.

    Only one that is a part of its own, or is among the reminders at the start of a message that was
    sent as one text, and only if other text follows. The part is not always the first: after an
    interrupted turn, it is between the message without a reply and the next one.
    """
    first = draft.leading()
    started = _STARTED.search(draft.text(first)) if first < len(draft.messages) else None
    if started is None or draft.role(first) != "user":
        return False
    told = reminder(started[1])
    found = False
    for at in range(first, len(draft.messages)):
        if draft.role(at) != "user" or told not in draft.text(at):
            continue
        parts = _split_reminders(draft.parts(at))
        place = parts.index(told) if told in parts else len(parts)
        if "".join(parts[place + 1 :]).strip():
            draft.rewrite(at, "".join(parts[:place] + parts[place + 1 :]))
            found = True
    return found


def _split_reminders(parts: Sequence[str]) -> list[str]:
    if len(parts) > 1:
        return list(parts)
    text, start, split = parts[0], 0, []
    while block := _BLOCK.match(text, start):
        split.append(block[0])
        start = block.end()
    return [*split, text[start:]]
