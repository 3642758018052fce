"""The canonicaliser: applies all rules of canonicalisation, in order, to a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mlxcache.config.rules import RULES
from mlxcache.lru import LRU
from mlxcache.prompt.canonical import moved, remembered, removed, uuids
from mlxcache.prompt.canonical.draft import Draft, History, Message
from mlxcache.prompt.replies import DecodedReply
from mlxcache.types import TEXTS, Chat, ToolCall

LENGTHENING = ("cleared_results", "thinking")
"""Rules that can make a prompt longer than the client's text."""

MOST_TOOLS = 64 << 10
"""Most tools whose order is remembered, those of all requests together."""

MOST_CHARACTERS = 16 << 20
"""Most characters of call arguments, of tool results, and of git statuses that are remembered."""

OVERHEAD = 256
"""Characters added to those of each call or status."""


KnownReply = Callable[[bytes, Mapping[str, Any], Sequence[Mapping[str, Any]]], DecodedReply | None]
"""Callable that looks up the reply of which a message is a copy; see `Replay.find_reply`."""


@dataclass(frozen=True, slots=True)
class Found:
    """Known and unknown replies in a conversation.

    `history`: digest of all messages. `keys`: of the known replies. `asked`: another digest, which
    does not depend on the content of replies. `unknown`: for each reply that is not known, such a
    digest of the messages before it.
    """

    history: bytes = b""
    keys: tuple[bytes, ...] = ()
    asked: bytes = b""
    unknown: tuple[bytes, ...] = ()


NOTHING = Found()


@dataclass(frozen=True, slots=True)
class Canonical:
    """A canonicalised conversation, with the names of the rules that changed something.

    `names` maps texts that the model may write to the texts that the client gets instead.
    """

    chat: Chat
    rules: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    found: Found = NOTHING


class Canonicaliser:
    """Applies the enabled rules, and stores what some of them remember. Thread-safe.

    `rules` overrides defaults. Without `known_reply`, no replies are looked up.
    """

    def __init__(
        self,
        rules: Mapping[str, bool] | None = None,
        known_reply: KnownReply | None = None,
    ):
        self._on = {**RULES, **(rules or {})}
        self._on["counter"] &= not self._on["newest_counter"]
        self._known_reply = known_reply
        self._orders: remembered.Orders = LRU(MOST_TOOLS, len)
        self._calls: remembered.Calls = LRU(MOST_CHARACTERS, lambda kept: kept[1] + OVERHEAD)
        self._results: remembered.Results = LRU(MOST_CHARACTERS, len)
        self._places: moved.Places = LRU(MOST_CHARACTERS, lambda text: len(text) + OVERHEAD)

    def canonicalise(
        self,
        chat: Chat,
        session: str | None = None,
        stop: Sequence[str] = (),
        without: Sequence[str] = (),
    ) -> Canonical:
        """Return the conversation to render; `chat` itself is not changed.

        `without`: names of rules to leave out. Raises RecursionError if values are nested too
        deeply.
        """
        draft = Draft(chat)
        on = {name: state and name not in without for name, state in self._on.items()}

        def apply(rule: str, change: Callable[[Draft], bool]) -> None:
            if on[rule] and change(draft):
                draft.hits.add(rule)

        apply("attribution", removed.remove_attribution)
        apply("counter", removed.remove_counters)
        apply("newest_counter", partial(removed.remove_counters, keep=True))
        status = moved.take_status(draft) if on["git_status"] else ""
        if not draft.messages and not status:
            return Canonical(draft.given)  # all of it was machine-made: render it as it came
        apply("environment", moved.move_environment)
        apply("date_reminder", removed.remove_date_reminders)
        apply("uuid", partial(uuids.replace_uuids, stop=stop))
        apply("tool_order", partial(remembered.keep_tool_order, orders=self._orders))
        apply("argument_order", partial(remembered.keep_arguments, calls=self._calls))
        apply("cleared_results", partial(remembered.restore_results, results=self._results))
        if status:
            moved.place_status(draft, status, self._places, session)
            draft.hits.add("git_status")
        found = NOTHING
        if self._known_reply is not None and (on["thinking"] or on["replay"]):
            found = _restore_replies(
                draft, self._known_reply, thinking=on["thinking"], blanks=on["replay"]
            )
        if not draft.hits:
            return Canonical(draft.given, found=found)
        rules = tuple(r for r in RULES if r in draft.hits)
        return Canonical(draft.chat(), rules, draft.names, found)

    def is_on(self, rule: str) -> bool:
        return self._on[rule]

    def remember_call(self, call: ToolCall) -> None:
        if self._on["argument_order"]:
            remembered.remember_call(call, self._calls)


# -- rules `thinking` and `replay` -----------------------------------------------------------------
#
# Many clients send back only text and calls, or (Zed) thinking as the beginning of the text. A
# template that keeps thinking would then render a reply that differs from the computed one. Others
# strip white space, join blocks, or format the JSON of calls differently. The message gets the form
# that the model wrote. So it renders the same in each turn, after a restart, and in a prompt that
# was computed by anticipation before the client sent the message.

_ENCODE = json.JSONEncoder(default=repr).encode

_REPLY = b"reply"  # bytes that stand for any reply in the digest `Found.asked`


def _restore_replies(
    draft: Draft, known_reply: KnownReply, *, thinking: bool, blanks: bool
) -> Found:
    """Give replies in the history the form in which the model wrote them, where it is known.

    `thinking`, `blanks`: what to restore. In a reply to be continued that is only thinking, because
    the client appends the rest to the text it sent.
    """
    history, asked = History("replies"), History("asked")
    keys: list[bytes] = []
    unknown: list[bytes] = []
    for at, message in enumerate(draft.messages):
        if draft.role(at) == "assistant":
            said = known_reply(history.digest, message, draft.tools)
            plain = {key: value for key, value in message.items() if key != TEXTS}
            whole = not draft.continues or at < len(draft.messages) - 1
            if said is None:
                unknown.append(asked.digest)
            else:
                keys.append(said.key)
                inside = _thinking_is_text(plain, said)
                if inside and thinking and whole:
                    plain["content"] = said.text
                if not inside or (thinking and whole):
                    plain = _restored(
                        draft, plain, said, thinking=thinking, blanks=blanks and whole
                    )
            draft.messages[at] = plain
            history.add(plain)
            asked.add_bytes(_REPLY)
        else:
            asked.add_bytes(history.add(message))
    return Found(history.digest, tuple(keys), asked.digest, tuple(unknown))


def _thinking_is_text(message: Message, said: DecodedReply) -> bool:
    text = message.get("content")
    if message.get("reasoning_content") or not said.thinking.strip() or not isinstance(text, str):
        return False
    return "".join(text.split()) == "".join(f"{said.thinking} {said.text}".split())


def _restored(
    draft: Draft, message: Message, said: DecodedReply, *, thinking: bool, blanks: bool
) -> dict[str, Any]:
    restored = dict(message)
    if thinking and said.thinking and not message.get("reasoning_content"):
        restored["reasoning_content"] = said.thinking
        draft.hits.add("thinking")
    if not blanks:
        return restored
    for key, shown in (("content", said.text), ("reasoning_content", said.thinking)):
        if message.get(key) and message[key] != shown:
            restored[key] = shown
            draft.hits.add("replay")
    calls = message.get("tool_calls") or ()
    written = [_as_written(*pair) for pair in zip(calls, said.content.calls, strict=bool(calls))]
    if any(new is not old for new, old in zip(written, calls, strict=True)):
        restored["tool_calls"] = written
        draft.hits.add("replay")
    return restored


def _as_written(call: Mapping[str, Any], said: tuple[str, Any]) -> Mapping[str, Any]:
    function = call.get("function") or {}
    if _ENCODE(function.get("arguments")) == _ENCODE(said[1]):
        return call
    return {**call, "function": {**function, "arguments": said[1]}}
