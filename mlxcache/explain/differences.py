"""Differences between two conversations: template arguments, tools and messages."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from mlxcache.common_prefix import common_characters
from mlxcache.explain.causes import ANNOUNCED, VALUES, causes_touching
from mlxcache.prompt.canonical.draft import SYSTEM, Message, as_text
from mlxcache.types import Chat, Image

Shows = tuple[str, str]

_LEFT, _RIGHT = 60, 140
"""Number of characters shown before and after the first difference."""
_CLOSE = 8
"""Number of equal characters at the start of the texts in `Difference.shows`."""
_LINE = 400
_GIT = re.compile(r"gitStatus|[Gg]it status|Git snapshot at|^(?:Current|Git) branch:", re.MULTILINE)
_GIT_LINE = re.compile(
    r"(?:\w+: )?(?:[ MADRCTU?!]{1,2} \S|[0-9a-f]{7,40} |\(clean\)|Status:|Recent commits:"
    r"|(?:Current|Main|Git) branch)"
)
_GIT_REACH = 4000
_NUMBER = re.compile(r"\d[\d,_]*(?:\.\d+)?")

_SHIFTS = 16
_SUMMARY = re.compile(
    r"continued from a previous conversation|conversation (?:is|was|has been) (?:summari[sz]ed"
    r"|compacted)|summary of the conversation|<(?:conversation_|context_)?summary>",
    re.IGNORECASE,
)
_IMAGE = 80
_CLEARED = re.compile(
    r"\[(?:Old )?tool (?:result|output|use)[^\]\n]{0,80}(?:cleared|removed|omitted)"
)
_REMINDER = re.compile(r"<system-reminder>|<env>|<context\b")
_REMINDERS = re.compile(r"<system-reminder>.*?(?:</system-reminder>\s*|(?P<open>\Z))", re.DOTALL)
"""A reminder, or the rest of a text from one that has no end, which is found only once so."""
_SAME_REMINDER = 40
"""Fewest equal characters at the start of two reminders that count as the same reminder."""
_SAME_HEAD = 0.75
"""Equal part of two system texts, and of the names of tools, that makes them almost the same."""
_ALIKE = 24
"""Fewest characters of two first messages that count: many begin with "What is"."""
_VOLATILE = frozenset({"date", "uuid", "counter", "git_status", "hash", "temp_path"})


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two conversations.

    `where`: such as `tools[2] Read`. `reason`, `cause`: its kind in general and in detail, such as
    `edited` and `date`. `before`, `after`: excerpts. `shows`: both texts right at the difference,
    by which it is found in the rendered prompts.
    """

    where: str
    reason: str
    cause: str
    before: str
    after: str
    shows: Shows


def differences(old: Chat, new: Chat) -> list[Difference]:
    """Return the differences of template arguments, tools and messages.

    Messages that only one of them has at its end are no difference.
    """
    was, now = dict(old.template_args), dict(new.template_args)
    found = [*_tools(old.tools, new.tools), *_messages(_Talk(old), _Talk(new))]
    if was == now:
        return found
    texts = _as_json(was), _as_json(now)
    args = Difference("template arguments", "template_drift", "template_args", *texts, ("", ""))
    return [args, *found]


def first_new(old: Chat, new: Chat) -> int:
    """Return how many messages at the start of `new` belong to the conversation `old`.

    Messages edited since then, and the reply to `old`, are counted.
    """
    was, now = _Talk(old), _Talk(new)
    known = {one.key for one in was.all if one.role not in SYSTEM or one.at >= was.heads}
    begin = now.heads
    last = max((one.at + 1 for one in now.all[begin:] if one.key in known), default=begin)
    aligned = begin + len(was.all) - was.heads
    if last > begin or _begins_alike(was, now):
        roles = [one.role for one in now.all[begin:aligned]]
        if roles == [one.role for one in was.all[was.heads :]] and len(now.all) > aligned:
            last = max(last, aligned)
    if not was.all or last == begin or now.role(last) != "assistant":
        return last
    answers = now.all[last - 1].key == was.all[-1].key or last == aligned
    return last + 1 if answers else last


def related(old: Chat, new: Chat) -> bool:
    """Return whether `new` continues `old`, or has almost the same tools and system text.

    `new` continues `old` if it has a message of `old` or a similar first message, and also a
    similar system text or tools of the same names. An equal message alone is not enough: a client
    sends the same words to the model to get a title, and a sub-agent reads the history of another.
    """
    was, now = _Talk(old), _Talk(new)
    names = {*_names(old.tools)}, {*_names(new.tools)}
    same_tools = names[0] == names[1]
    similarity = 1.0 if was.head == now.head else 0.0
    if not similarity and was.head and now.head:
        similarity = _similarity(was.head, now.head)
    alike = similarity >= 0.5
    if alike and same_tools and (now.head or names[1]):
        return True
    common = len(names[0] & names[1]) / max(1, len(names[0] | names[1]))
    if similarity >= _SAME_HEAD <= common:
        return True  # a client's terminal and its -p, with almost the same tools
    if not alike and not (same_tools and names[1]):
        return False
    known = {one.key for one in was.all if one.role not in SYSTEM}
    return any(one.key in known for one in now.all) or _begins_alike(was, now)


def begins_anew(first: Difference | None, new: Chat) -> bool:
    """Return whether `new` is a new conversation with an earlier one's system text and tools."""
    talk = _Talk(new)
    return first is not None and first.cause == "rewound" and first.where == talk.place(talk.heads)


# -- messages ----------------------------------------------------------------------------------


class _Said:
    def __init__(self, at: int, message: Message):
        self.at, self.message = at, message
        self.role = message.get("role")

    @cached_property
    def key(self) -> str:
        return json.dumps(self.message, sort_keys=True, ensure_ascii=False, default=as_text)

    @cached_property
    def text(self) -> str:
        content = self.message.get("content")
        if isinstance(content, list):
            return "\n".join(
                f"[image {part.digest.hex()}]" if isinstance(part, Image) else str(part)
                for part in content
            )
        return str(content or "")

    def is_nearly(self, other: _Said) -> bool:
        texts = self.text, other.text
        return self.role == other.role and any(texts) and _similar(*texts) >= 0.8


class _Talk:
    def __init__(self, chat: Chat):
        self._messages = chat.messages
        others = (at for at, one in enumerate(chat.messages) if one.get("role") not in SYSTEM)
        self.heads = next(others, len(chat.messages))

    @cached_property
    def all(self) -> list[_Said]:
        return [_Said(at, message) for at, message in enumerate(self._messages)]

    @cached_property
    def head(self) -> str:
        """The system text; made without the other messages, as most comparisons end with it."""
        return "\n\n".join(_Said(0, one).text for one in self._messages[: self.heads])

    def role(self, at: int) -> str | None:
        return self.all[at].role if at < len(self.all) else None

    def place(self, at: int) -> str:
        return "system" if at < self.heads else f"messages[{at}] {self.role(at)}"

    def keys(self, start: int, count: int | None = None) -> list[str]:
        return [one.key for one in self.all[start : None if count is None else start + count]]


def _messages(was: _Talk, now: _Talk) -> Iterator[Difference]:
    """Yield the differences between messages of two conversations, in order.

    Stops after the first message that is another one, not an edited one.
    """
    for i, (old, new) in enumerate(zip(was.all, now.all, strict=False)):
        if old.key == new.key:
            continue
        taken = _reminder_moved(old, now.all[i:]) or _text_moved(old, now.all[i:])
        cause = None if taken or _in_place(was, now, i) else _moved(was, now, i)
        if cause == "message_dropped" and now.heads <= i < was.heads:
            yield _changed("system", "system_changed", old.text, "")
            return
        if cause is not None:
            head = cause != "compaction" and new.role in SYSTEM and i < now.heads
            reason = "moved" if cause == "history_inserted" else "edited"
            reason = "system_changed" if head else reason
            yield _changed(now.place(i), reason, old.text, new.text, cause=cause)
            return
        for one in _edited(old, new, now.place(i)):
            yield replace(one, reason="moved", cause="reminder_moved") if taken else one


def _in_place(was: _Talk, now: _Talk, i: int) -> bool:
    goes_on = bool(was.keys(i + 1, 1)) and was.keys(i + 1, 1) == now.keys(i + 1, 1)
    return was.role(i) == now.role(i) and (i < now.heads or goes_on)


def _moved(was: _Talk, now: _Talk, i: int) -> str | None:
    """Return the cause why another message is at index `i` than before; None if it was edited."""
    old, new, fewer = was.all[i], now.all[i], len(now.all) < len(was.all)
    tail = not {*was.keys(i)}.isdisjoint(now.keys(i))
    summary = any(_SUMMARY.search(one.text) for one in now.all[i : i + 2])
    # a summary may be followed by the newest messages
    if summary and (not tail or fewer) and not _SUMMARY.search(old.text):
        return "compaction"
    if _history_inserted(was, now, i):
        return "history_inserted"
    if (shifted := _shifted(was, now, i)) is not None:
        return shifted
    alike = tail or len(now.all) > len(was.all) or _similar(old.text, new.text) >= 0.3
    if old.role == new.role and (alike or _begins_again(old, now, i)):
        return None
    if i <= now.heads + 1 and fewer and len(was.all) - i > 1 and not tail:
        return "compaction"
    return "text" if tail else "rewound"


def _begins_again(old: _Said, now: _Talk, i: int) -> bool:
    """Return whether message `i` is the first of a new session that begins as `old` does.

    It is no summary then: clients begin all first messages with the same reminders.
    """
    only = i == now.heads == len(now.all) - 1
    return only and common_characters(old.text, now.all[i].text) >= _ALIKE


def _shifted(was: _Talk, now: _Talk, i: int) -> str | None:
    old, new = was.all[i], now.all[i]
    before, after = (talk.all[i + 1 : i + 1 + _SHIFTS] for talk in (was, now))
    for n in range(_SHIFTS):
        if n < len(after) and after[n].key == old.key:
            return _inserted(new)
        if n < len(before) and before[n].key == new.key:
            return "message_dropped"
    if old.role == new.role:
        return None
    if any(old.is_nearly(later) for later in after):
        return _inserted(new)
    return "message_dropped" if any(later.is_nearly(new) for later in before) else None


def _inserted(message: _Said) -> str:
    cause = _cause("", message.text, 0, machine=True)
    return cause if cause in ("counter", "git_status") else "message_inserted"


def _history_inserted(was: _Talk, now: _Talk, i: int) -> bool:
    """Return whether replies were inserted before message `i` of the earlier conversation.

    Clients send a text after the history: a sub-agent its instruction, others the content of files.
    """
    most = min(len(was.all) - i, _SHIFTS)
    for end in range(max(i + 1, len(now.all) - most), len(now.all)):
        replied = any(one.role in ("assistant", "tool") for one in now.all[i:end])
        if replied and was.all[i].is_nearly(now.all[end]):
            return True
    return False


def _text_moved(was: _Said, now: Sequence[_Said]) -> bool:
    """Return whether a user message lost only a text that a later user message now has."""
    old, new = was.text, now[0].text
    if was.role != "user" or now[0].role != "user" or len(new) >= len(old):
        return False
    start, end = _common_ends(old, new)
    line = max(old[start : len(old) - end].splitlines(), key=len, default="").strip()
    taken = not new[start : len(new) - end].strip() and len(line) >= _ALIKE and line not in new
    return taken and any(line in one.text for one in now[1:] if one.role == "user")


def _reminder_moved(was: _Said, now: Sequence[_Said]) -> bool:
    """Return whether a user message lost only reminders that a later user message now has."""
    if was.role != "user" or now[0].role != "user":
        return False
    (rest, had), (left, kept) = _reminders(was.text), _reminders(now[0].text)
    if rest.strip() != left.strip():
        return False
    gone = {*had} - {*kept}
    later = {
        reminder[:_SAME_REMINDER]
        for one in now[1:]
        if one.role == "user"
        for reminder in _reminders(one.text)[1]
    }
    return bool(gone) and all(
        len(one) >= _SAME_REMINDER and one[:_SAME_REMINDER] in later for one in gone
    )


def _reminders(text: str) -> tuple[str, list[str]]:
    found = [one for one in _REMINDERS.finditer(text) if one["open"] is None]
    starts, ends = [one.start() for one in found], [one.end() for one in found]
    between = zip([0, *ends], [*starts, len(text)], strict=True)
    return "".join(text[start:end] for start, end in between), [one[0] for one in found]


def _edited(was: _Said, now: _Said, where: str) -> Iterator[Difference]:
    reason = "system_changed" if now.role in SYSTEM else "edited"
    thoughts = [str(one.message.get("reasoning_content") or "") for one in (was, now)]
    if thoughts[0] != thoughts[1]:
        cause = "thinking_changed" if thoughts[1] else "thinking_dropped"
        yield _changed(where, reason, *thoughts, cause=cause)
    if was.text != now.text:
        machine = now.role in (*SYSTEM, "tool") or _REMINDER.search(now.text) is not None
        special = _special(now.role, was.text, now.text)
        yield _changed(where, reason, was.text, now.text, machine=machine, cause=special)
    calls = [[_function_of(c) for c in one.message.get("tool_calls") or ()] for one in (was, now)]
    texts = [_as_json(one) for one in calls]
    if texts[0] != texts[1]:
        told = _changed(where, reason, *texts, cause="tool_calls")
        yield replace(told, shows=_argument(*calls) or told.shows)


def _argument(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Shows | None:
    """Return both texts around the first difference between arguments that both calls have."""
    for old, new in zip(was, now, strict=False):
        before, after = _texts(old.get("arguments")), _texts(new.get("arguments"))
        if old.get("name") != new.get("name"):
            return None
        changed = [k for k in before if k in after and before[k] != after[k]]
        if changed:
            return _shows(before[changed[0]], after[changed[0]])
    return None


def _texts(arguments: Any) -> dict[str, str]:
    if not isinstance(arguments, Mapping):
        return {}
    return {k: v if isinstance(v, str) else _as_json(v) for k, v in arguments.items()}


def _special(role: str | None, old: str, new: str) -> str | None:
    at = common_characters(old, new)
    near = slice(max(0, at - _IMAGE), at + _IMAGE)
    if "[image " in old[near] or "[image " in new[near]:
        return "image"
    if role == "tool" and _CLEARED.search(new) and not _CLEARED.search(old):
        return "tool_result_cleared"
    return None


def _begins_alike(was: _Talk, now: _Talk) -> bool:
    first, second = was.all[was.heads :][:1], now.all[now.heads :][:1]
    if not first or not second or first[0].role != second[0].role:
        return False
    one, other = first[0].text, second[0].text
    share = _similar(one, other)
    return share >= 0.5 and share * max(len(one), len(other)) >= _ALIKE


def _common_ends(old: str, new: str) -> tuple[int, int]:
    """Return the lengths of the common beginning of two texts, and of the end after it."""
    start = common_characters(old, new)
    most = min(len(old), len(new)) - start
    return start, common_characters(old[::-1][:most], new[::-1][:most])


def _similar(old: str, new: str) -> float:
    """Return the common beginning and end of two texts as a part of the longer one, from 0 to 1."""
    longer = max(len(old), len(new))
    return sum(_common_ends(old, new)) / longer if longer else 1.0


def _similarity(was: str, now: str) -> float:
    lines = [Counter(text.split("\n")) for text in (was, now)]
    equal = sum(len(line) * count for line, count in (lines[0] & lines[1]).items())
    return max(_similar(was, now), equal / max(len(was), len(now), 1))


# -- template arguments and tools --------------------------------------------------------------


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=as_text)


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = tool.get("function") or tool
    return found


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(_function_of(tool).get("name")) for tool in tools]


def _tools(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[Difference]:
    old, new = [_as_json(tool) for tool in was], [_as_json(tool) for tool in now]
    if old == new:
        return []
    i = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
    at = min(len(old), len(new)) if i is None else i
    names, renamed = _names(was), _names(now)
    where = f"tools[{at}] {(renamed[at : at + 1] or names[at : at + 1])[0]}"
    before, after = (old[at : at + 1] or [""])[0], (new[at : at + 1] or [""])[0]
    cause = _tool_cause(names, renamed, at, same=sorted(old) == sorted(new))
    if cause == "tool_changed":
        change = _changed(where, "tools_changed", before, after, machine=True)
        if change.cause in _VOLATILE:
            return [change]
        return [replace(change, cause=_described(was[at], now[at]) or cause)]
    shown = excerpt(before, 0), excerpt(after, 0)
    shows = _seen_of(was[at : at + 1]), _seen_of(now[at : at + 1])
    return [Difference(where, "tools_changed", cause, *shown, shows)]


def _seen_of(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the text by which a difference between tools is found in a rendered prompt."""
    functions = [_function_of(tool) for tool in tools]
    return "".join(str(one.get("description") or one.get("name")) for one in functions)


def _described(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    old, new = dict(_function_of(was)), dict(_function_of(now))
    texts = str(old.pop("description", "")), str(new.pop("description", ""))
    return invisible_form(*texts) if old == new else None


def _tool_cause(old: list[str], new: list[str], at: int, *, same: bool) -> str:
    was, now = old[at : at + 1], new[at : at + 1]
    if same:
        return "tool_reordered"
    if was == now:
        return "tool_changed"
    inserted, removed = bool(now) and now[0] not in old, bool(was) and was[0] not in new
    if inserted and removed:
        return "tool_changed"
    if inserted or removed:
        return "tool_inserted" if inserted else "tool_removed"
    return "tool_reordered"


# -- one text ----------------------------------------------------------------------------------


def _changed(
    where: str, reason: str, old: str, new: str, *, machine: bool = False, cause: str | None = None
) -> Difference:
    """Return the difference of two texts, with the cause if it is known.

    `machine`: a program wrote them, so a changed number of no known kind is a `counter`.
    """
    at = common_characters(old, new)
    cause = cause or _cause(old, new, at, machine=machine)
    return Difference(where, reason, cause, excerpt(old, at), excerpt(new, at), _shows(old, new))


def _shows(old: str, new: str) -> Shows:
    at = common_characters(old, new)
    shown = slice(max(0, at - _CLOSE), at + _RIGHT)
    return old[shown], new[shown]


def excerpt(text: str, at: int) -> str:
    """Return up to 60 characters of the line before character `at`, and up to 140 from it on."""
    start = max(at - _LEFT, text.rfind("\n", 0, at) + 1)
    return text[start : at + _RIGHT]


def _cause(old: str, new: str, at: int, *, machine: bool) -> str:
    was, begun = _line(old, at)
    now, _ = _line(new, at)
    first = at - begun
    most = min(len(was), len(now)) - first
    same = next((i for i in range(most) if was[-1 - i] != now[-1 - i]), most)
    was_end, now_end = len(was) - same, len(now) - same
    either = causes_touching(ANNOUNCED, was, first, was_end)
    either += causes_touching(ANNOUNCED, now, first, now_end)
    if either:
        return either[0]
    if _in_git(old, at, was) or _in_git(new, at, now):
        return "git_status"
    values = causes_touching(VALUES, now, first, now_end)
    both = [cause for cause in causes_touching(VALUES, was, first, was_end) if cause in values]
    if both:
        return both[0]
    if machine and _number_at(was, first, was_end) and _number_at(now, first, now_end):
        return "counter"
    return invisible_form(was, now) or invisible_form(old, new) or "text"


def _line(text: str, at: int) -> tuple[str, int]:
    start = max(at - _LINE, text.rfind("\n", 0, at) + 1)
    end = text.find("\n", at, at + _LINE)
    return text[start : end if end >= 0 else at + _LINE], start


def _number_at(line: str, start: int, end: int) -> bool:
    return any(m.start() <= start and m.end() >= end for m in _NUMBER.finditer(line))


def _in_git(text: str, at: int, line: str) -> bool:
    near = text[max(0, at - _GIT_REACH) : at + _LINE]
    return bool(_GIT_LINE.match(line) and _GIT.search(near))


def invisible_form(old: str, new: str) -> str | None:
    if old == new:
        return None
    if old.replace("\r\n", "\n").rstrip("\r") == new.replace("\r\n", "\n").rstrip("\r"):
        return "line_endings"
    if "".join(old.split()) == "".join(new.split()):
        return "whitespace"
    if unicodedata.normalize("NFKC", old) == unicodedata.normalize("NFKC", new):
        return "unicode_normalisation"
    return None
