"""The canonicaliser: applies all rules of canonicalisation, in order, to a conversation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mlxcache.config.rules import RULES
from mlxcache.lru import LRU
from mlxcache.prompt.canonical import (
    argument_order,
    attribution,
    cleared,
    counter,
    date_reminder,
    environment,
    git_status,
    replies,
    tool_order,
    uuids,
)
from mlxcache.prompt.canonical.draft import Draft
from mlxcache.types import Chat, ToolCall

LENGTHENING = ("cleared_results", "thinking")
"""Rules that can make a prompt longer than the client's text."""

MOST_ORDERS = 256
"""Most sets of tools for which an order is remembered."""

MOST_PLACES = 4096
"""Most git statuses for which a position is remembered."""

MOST_CHARACTERS = 16 << 20
"""Most characters of call arguments, and of tool results, that are remembered."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """A canonicalised conversation.

    `rules`: names of the rules that changed something, in the order of `RULES`. `names` maps texts
    that the model may write to the texts that the client gets instead. `found`: which replies in
    the conversation are known; all its fields are empty if no replies are looked up.
    """

    chat: Chat
    rules: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    found: replies.Found = replies.NOTHING


class Canonicaliser:
    """Applies the enabled rules, and stores what some of them remember. Thread-safe.

    `rules` maps names of rules to whether they are enabled; for others the default in `RULES`
    applies. `known_reply(history, message, tools)` returns the reply that the model wrote and that
    `message` is a copy of, or None; `history` is the 16-byte digest of the messages before it.
    Without `known_reply`, no replies are looked up.
    """

    def __init__(
        self,
        rules: Mapping[str, bool] | None = None,
        known_reply: replies.KnownReply | None = None,
    ):
        self._on = {**RULES, **(rules or {})}
        self._known_reply = known_reply
        self._orders: tool_order.Orders = LRU(MOST_ORDERS)
        self._calls: argument_order.Calls = LRU(MOST_CHARACTERS, lambda kept: kept[1])
        self._results: cleared.Results = LRU(MOST_CHARACTERS, len)
        self._places: git_status.Places = LRU(MOST_PLACES)

    def canonicalise(
        self,
        chat: Chat,
        session: str | None = None,
        stop: Sequence[str] = (),
        without: Sequence[str] = (),
    ) -> Canonical:
        """Return the conversation to render. `chat` itself is not changed.

        `session`: label of the request's session, or None; the rule `git_status` remembers by it
        where statuses were. `stop`: stop strings of the request. `without`: names of rules to leave
        out in this call. Raises RecursionError if messages or tools are nested too deeply.
        """
        draft = Draft(chat)
        on = {name: state and name not in without for name, state in self._on.items()}
        if on["attribution"] and attribution.apply(draft):
            draft.hits.add("attribution")
        if (on["counter"] or on["newest_counter"]) and counter.apply(
            draft, keep=on["newest_counter"]
        ):
            draft.hits.add("newest_counter" if on["newest_counter"] else "counter")
        status = git_status.take(draft) if on["git_status"] else ""
        if not draft.messages and not status:
            return Canonical(chat)  # all of it was machine-made: render it as it came
        if on["environment"] and environment.apply(draft):
            draft.hits.add("environment")
        if on["date_reminder"] and date_reminder.apply(draft):
            draft.hits.add("date_reminder")
        if on["uuid"] and uuids.apply(draft, stop):
            draft.hits.add("uuid")
        self._apply_with_memory(draft, on)
        if status:
            git_status.place(draft, status, self._places, session)
            draft.hits.add("git_status")
        found = replies.NOTHING
        if self._known_reply is not None and (on["thinking"] or on["replay"]):
            found = replies.apply(
                draft, self._known_reply, thinking=on["thinking"], blanks=on["replay"]
            )
        if not draft.hits:
            return Canonical(chat, found=found)
        rules = tuple(r for r in RULES if r in draft.hits)
        return Canonical(draft.chat(), rules, draft.names, found)

    def _apply_with_memory(self, draft: Draft, on: Mapping[str, bool]) -> None:
        """Apply the rules `tool_order`, `argument_order` and `cleared_results`, if enabled.

        `on` maps the name of each rule to whether it is enabled.
        """
        if on["tool_order"] and tool_order.apply(draft, self._orders):
            draft.hits.add("tool_order")
        if on["argument_order"] and argument_order.apply(draft, self._calls):
            draft.hits.add("argument_order")
        if on["cleared_results"] and cleared.apply(draft, self._results):
            draft.hits.add("cleared_results")

    def is_on(self, rule: str) -> bool:
        """Return whether a rule is enabled."""
        return self._on[rule]

    def remember_call(self, call: ToolCall) -> None:
        """Remember the form in which the model wrote a call, for the rule `argument_order`."""
        if self._on["argument_order"]:
            argument_order.remember_call(call, self._calls)
