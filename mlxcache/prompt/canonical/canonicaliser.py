"""All rules, in order, on a whole conversation."""

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
    environment,
    git_status,
    thinking,
    tool_order,
    uuids,
)
from mlxcache.prompt.canonical.draft import Draft
from mlxcache.types import Chat, ToolCall

LENGTHENING = ("cleared_results", "thinking")
"""The rules that make a prompt longer than what the client sent."""

MOST_ORDERS = 256
"""Sets of tools whose order is remembered."""

MOST_PLACES = 4096
"""Places of git statuses that are remembered."""

MOST_CHARACTERS = 16 << 20
"""Characters of calls' arguments that are remembered, and of results."""


@dataclass(frozen=True, slots=True)
class Canonical:
    """A conversation without its noise.

    `rules` are those that changed something, in the order of the table. `names` are what the model
    may write, and what the client is to read in its place. `history` is the digest of the messages,
    empty where thinking is not remembered.
    """

    chat: Chat
    rules: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    history: bytes = b""


class Canonicaliser:
    """Applies the rules that are on, and remembers what some of them need. Safe in any thread.

    `rules` says of each rule whether it is on; those it does not name are as `RULES` has them.
    `thought`: which replies with thinking are known; None: no model answers.
    """

    def __init__(
        self, rules: Mapping[str, bool] | None = None, thought: thinking.Thought | None = None
    ):
        self._on = {**RULES, **(rules or {})}
        self._thought = thought
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
        """A conversation as it is to be rendered. Raises nothing.

        `session` is a label under which something may be remembered. `stop`: the strings that end
        the reply. `without`: rules that are off this time.
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
            return Canonical(chat)  # there was nothing but noise: let the model see it
        if on["environment"] and environment.apply(draft):
            draft.hits.add("environment")
        if on["uuid"] and uuids.apply(draft, stop):
            draft.hits.add("uuid")
        self._remembering(draft, on)
        if status:
            git_status.place(draft, status, self._places, session)
            draft.hits.add("git_status")
        history = b""
        if on["thinking"] and self._thought is not None:
            history = thinking.apply(draft, self._thought)
        if not draft.hits:
            return Canonical(chat, history=history)
        rules = tuple(r for r in RULES if r in draft.hits)
        return Canonical(draft.chat(), rules, draft.names, history)

    def _remembering(self, draft: Draft, on: Mapping[str, bool]) -> None:
        """Apply the rules that go by what came before."""
        if on["tool_order"] and tool_order.apply(draft, self._orders):
            draft.hits.add("tool_order")
        if on["argument_order"] and argument_order.apply(draft, self._calls):
            draft.hits.add("argument_order")
        if on["cleared_results"] and cleared.apply(draft, self._results):
            draft.hits.add("cleared_results")

    def is_on(self, rule: str) -> bool:
        """Whether a rule is on."""
        return self._on[rule]

    def remember_call(self, call: ToolCall) -> None:
        """Take note of a call that the model wrote."""
        if self._on["argument_order"]:
            argument_order.remember_call(call, self._calls)
