"""What was done to the messages of a conversation: edited, put in, left out, summarised."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxcache.common_prefix import common_characters
from mlxcache.image import Image
from mlxcache.prompt.explain_text import Change, change_of

Message = Mapping[str, Any]
Shows = tuple[str, str]

SYSTEM = ("system", "developer")
_SHIFTS = 16
"""Messages put in or left out at one place that are still told as that."""
_SUMMARY = re.compile(
    r"continued from a previous conversation|conversation (?:is|was|has been) (?:summari[sz]ed"
    r"|compacted)|summary of the conversation|<(?:conversation_|context_)?summary>",
    re.IGNORECASE,
)
_IMAGE = 80
"""Characters around a change in which an image stands, if it is one that changed."""
_CLEARED = re.compile(
    r"\[(?:Old )?tool (?:result|output|use)[^\]\n]{0,80}(?:cleared|removed|omitted)"
)
_REMINDER = re.compile(r"<system-reminder>|<env>|<context\b")


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that two conversations differ in.

    `where`: the part of the later conversation, such as `system`, `tools[2] Read`, `messages[5]
    user`. `before`, `after`: excerpts of the earlier and the later text. `shows`: what of the two
    is seen in prompts right where they part.
    """

    where: str
    reason: str
    cause: str
    before: str
    after: str
    shows: Shows


def message_differences(was: Sequence[Message], now: Sequence[Message]) -> Iterator[Difference]:
    """What differs of the messages that both have, in order.

    Where some were put in, left out or replaced by a summary, that is the last that is told.
    """
    seen = [key(m) for m in was], [key(m) for m in now]
    for i in range(min(len(was), len(now))):
        if seen[0][i] == seen[1][i]:
            continue
        cause = None if _in_place(was, now, seen, i) else _moved(was, now, seen, i)
        if cause == "message_dropped" and heads(now) <= i < heads(was):
            yield difference("system", "system_changed", change_of(text_of(was[i]), ""))
            return
        if cause is not None:
            role = now[i].get("role")
            head = cause != "compaction" and role in SYSTEM and i < heads(now)
            reason = "system_changed" if head else "edited"
            change = change_of(text_of(was[i]), text_of(now[i]), machine=True)
            yield difference(_place(now, i), reason, change, cause)
            return
        yield from _edited(was[i], now[i], _place(now, i))


def _place(messages: Sequence[Message], i: int) -> str:
    return "system" if i < heads(messages) else f"messages[{i}] {messages[i].get('role')}"


def _in_place(
    was: Sequence[Message], now: Sequence[Message], seen: tuple[list[str], list[str]], i: int
) -> bool:
    """Whether a message of the head, or one that both go on behind alike, was edited."""
    following = [keys[i + 1 : i + 2] for keys in seen]
    goes_on = bool(following[0]) and following[0] == following[1]
    return was[i].get("role") == now[i].get("role") and (i < heads(now) or goes_on)


def _moved(
    was: Sequence[Message], now: Sequence[Message], seen: tuple[list[str], list[str]], i: int
) -> str | None:
    """What was done to the list of messages at `i`; None where a message was edited after all."""
    old, new = seen
    tail = bool({*old[i:]} & {*new[i:]})
    summary = any(_SUMMARY.search(text_of(m)) for m in now[i : i + 2])
    fewer = not tail or len(now) < len(was)  # the newest messages may be kept behind a summary
    if summary and fewer and not _SUMMARY.search(text_of(was[i])):
        return "compaction"
    shifted = _shifted(now, seen, i) or _shifted_and_edited(was, now, i)
    if shifted is not None:
        return shifted
    same_role = was[i].get("role") == now[i].get("role")
    alike = tail or len(now) > len(was) or similar(text_of(was[i]), text_of(now[i])) >= 0.3
    if same_role and alike:
        return None
    early = i <= heads(now) + 1 and len(now) < len(was)
    if early and len(was) - i > 1 and not tail:
        return "compaction"
    return "text" if tail else "rewound"


def _shifted(now: Sequence[Message], seen: tuple[list[str], list[str]], i: int) -> str | None:
    """What was put in or left out at `i`, if the messages go on alike behind it."""
    old, new = seen
    for shift in range(1, _SHIFTS + 1):
        if new[i + shift : i + shift + 1] == old[i : i + 1]:
            return _inserted(now[i])
        if old[i + shift : i + shift + 1] == new[i : i + 1]:
            return "message_dropped"
    return None


def _shifted_and_edited(was: Sequence[Message], now: Sequence[Message], i: int) -> str | None:
    """As `_shifted`, where a message of another role stands before one that was edited too."""
    if was[i].get("role") == now[i].get("role"):
        return None
    if any(_nearly(was[i], later) for later in now[i + 1 : i + 1 + _SHIFTS]):
        return _inserted(now[i])
    if any(_nearly(later, now[i]) for later in was[i + 1 : i + 1 + _SHIFTS]):
        return "message_dropped"
    return None


def _inserted(message: Message) -> str:
    volatile = change_of("", text_of(message), machine=True).cause
    return volatile if volatile in ("counter", "git_status") else "message_inserted"


def _nearly(was: Message, now: Message) -> bool:
    """Whether two messages of one role say almost the same."""
    texts = text_of(was), text_of(now)
    return was.get("role") == now.get("role") and any(texts) and similar(*texts) >= 0.8


def _edited(was: Message, now: Message, where: str) -> Iterator[Difference]:
    """What was edited in a message; nothing where only what is not rendered differs."""
    role = str(now.get("role"))
    reason = "system_changed" if role in SYSTEM else "edited"
    if (was.get("reasoning_content") or "") != (now.get("reasoning_content") or ""):
        old, new = str(was.get("reasoning_content") or ""), str(now.get("reasoning_content") or "")
        cause = "thinking_changed" if new else "thinking_dropped"
        yield difference(where, reason, change_of(old, new), cause)
    old, new = text_of(was), text_of(now)
    if old != new:
        machine = role in SYSTEM or role == "tool" or _REMINDER.search(new) is not None
        change = change_of(old, new, machine=machine)
        yield difference(where, reason, change, _special(role, old, new, change))
    calls = [[function_of(c) for c in m.get("tool_calls") or ()] for m in (was, now)]
    if as_json(calls[0]) != as_json(calls[1]):
        told = difference(where, reason, change_of(*map(as_json, calls)), "tool_calls")
        yield replace(told, shows=_argument(*calls) or told.shows)


def _argument(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Shows | None:
    """What is seen of the first argument that differs, which templates write in many ways."""
    for old, new in zip(was, now, strict=False):
        before, after = _texts(old.get("arguments")), _texts(new.get("arguments"))
        if old.get("name") != new.get("name"):
            return None
        changed = [k for k in before if k in after and before[k] != after[k]]
        if changed:
            return change_of(before[changed[0]], after[changed[0]]).shows
    return None


def _texts(arguments: Any) -> dict[str, str]:
    if not isinstance(arguments, Mapping):
        return {}
    return {k: v if isinstance(v, str) else as_json(v) for k, v in arguments.items()}


def _special(role: str, old: str, new: str, change: Change) -> str | None:
    near = slice(max(0, change.at - _IMAGE), change.at + _IMAGE)
    if "[image " in old[near] or "[image " in new[near]:
        return "image"
    if role == "tool" and _CLEARED.search(new) and not _CLEARED.search(old):
        return "tool_result_cleared"
    return None


# -- what else is asked of messages ------------------------------------------------------------


def similar(old: str, new: str) -> float:
    """The share of the longer text that both begin or end with, from 0 to 1."""
    longer = max(len(old), len(new))
    if not longer:
        return 1.0
    start = common_characters(old, new)
    most = min(len(old), len(new)) - start
    end = common_characters(old[::-1][:most], new[::-1][:most])
    return (start + end) / longer


def heads(messages: Sequence[Message]) -> int:
    return next((i for i, m in enumerate(messages) if m.get("role") not in SYSTEM), len(messages))


def key(message: Message) -> str:
    return json.dumps(message, sort_keys=True, ensure_ascii=False, default=_digest)


def _digest(value: object) -> str:
    return value.digest.hex() if isinstance(value, Image) else repr(value)


def text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(
            f"[image {part.digest.hex()}]" if isinstance(part, Image) else str(part)
            for part in content
        )
    return str(content or "")


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=_digest)


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool or a call without what wraps it, and without a call's id."""
    found: Mapping[str, Any] = tool.get("function") or tool
    return found


def difference(where: str, reason: str, change: Change, cause: str | None = None) -> Difference:
    return Difference(
        where, reason, cause or change.cause, change.before, change.after, change.shows
    )
