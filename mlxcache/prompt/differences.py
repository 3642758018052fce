"""Differences between two conversations: template arguments, tools and messages."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxcache.common_prefix import common_characters
from mlxcache.prompt.canonical.draft import SYSTEM, Message, as_text
from mlxcache.prompt.text_change import Change, change_of, excerpt, invisible_form
from mlxcache.types import Chat, Image

Shows = tuple[str, str]

_SHIFTS = 16
"""Most messages inserted or dropped at one place that are recognised as such."""
_REASON_OF = {"history_inserted": "moved"}
"""Reason of a changed list of messages by its cause, where it is not `edited`."""
_SUMMARY = re.compile(
    r"continued from a previous conversation|conversation (?:is|was|has been) (?:summari[sz]ed"
    r"|compacted)|summary of the conversation|<(?:conversation_|context_)?summary>",
    re.IGNORECASE,
)
_IMAGE = 80
"""Number of characters around a change in which a changed image is searched."""
_CLEARED = re.compile(
    r"\[(?:Old )?tool (?:result|output|use)[^\]\n]{0,80}(?:cleared|removed|omitted)"
)
_REMINDER = re.compile(r"<system-reminder>|<env>|<context\b")
_REMINDERS = re.compile(r"<system-reminder>.*?(?:</system-reminder>\s*|(?P<open>\Z))", re.DOTALL)
"""A reminder, or the rest of a text from one that has no end, which is found only once so."""
_SAME_REMINDER = 40
"""Fewest equal characters at the start of two reminders that count as the same reminder."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One difference between two conversations.

    `where`: part of the later conversation, such as `system`, `tools[2] Read` or `messages[5]
    user`. `reason`, `cause`: kind of the difference, in general and in detail, such as `edited` and
    `date`. `before`, `after`: excerpts of the earlier and the later text. `shows`: the earlier and
    the later text right at the difference, by which it is found in the rendered prompts.
    """

    where: str
    reason: str
    cause: str
    before: str
    after: str
    shows: Shows


def _message_differences(was: Sequence[Message], now: Sequence[Message]) -> Iterator[Difference]:
    """Yield the differences between messages of two conversations, in order.

    Stops after the first index at which the later conversation has another message, not an edited
    one, for example because one was inserted or dropped, or a summary replaced the history.
    """
    seen = [_key(m) for m in was], [_key(m) for m in now]
    for i in range(min(len(was), len(now))):
        if seen[0][i] == seen[1][i]:
            continue
        taken = _reminder_moved(was[i], now[i:]) or _text_moved(was[i], now[i:])
        cause = None if taken or _in_place(was, now, seen, i) else _moved(was, now, seen, i)
        if cause == "message_dropped" and _heads(now) <= i < _heads(was):
            yield _difference("system", "system_changed", change_of(_text_of(was[i]), ""))
            return
        if cause is not None:
            role = now[i].get("role")
            head = cause != "compaction" and role in SYSTEM and i < _heads(now)
            reason = "system_changed" if head else _REASON_OF.get(cause, "edited")
            change = change_of(_text_of(was[i]), _text_of(now[i]), machine=True)
            yield _difference(_place(now, i), reason, change, cause)
            return
        for one in _edited(was[i], now[i], _place(now, i)):
            yield replace(one, reason="moved", cause="reminder_moved") if taken else one


def _place(messages: Sequence[Message], i: int) -> str:
    return "system" if i < _heads(messages) else f"messages[{i}] {messages[i].get('role')}"


def _in_place(
    was: Sequence[Message], now: Sequence[Message], seen: tuple[list[str], list[str]], i: int
) -> bool:
    """Return whether message `i` was edited, and not inserted or dropped.

    That is assumed if both conversations have a message of the same role there, and it is a system
    message at the start, or the next messages of both are equal. `was`, `now`: messages of the
    earlier and the later conversation. `seen`: both lists with each message as JSON.
    """
    following = [keys[i + 1 : i + 2] for keys in seen]
    goes_on = bool(following[0]) and following[0] == following[1]
    return was[i].get("role") == now[i].get("role") and (i < _heads(now) or goes_on)


def _moved(
    was: Sequence[Message], now: Sequence[Message], seen: tuple[list[str], list[str]], i: int
) -> str | None:
    """Return the cause, such as `compaction`, why another message is at index `i` than before.

    Returns None if message `i` was edited in place. `was`, `now`: messages of the earlier and the
    later conversation. `seen`: both lists with each message as JSON.
    """
    old, new = seen
    tail = bool({*old[i:]} & {*new[i:]})
    summary = any(_SUMMARY.search(_text_of(m)) for m in now[i : i + 2])
    fewer = not tail or len(now) < len(was)  # a summary may be followed by the newest messages
    if summary and fewer and not _SUMMARY.search(_text_of(was[i])):
        return "compaction"
    if _history_inserted(was, now, i):
        return "history_inserted"
    shifted = _shifted(now, seen, i) or _shifted_and_edited(was, now, i)
    if shifted is not None:
        return shifted
    same_role = was[i].get("role") == now[i].get("role")
    alike = tail or len(now) > len(was) or _similar(_text_of(was[i]), _text_of(now[i])) >= 0.3
    if same_role and (alike or _begins_again(was, now, i)):
        return None
    early = i <= _heads(now) + 1 and len(now) < len(was)
    if early and len(was) - i > 1 and not tail:
        return "compaction"
    return "text" if tail else "rewound"


def _begins_again(was: Sequence[Message], now: Sequence[Message], i: int) -> bool:
    """Return whether message `i` alone follows the system text of `now`, and begins as in `was`.

    It must share at least `ALIKE` leading characters with message `i` of `was`. It is then the
    first message of a new session, not a summary: clients begin all first messages with
    the same reminders. `was`, `now`: messages of the earlier and the later conversation.
    """
    only = i == _heads(now) == len(now) - 1
    return only and common_characters(_text_of(was[i]), _text_of(now[i])) >= ALIKE


def _text_moved(was: Message, now: Sequence[Message]) -> bool:
    """Return whether a user message lost only a text that a later user message now has.

    `was`: the message in the earlier conversation. `now`: the same message in the later one, and
    all messages after it. The text is equal in both places, and need not be between tags.
    """
    old, new = _text_of(was), _text_of(now[0])
    if was.get("role") != "user" or now[0].get("role") != "user" or len(new) >= len(old):
        return False
    start = common_characters(old, new)
    most = len(new) - start
    end = common_characters(old[::-1][:most], new[::-1][:most])
    line = max(old[start : len(old) - end].splitlines(), key=len, default="").strip()
    taken = not new[start : len(new) - end].strip() and len(line) >= ALIKE and line not in new
    return taken and any(line in _text_of(m) for m in now[1:] if m.get("role") == "user")


def _history_inserted(was: Sequence[Message], now: Sequence[Message], i: int) -> bool:
    """Return whether replies were inserted before message `i` of the earlier conversation.

    That message is then, almost unchanged, among the last ones of the later conversation. This
    happens with clients that send a text after the history: a sub-agent its instruction, other
    clients the content of files. `was`, `now`: messages of the earlier and the later conversation.
    """
    most = min(len(was) - i, _SHIFTS)
    for end in range(max(i + 1, len(now) - most), len(now)):
        replied = any(m.get("role") in ("assistant", "tool") for m in now[i:end])
        if replied and _nearly(was[i], now[end]):
            return True
    return False


def _reminder_moved(was: Message, now: Sequence[Message]) -> bool:
    """Return whether a user message lost only reminders that a later user message now has.

    `was`: the message in the earlier conversation. `now`: the same message in the later one, and
    all messages after it. This happens with clients that put a reminder only into the newest
    message.
    """
    if was.get("role") != "user" or now[0].get("role") != "user":
        return False
    old, new = _text_of(was), _text_of(now[0])
    (rest, had), (left, kept) = _reminders(old), _reminders(new)
    if rest.strip() != left.strip():
        return False
    gone = {*had} - {*kept}
    later = {
        one[:_SAME_REMINDER]
        for m in now[1:]
        if m.get("role") == "user"
        for one in _reminders(_text_of(m))[1]
    }
    return bool(gone) and all(
        len(one) >= _SAME_REMINDER and one[:_SAME_REMINDER] in later for one in gone
    )


def _reminders(text: str) -> tuple[str, list[str]]:
    """Return a text without its reminders, and the reminders."""
    found = [one for one in _REMINDERS.finditer(text) if one["open"] is None]
    starts, ends = [one.start() for one in found], [one.end() for one in found]
    between = zip([0, *ends], [*starts, len(text)], strict=True)
    return "".join(text[start:end] for start, end in between), [one[0] for one in found]


def _shifted(now: Sequence[Message], seen: tuple[list[str], list[str]], i: int) -> str | None:
    """Return the cause, such as `message_dropped`, if a message was inserted or dropped at `i`.

    It was inserted if message `i` of the earlier conversation is among the 16 messages after `i`
    of the later one, unchanged, and dropped if the same holds with the conversations exchanged.
    Returns None otherwise. `now`: messages of the later conversation. `seen`: messages of the
    earlier and of the later conversation, each as JSON.
    """
    old, new = seen
    for shift in range(1, _SHIFTS + 1):
        if new[i + shift : i + shift + 1] == old[i : i + 1]:
            return _inserted(now[i])
        if old[i + shift : i + shift + 1] == new[i : i + 1]:
            return "message_dropped"
    return None


def _shifted_and_edited(was: Sequence[Message], now: Sequence[Message], i: int) -> str | None:
    """Return the cause, such as `message_dropped`, if a message was inserted or dropped at `i`.

    It was inserted if message `i` of the earlier conversation is among the 16 messages after `i`
    of the later one, with the same role and almost the same text, and dropped if the same holds
    with the conversations exchanged. Returns None otherwise, and if both messages `i` have the same
    role. `was`, `now`: messages of the earlier and the later conversation.
    """
    if was[i].get("role") == now[i].get("role"):
        return None
    if any(_nearly(was[i], later) for later in now[i + 1 : i + 1 + _SHIFTS]):
        return _inserted(now[i])
    if any(_nearly(later, now[i]) for later in was[i + 1 : i + 1 + _SHIFTS]):
        return "message_dropped"
    return None


def _inserted(message: Message) -> str:
    volatile = change_of("", _text_of(message), machine=True).cause
    return volatile if volatile in ("counter", "git_status") else "message_inserted"


def _nearly(was: Message, now: Message) -> bool:
    """Return whether two messages have the same role and almost equal texts."""
    texts = _text_of(was), _text_of(now)
    return was.get("role") == now.get("role") and any(texts) and _similar(*texts) >= 0.8


def _edited(was: Message, now: Message, where: str) -> Iterator[Difference]:
    """Yield the differences in thinking, text and tool calls between two versions of a message.

    `where`: the message's place in the conversation, such as `messages[5] user`.
    """
    role = str(now.get("role"))
    reason = "system_changed" if role in SYSTEM else "edited"
    if (was.get("reasoning_content") or "") != (now.get("reasoning_content") or ""):
        old, new = str(was.get("reasoning_content") or ""), str(now.get("reasoning_content") or "")
        cause = "thinking_changed" if new else "thinking_dropped"
        yield _difference(where, reason, change_of(old, new), cause)
    old, new = _text_of(was), _text_of(now)
    if old != new:
        machine = role in SYSTEM or role == "tool" or _REMINDER.search(new) is not None
        change = change_of(old, new, machine=machine)
        yield _difference(where, reason, change, _special(role, old, new, change))
    calls = [[_function_of(c) for c in m.get("tool_calls") or ()] for m in (was, now)]
    if _as_json(calls[0]) != _as_json(calls[1]):
        told = _difference(where, reason, change_of(*map(_as_json, calls)), "tool_calls")
        yield replace(told, shows=_argument(*calls) or told.shows)


def _argument(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Shows | None:
    """Return the old and new text around the first difference between the arguments of calls.

    `was`, `now`: function objects of the calls of the earlier and of the later message, compared in
    pairs. Only arguments that both calls of a pair have are compared. Returns None if there is no
    difference, or a pair with different tool names comes first.
    """
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
    return {k: v if isinstance(v, str) else _as_json(v) for k, v in arguments.items()}


def _special(role: str, old: str, new: str, change: Change) -> str | None:
    """Return `image` or `tool_result_cleared` if that is why a message changed, else None.

    `role`: that of the message. `old`, `new`: its earlier and its later text. `change`: the change
    of `old` into `new`.
    """
    near = slice(max(0, change.at - _IMAGE), change.at + _IMAGE)
    if "[image " in old[near] or "[image " in new[near]:
        return "image"
    if role == "tool" and _CLEARED.search(new) and not _CLEARED.search(old):
        return "tool_result_cleared"
    return None


# -- messages ----------------------------------------------------------------------------------


def _similar(old: str, new: str) -> float:
    """Return the length of the common beginning and end of two texts, as a part of the longer one.

    The result is from 0 to 1.
    """
    longer = max(len(old), len(new))
    if not longer:
        return 1.0
    start = common_characters(old, new)
    most = min(len(old), len(new)) - start
    end = common_characters(old[::-1][:most], new[::-1][:most])
    return (start + end) / longer


def _heads(messages: Sequence[Message]) -> int:
    return next((i for i, m in enumerate(messages) if m.get("role") not in SYSTEM), len(messages))


def _key(message: Message) -> str:
    return json.dumps(message, sort_keys=True, ensure_ascii=False, default=as_text)


def _text_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(
            f"[image {part.digest.hex()}]" if isinstance(part, Image) else str(part)
            for part in content
        )
    return str(content or "")


def _as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=as_text)


def _function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function object of a tool or a call."""
    found: Mapping[str, Any] = tool.get("function") or tool
    return found


def _difference(where: str, reason: str, change: Change, cause: str | None = None) -> Difference:
    return Difference(
        where, reason, cause or change.cause, change.before, change.after, change.shows
    )


_VOLATILE = frozenset({"date", "uuid", "counter", "git_status", "hash", "temp_path"})
ALIKE = 24
"""Fewest characters that two first messages share to count as the same.

Many messages begin with "What is".
"""


def differences(old: Chat, new: Chat) -> list[Difference]:
    """Return the differences between two conversations: template arguments, tools, then messages.

    Messages that only one of them has at its end are no difference. So the result is empty if one
    conversation only continues the other.
    """
    return [
        *_arguments(old, new),
        *_tools(old.tools, new.tools),
        *_message_differences(old.messages, new.messages),
    ]


def first_new(old: Chat, new: Chat) -> int:
    """Return how many messages at the start of `new` belong to the conversation `old`.

    Messages edited since then, and the reply to `old`, are counted.
    """
    was, now = old.messages, new.messages
    begin = _heads(now)
    known = {_key(message) for message in was if message.get("role") not in SYSTEM}
    known |= {_key(message) for message in was[_heads(was) :]}
    last = max((i + 1 for i in range(begin, len(now)) if _key(now[i]) in known), default=begin)
    aligned = len(was) - _heads(was)
    begun = now[begin : begin + aligned]
    if last > begin or _alike(was, now):
        roles = [m.get("role") for m in begun] == [m.get("role") for m in was[_heads(was) :]]
        if roles and len(now) > begin + aligned:
            last = max(last, begin + aligned)
    ended = bool(was) and last > begin and _role(now, last) == "assistant"
    answers = _key(now[last - 1]) == _key(was[-1]) or last == begin + aligned
    return last + 1 if ended and answers else last


_SAME_HEAD = 0.75
"""Equal part of two system texts, and of the names of tools, that makes them almost the same."""


def related(old: Chat, new: Chat) -> bool:
    """Return whether `new` continues `old`, or has almost the same tools and system text.

    `new` continues `old` if it has a message of `old` or a similar first message, and also a
    similar system text or tools of the same names. An equal message alone is not enough: a client
    sends the same words to the model to get a title, and a sub-agent reads the history of another.
    """
    was, now = _head(old), _head(new)
    names = {*_names(old.tools)}, {*_names(new.tools)}
    same_tools = names[0] == names[1]
    similarity = 1.0 if was == now else _similarity(was, now) if was and now else 0.0
    alike = similarity >= 0.5
    if alike and same_tools and (now or names[1]):
        return True
    common = len(names[0] & names[1]) / max(1, len(names[0] | names[1]))
    if similarity >= _SAME_HEAD <= common:
        return True  # a client's terminal and its -p, with almost the same tools
    return (alike or (same_tools and bool(names[1]))) and _has_messages_of(old, new)


def begins_anew(first: Difference | None, new: Chat) -> bool:
    """Return whether `new` is a new conversation, with the system text and tools of an earlier one.

    The first message after the system text is then another one, not an edited one, and no message
    of the earlier conversation follows. `first`: the first difference from the earlier
    conversation, None if there is none.
    """
    at = _place(new.messages, _heads(new.messages))
    return first is not None and first.cause == "rewound" and first.where == at


def _has_messages_of(old: Chat, new: Chat) -> bool:
    """Return whether two conversations have an equal message, or nearly the same first message.

    System messages do not count.
    """
    known = {_key(m) for m in old.messages if m.get("role") not in SYSTEM}
    return any(_key(m) in known for m in new.messages) or _alike(old.messages, new.messages)


def _similarity(was: str, now: str) -> float:
    """Return the equal part of two texts, from 0 to 1.

    It is the larger of two shares of the longer text: of the characters of the common beginning and
    end, and of the characters of the lines that both have.
    """
    lines = [Counter(text.split("\n")) for text in (was, now)]
    equal = sum(len(line) * count for line, count in (lines[0] & lines[1]).items())
    return max(_similar(was, now), equal / max(len(was), len(now), 1))


def _alike(was: Sequence[Message], now: Sequence[Message]) -> bool:
    """Return whether the first messages of two conversations, after the system text, nearly agree.

    They have the same role, and their common beginning and end are at least half of the longer text
    and at least `ALIKE` characters. System text: the system messages at the start.
    """
    first, second = was[_heads(was) :][:1], now[_heads(now) :][:1]
    if not first or not second or first[0].get("role") != second[0].get("role"):
        return False
    one, other = _text_of(first[0]), _text_of(second[0])
    share = _similar(one, other)
    return share >= 0.5 and share * max(len(one), len(other)) >= ALIKE


def _head(chat: Chat) -> str:
    return "\n\n".join(_text_of(m) for m in chat.messages[: _heads(chat.messages)])


def _role(messages: Sequence[Message], index: int) -> str | None:
    return messages[index].get("role") if index < len(messages) else None


# -- template arguments and tools --------------------------------------------------------------


def _arguments(old: Chat, new: Chat) -> Iterator[Difference]:
    was, now = dict(old.template_args), dict(new.template_args)
    if was != now:
        where, reason, cause = "template arguments", "template_drift", "template_args"
        yield Difference(where, reason, cause, _as_json(was), _as_json(now), ("", ""))


def _names(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    return [str(_function_of(tool).get("name")) for tool in tools]


def _tools(was: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> list[Difference]:
    old, new = [_as_json(tool) for tool in was], [_as_json(tool) for tool in now]
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
        return [_difference(where, "tools_changed", change, cause)]
    shown = excerpt(before, 0), excerpt(after, 0)
    shows = _seen_of(was[at : at + 1]), _seen_of(now[at : at + 1])
    return [Difference(where, "tools_changed", cause, *shown, shows)]


def _seen_of(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the descriptions of tools, or names if they have none, joined into one string.

    This string is compared to find where a difference between tools is in a rendered prompt.
    """
    functions = [_function_of(tool) for tool in tools]
    return "".join(str(one.get("description") or one.get("name")) for one in functions)


def _described(was: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the kind of an invisible difference between the descriptions of two tools.

    The kinds are `line_endings`, `whitespace` and `unicode_normalisation`. Returns None if the
    descriptions differ visibly, or anything else differs.
    """
    old, new = dict(_function_of(was)), dict(_function_of(now))
    texts = str(old.pop("description", "")), str(new.pop("description", ""))
    return invisible_form(*texts) if old == new else None


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
