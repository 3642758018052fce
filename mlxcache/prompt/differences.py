"""What was done to the messages of a conversation: edited, put in, left out, summarised."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxcache.common_prefix import common_characters
from mlxcache.prompt.volatile import ANNOUNCED, VALUES, touching
from mlxcache.types import Chat, Image

_LEFT, _RIGHT = 60, 140
"""Characters of a text that are shown before and from where it parts."""
_CLOSE = 8
_LINE = 400
"""Characters of a line, each way from where it parts, that are looked at."""
_GIT = re.compile(r"gitStatus|[Gg]it status|^(?:Current|Git) branch:", re.MULTILINE)
_GIT_LINE = re.compile(
    r"(?:\w+: )?(?:[ MADRCTU?!]{1,2} \S|[0-9a-f]{7,40} |\(clean\)|Status:|Recent commits:"
    r"|(?:Current|Main|Git) branch)"
)
_GIT_REACH = 4000
_NUMBER = re.compile(r"\d[\d,_]*(?:\.\d+)?")


@dataclass(frozen=True, slots=True)
class Change:
    """`at`: characters that both texts begin with; `before`, `after`: the old and new text there.

    Both begin with up to 60 characters that are the same, on the same line. `shows`: the two from
    a few characters before `at` on.
    """

    at: int
    cause: str
    before: str
    after: str
    shows: tuple[str, str]


def change_of(old: str, new: str, *, machine: bool = False) -> Change:
    """How `old` became `new`, which is not the same text.

    `machine`: a program wrote it, so that a number which changes is a counter.
    """
    at = common_characters(old, new)
    shown = slice(max(0, at - _CLOSE), at + _RIGHT)
    cause = _cause(old, new, at, machine)
    return Change(at, cause, excerpt(old, at), excerpt(new, at), (old[shown], new[shown]))


def excerpt(text: str, at: int) -> str:
    """What stands around a character, from the start of its line if that is near."""
    start = max(at - _LEFT, text.rfind("\n", 0, at) + 1)
    return text[start : at + _RIGHT]


def _cause(old: str, new: str, at: int, machine: bool) -> str:
    was, begun = _line(old, at)
    now, _ = _line(new, at)
    (first, was_end), now_end = _span(was, now, at - begun), 0
    now_end = was_end + len(now) - len(was)
    either = touching(ANNOUNCED, was, first, was_end) + touching(ANNOUNCED, now, first, now_end)
    if either:
        return either[0]
    if _in_git(old, at, was) or _in_git(new, at, now):
        return "git_status"
    values = touching(VALUES, now, first, now_end)
    both = [cause for cause in touching(VALUES, was, first, was_end) if cause in values]
    if both:
        return both[0]
    if machine and _number_at(was, first, was_end) and _number_at(now, first, now_end):
        return "counter"
    return form(was, now) or form(old, new) or "text"


def _line(text: str, at: int) -> tuple[str, int]:
    """The line that a character stands in, and where it begins; of a long one what is near."""
    start = max(at - _LINE, text.rfind("\n", 0, at) + 1)
    end = text.find("\n", at, at + _LINE)
    return text[start : end if end >= 0 else at + _LINE], start


def _span(was: str, now: str, first: int) -> tuple[int, int]:
    """The characters of `was` that changed: from `first` to where both end alike."""
    most = min(len(was), len(now)) - first
    same = next((i for i in range(most) if was[-1 - i] != now[-1 - i]), most)
    return first, len(was) - same


def _number_at(line: str, start: int, end: int) -> bool:
    return any(m.start() <= start and m.end() >= end for m in _NUMBER.finditer(line))


def _in_git(text: str, at: int, line: str) -> bool:
    """Whether a line is one of a git status that the text holds."""
    if not _GIT_LINE.match(line):
        return False
    near = text[max(0, at - _GIT_REACH) : at + _LINE]
    return _GIT.search(near) is not None


def form(old: str, new: str) -> str | None:
    """In what two texts differ that read the same; None where they do not, or are the same."""
    if old == new:
        return None
    if old.replace("\r\n", "\n").rstrip("\r") == new.replace("\r\n", "\n").rstrip("\r"):
        return "line_endings"
    if "".join(old.split()) == "".join(new.split()):
        return "whitespace"
    if unicodedata.normalize("NFC", old) == unicodedata.normalize("NFC", new):
        return "unicode_normalisation"
    if unicodedata.normalize("NFKC", old) == unicodedata.normalize("NFKC", new):
        return "unicode_normalisation"
    return None


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


_VOLATILE = frozenset({"date", "uuid", "counter", "git_status", "hash", "temp_path"})
ALIKE = 24
"""Characters that two first messages share where one is taken for the other: "What is a ...?" is
the beginning of many."""


def differences(old: Chat, new: Chat) -> list[Difference]:
    """What differs of what both conversations have, tools first, then in order.

    Nothing for a conversation that was only continued, or taken back by some messages.
    """
    return [
        *_arguments(old, new),
        *_tools(old.tools, new.tools),
        *message_differences(old.messages, new.messages),
    ]


def first_new(old: Chat, new: Chat) -> int:
    """How many leading messages of `new` are old ones: those of `old`, changed or not, and the
    reply to it."""
    was, now = old.messages, new.messages
    begin = heads(now)
    known = {key(message) for message in was if message.get("role") not in SYSTEM}
    known |= {key(message) for message in was[heads(was) :]}
    last = max((i + 1 for i in range(begin, len(now)) if key(now[i]) in known), default=begin)
    aligned = len(was) - heads(was)
    begun = now[begin : begin + aligned]
    if last > begin or _alike(was, now):
        roles = [m.get("role") for m in begun] == [m.get("role") for m in was[heads(was) :]]
        if roles and len(now) > begin + aligned:
            last = max(last, begin + aligned)
    ended = bool(was) and last > begin and _role(now, last) == "assistant"
    answers = key(now[last - 1]) == key(was[-1]) or last == begin + aligned
    return last + 1 if ended and answers else last


def related(old: Chat, new: Chat) -> bool:
    """Whether `new` goes on with `old`, or has at least its head."""
    if old.tools and new.tools and _head(old) == _head(new):
        return True
    known = {key(m) for m in old.messages if m.get("role") not in SYSTEM}
    if any(key(m) in known for m in new.messages):
        return True
    return _alike(old.messages, new.messages) or same_head(old, new)


def same_head(old: Chat, new: Chat) -> bool:
    """Whether both begin with much the same tools and system text, if not all of it."""
    was, now = _head(old), _head(new)
    if not now or not was:
        return False
    names = _names(old.tools), _names(new.tools)
    alike = names[0] == names[1] or len({*names[0]} & {*names[1]}) * 2 > len(names[1])
    return alike and similar(was, now) >= 0.5


def _alike(was: Sequence[Message], now: Sequence[Message]) -> bool:
    """Whether the first messages that are not of the system say nearly the same."""
    first, second = was[heads(was) :][:1], now[heads(now) :][:1]
    if not first or not second or first[0].get("role") != second[0].get("role"):
        return False
    one, other = text_of(first[0]), text_of(second[0])
    share = similar(one, other)
    return share >= 0.5 and share * max(len(one), len(other)) >= ALIKE


def _head(chat: Chat) -> str:
    return "\n\n".join(text_of(m) for m in chat.messages[: heads(chat.messages)])


def _role(messages: Sequence[Message], index: int) -> str | None:
    return messages[index].get("role") if index < len(messages) else None


# -- template arguments and tools --------------------------------------------------------------


def _arguments(old: Chat, new: Chat) -> Iterator[Difference]:
    was, now = dict(old.template_args), dict(new.template_args)
    if was != now:
        reason, cause = "template_drift", "template_args"
        yield Difference("template arguments", reason, cause, as_json(was), as_json(now), ("", ""))


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(function_of(tool).get("name")) for tool in tools]


def _tools(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[Difference]:
    old, new = [as_json(tool) for tool in was], [as_json(tool) for tool in now]
    if old == new:
        return []
    i = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    at = min(len(old), len(new)) if i is None else i
    names, renamed = _names(was), _names(now)
    name = (renamed[at : at + 1] or names[at : at + 1])[0]
    where = f"tools[{at}] {name}"
    before, after = (old[at : at + 1] or [""])[0], (new[at : at + 1] or [""])[0]
    change = change_of(before, after, machine=True)
    cause = _tool_cause(names, renamed, at, same=sorted(old) == sorted(new))
    if cause == "tool_changed":
        volatile = change.cause in _VOLATILE
        cause = change.cause if volatile else _described(was[at], now[at]) or cause
        return [difference(where, "tools_changed", change, cause)]
    shown = excerpt(before, 0), excerpt(after, 0)
    shows = _seen_of(was[at : at + 1]), _seen_of(now[at : at + 1])
    return [Difference(where, "tools_changed", cause, *shown, shows)]


def _seen_of(tools: Sequence[Mapping[str, Any]]) -> str:
    """What tells a tool from others in a prompt, at its beginning; empty for none."""
    functions = [function_of(tool) for tool in tools]
    return "".join(str(one.get("description") or one.get("name")) for one in functions)


def _described(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """In what form a tool's description changed, if it reads the same and all else is the same."""
    old, new = dict(function_of(was)), dict(function_of(now))
    texts = str(old.pop("description", "")), str(new.pop("description", ""))
    return form(*texts) if old == new else None


def _tool_cause(old: list[str], new: list[str], at: int, *, same: bool) -> str:
    if same:
        return "tool_reordered"
    was, now = old[at : at + 1], new[at : at + 1]
    if was == now:
        return "tool_changed"
    inserted, removed = bool(now) and now[0] not in old, bool(was) and was[0] not in new
    if inserted and removed:
        return "tool_changed"
    if inserted or removed:
        return "tool_inserted" if inserted else "tool_removed"
    return "tool_reordered"
