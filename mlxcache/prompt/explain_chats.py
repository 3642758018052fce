"""What tells two conversations apart that were meant to be one: tools, arguments, messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlxcache.prompt.explain_messages import (
    SYSTEM,
    Difference,
    Message,
    as_json,
    difference,
    function_of,
    heads,
    key,
    message_differences,
    similar,
    text_of,
)
from mlxcache.prompt.explain_text import change_of, excerpt, form
from mlxcache.types import Chat

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
