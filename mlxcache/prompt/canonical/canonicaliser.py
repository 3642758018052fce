"""The canonicaliser: applies all rules of canonicalisation, in order, to a conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from mlxcache.config.rules import RULES
from mlxcache.lru import LRU
from mlxcache.prompt.canonical import moved, remembered, removed, replies, uuids
from mlxcache.prompt.canonical.draft import Draft
from mlxcache.types import Chat, ToolCall

LENGTHENING = ("cleared_results", "thinking")
"""Rules that can make a prompt longer than the client's text."""

MOST_ORDERS = 256

MOST_PLACES = 4096

MOST_CHARACTERS = 16 << 20
"""Most characters of call arguments, and of tool results, that are remembered."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """A canonicalised conversation, with the names of the rules that changed something.

    `names` maps texts that the model may write to the texts that the client gets instead.
    """

    chat: Chat
    rules: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    found: replies.Found = replies.NOTHING


class Canonicaliser:
    """Applies the enabled rules, and stores what some of them remember. Thread-safe.

    `rules` overrides defaults. Without `known_reply`, no replies are looked up.
    """

    def __init__(
        self,
        rules: Mapping[str, bool] | None = None,
        known_reply: replies.KnownReply | None = None,
    ):
        self._on = {**RULES, **(rules or {})}
        self._on["counter"] &= not self._on["newest_counter"]
        self._known_reply = known_reply
        self._orders: remembered.Orders = LRU(MOST_ORDERS)
        self._calls: remembered.Calls = LRU(MOST_CHARACTERS, lambda kept: kept[1])
        self._results: remembered.Results = LRU(MOST_CHARACTERS, len)
        self._places: moved.Places = LRU(MOST_PLACES)

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
            return Canonical(chat)  # all of it was machine-made: render it as it came
        apply("environment", moved.move_environment)
        apply("date_reminder", removed.remove_date_reminders)
        apply("uuid", partial(uuids.replace_uuids, stop=stop))
        apply("tool_order", partial(remembered.keep_tool_order, orders=self._orders))
        apply("argument_order", partial(remembered.keep_arguments, calls=self._calls))
        apply("cleared_results", partial(remembered.restore_results, results=self._results))
        if status:
            moved.place_status(draft, status, self._places, session)
            draft.hits.add("git_status")
        found = replies.NOTHING
        if self._known_reply is not None and (on["thinking"] or on["replay"]):
            found = replies.restore_replies(
                draft, self._known_reply, thinking=on["thinking"], blanks=on["replay"]
            )
        if not draft.hits:
            return Canonical(chat, found=found)
        rules = tuple(r for r in RULES if r in draft.hits)
        return Canonical(draft.chat(), rules, draft.names, found)

    def is_on(self, rule: str) -> bool:
        return self._on[rule]

    def remember_call(self, call: ToolCall) -> None:
        if self._on["argument_order"]:
            remembered.remember_call(call, self._calls)
