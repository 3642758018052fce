"""Explanation of where and why a prompt differs from an earlier one that it should continue."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mlxcache.common_prefix import common_characters, common_length
from mlxcache.lru import LatestByGroup
from mlxcache.prompt.advice import advice_for
from mlxcache.prompt.canonical.canonicaliser import Canonical
from mlxcache.prompt.differences import Difference, begins_anew, differences, first_new, related
from mlxcache.prompt.incremental import Tokenised
from mlxcache.prompt.replies import PromptKey
from mlxcache.prompt.shared_runs import Runs, shared_runs
from mlxcache.types import Chat, Tokens

LEAST_LOSS = 64
"""Largest loss, in tokens, that is ignored.

Templates change a few tokens at the end of each turn.
"""

RULE_OF = {
    "tool_reordered": "tool_order",
    "tool_calls": "argument_order",
    "tool_result_cleared": "cleared_results",
    "reminder_moved": "date_reminder",
}
"""Canonicalisation rule that removes a cause, for rules with another name than the cause."""

_NEAR = 600
"""Characters around the first difference of two texts within which its cause must be visible."""
_OPENS = re.compile(r"<think|<\|channel\|>analysis|\[THINK", re.IGNORECASE)
_CLOSES = re.compile(r"\s*(?:</think|\[/THINK)", re.IGNORECASE)
"""Markers that close thinking at the start of a text; `_OPENS` has those that open it."""
_BACK, _AHEAD = 12, 40
"""Number of tokens shown before and after the first difference of two prompts."""


@dataclass(frozen=True, slots=True, eq=False)
class Source:
    """Origin of a prompt: the conversation as `sent`, as `canonical`, and as tokenised text.

    `generation`: character of the tokenised text at which the generation prompt starts, or the
    text's length if there is none. `key`: identifies the prompt, to find replies to it. `replies`:
    keys of the known replies in it.
    """

    sent: Chat
    canonical: Canonical
    tokenised: Tokenised
    generation: int
    key: PromptKey | None = None
    replies: tuple[bytes, ...] = ()

    @property
    def chat(self) -> Chat:
        """The conversation after canonicalisation."""
        return self.canonical.chat

    @property
    def nbytes(self) -> int:
        """Bytes of memory used; the conversation is assumed to be as large as its text."""
        return self.tokenised.nbytes + 4 * len(self.tokenised.text)


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One of two compared prompts.

    `source`: the conversation from which it was rendered. `ids`: token ids of the prompt and, if it
    was served, of its reply, shape (n,).
    """

    source: Source
    ids: Tokens


@dataclass(frozen=True, slots=True)
class Explanation:
    """The first difference between two prompts, if it comes before the new messages.

    `at_token`: number of shared leading tokens. `new_from`: token of the later prompt at which
    messages begin that the earlier prompt and its reply did not have. `again`: half-open ranges of
    token positions of the later prompt, from `at_token` to `new_from`, whose tokens the earlier
    prompt had too: they are computed a second time.
    `first`: the difference, or None if nothing, or only a few tokens of the last reply, differ
    before `new_from`, or if the prompts are not `related`. `later`: further differences. `removed`:
    differences between the requests as sent that canonicalisation removed, each as (name of the
    rule, difference). `related`: see `differences.related`; False also if the later prompt begins a
    new conversation with the same tools and system text.
    """

    at_token: int
    new_from: int
    first: Difference | None = None
    later: tuple[Difference, ...] = ()
    removed: tuple[tuple[str, Difference], ...] = ()
    again: Runs = ()
    related: bool = True

    @property
    def lost_tokens(self) -> int:
        """Number of tokens that the earlier prompt had too and that are computed again."""
        return sum(end - start for start, end in self.again)

    @property
    def advice(self) -> str:
        """Advice for users on `first`, and if its reason is `moved`, on all moves in `later`.

        If `first` is None, it is the advice for a new conversation.
        """
        if self.first is None:
            return advice_for("new_conversation")
        reason, causes = self.first.reason, [self.first.cause]
        if reason == "moved":
            causes += [one.cause for one in self.later if one.reason == "moved"]
        return " ".join(advice_for(cause, reason) for cause in dict.fromkeys(causes))


class Explainer:
    """Compares prompts of one model. Thread-safe.

    `message_position(source, n)` returns the token position of message `n`; see `PromptBuilder`.
    `decode(ids)` returns the text of token ids.
    """

    def __init__(
        self, message_position: Callable[[Source, int], int], decode: Callable[[Sequence[int]], str]
    ):
        self.message_position = message_position
        self.decode = decode

    def explain(self, old: Side, new: Side, computed: int | None = None) -> Explanation:
        """Return the first difference of prompt `new` from prompt `old`, and its cause.

        `computed`: number of leading tokens of `old` whose KV was computed; all by default.
        """
        found = self._explain(old, new)
        chats = old.source.chat, new.source.chat
        if begins_anew(found.first, chats[1]) or not related(*chats):
            later = found.later if found.first is None else (found.first, *found.later)
            # messages of another conversation are not changed ones
            later = tuple(one for one in later if not one.where.startswith("messages["))
            found = replace(found, first=None, later=later, related=False)
        again: Runs = ()
        if found.first is not None:
            at, before = found.at_token, old.ids[:computed]
            runs = shared_runs(before[at:], new.ids[at : found.new_from])
            again = tuple((at + start, at + end) for start, end in runs)
        return replace(found, removed=_removed(old.source, new.source), again=again)

    def _explain(self, old: Side, new: Side) -> Explanation:
        shared = common_length(old.ids, new.ids)
        was, now = old.source, new.source
        new_from = self.message_position(now, first_new(was.chat, now.chat))
        found = differences(was.chat, now.chat)
        generation = self.message_position(was, len(was.chat.messages))
        whole = shared >= min(generation, len(old.ids)) and not found
        if whole and (shared + LEAST_LOSS >= min(len(old.ids), new_from)):
            return Explanation(shared, new_from)
        seen = self._visible_difference(found, was, now)
        if seen is None:
            if shared >= new_from or (found and shared >= min(generation, len(old.ids))):
                return Explanation(shared, new_from, later=tuple(found))
            return Explanation(shared, new_from, self._drift(old, new, shared), tuple(found))
        later = tuple(one for one in found if one is not seen)
        return Explanation(shared, new_from, seen, later)

    def _visible_difference(
        self, found: Sequence[Difference], was: Source, now: Source
    ) -> Difference | None:
        """Return the one of `found` that is visible where the two rendered texts first differ.

        If none is visible there, returns a difference of template arguments in `found`, else None.
        Also returns None if `now` has all text of `was` up to the generation prompt of `was`.
        `was`, `now`: the earlier and the later prompt.
        """
        old, new = was.tokenised.text, now.tokenised.text
        at = common_characters(old, new)
        if at >= min(len(old), was.generation):
            return None
        near = slice(max(0, at - _NEAR), at + _NEAR)
        sides = _squeezed(old[near]), _squeezed(new[near])
        for one in found:
            shown = [_squeezed(text)[:_BACK] for text in one.shows]
            if any(shown) and all(text in side for text, side in zip(shown, sides, strict=True)):
                return one
        return next((one for one in found if one.cause == "template_args"), None)

    def _drift(self, old: Side, new: Side, shared: int) -> Difference:
        """Return the difference of two prompts whose tokens differ where their messages are equal.

        The template rendered the messages in another way, or a reply was not replayed. `shared`:
        number of shared leading tokens.
        """
        start = max(0, shared - _BACK)
        before, after = (self._text(side, start, shared + _AHEAD) for side in (old, new))
        parted = [self._text(side, shared, shared + _AHEAD) for side in (old, new)]
        opens, closes = (
            [bool(look(text)) for text in parted] for look in (_OPENS.search, _CLOSES.match)
        )
        thinking = opens[0] != opens[1] or closes[0] != closes[1]
        thinking = thinking or _reasons(new.source.chat) != _reasons(old.source.chat)
        cause = "thinking_dropped" if thinking else "rerendered"
        return Difference("history", "template_drift", cause, before, after, ("", ""))

    def _text(self, side: Side, start: int, end: int) -> str:
        return self.decode([int(i) for i in side.ids[start:end] if i >= 0])


def _removed(old: Source, new: Source) -> tuple[tuple[str, Difference], ...]:
    """Return the differences that canonicalisation removed, as (name of the rule, difference)."""
    rules = {*old.canonical.rules, *new.canonical.rules}
    if not rules:
        return ()
    left = {(one.cause, one.before, one.after) for one in differences(old.chat, new.chat)}
    found = [
        (RULE_OF.get(one.cause, one.cause), one)
        for one in differences(old.sent, new.sent)
        if (one.cause, one.before, one.after) not in left
    ]
    return tuple((rule, one) for rule, one in found if rule in rules)


def _reasons(chat: Chat) -> list[Any]:
    return [m["reasoning_content"] for m in chat.messages if m.get("reasoning_content")]


def _squeezed(text: str) -> str:
    """Return the letters and digits of a text, for comparison.

    Other characters, and escapes of JSON, may be changed by a template.
    """
    return re.sub(r"\\[nrtbf\"\\]|[\W_]", "", text)


@dataclass(frozen=True, slots=True, eq=False)
class EarlierPrompt:
    """A prompt that was served.

    `session`: label of its session, or None. `side`: the prompt with its reply. `computed`: number
    of the leading tokens of `side.ids` whose KV existed when the request ended. `owner`: owner of
    the request, or None if the server has at most one key.
    """

    session: str | None
    side: Side
    computed: int
    owner: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of memory used."""
        return self.side.source.nbytes + self.side.ids.nbytes


class EarlierPrompts:
    """The latest prompts of each session, for comparison with the next one.

    At most `each` per session and owner, `count` in all, and `limit` bytes are kept; the oldest are
    dropped.
    """

    def __init__(self, *, count: int = 64, each: int = 4, limit: int = 64 << 20):
        self._held: LatestByGroup[tuple[str | None, str | None], EarlierPrompt] = LatestByGroup(
            each=each, count=count, limit=limit, size=lambda one: one.nbytes
        )

    def add(self, new: EarlierPrompt) -> None:
        """Add a prompt, and drop the prompts of its session and owner that it continues.

        It continues a prompt if it begins with at least three quarters of that prompt's tokens.
        """
        ids, group = new.side.ids, (new.session, new.owner)
        continued = [
            one
            for one in self._held.of(group)
            if common_length(one.side.ids, ids) >= 0.75 * len(one.side.ids)
        ]
        self._held.add(group, new, replaced=continued)

    def all(self) -> list[EarlierPrompt]:
        """Return a copy of the list of prompts, oldest first."""
        return [one for _, one in self._held.items()]

    @staticmethod
    def ranked(
        held: list[EarlierPrompt], session: str | None, ids: Tokens
    ) -> list[tuple[EarlierPrompt, int]]:
        """Return the prompts `held`, each with the number of leading tokens it shares with `ids`.

        `held`: prompts, oldest first. `session`, `ids`: session label and token ids of the prompt
        to compare with. Prompts of the same session come first, then the others; in each group,
        those that share more tokens come first, and the newest of those that share as many.
        """
        found = [(one, common_length(one.side.ids, ids)) for one in reversed(held)]
        return sorted(found, key=lambda pair: (pair[0].session != session, -pair[1]))


def first_related(found: list[tuple[EarlierPrompt, int]], side: Side) -> EarlierPrompt | None:
    """Return the first prompt of a result of `EarlierPrompts.ranked` that is related to `side`.

    Returns None if none is. See `differences.related`.
    """
    for candidate, _ in found:
        if related(candidate.side.source.chat, side.source.chat):
            return candidate
    return None
