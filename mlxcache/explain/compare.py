"""Where and why a prompt differs from an earlier one that it should continue."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlxcache.common_prefix import common_characters, common_length
from mlxcache.explain.causes import advice_for
from mlxcache.explain.differences import Difference, begins_anew, differences, first_new, related
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.chat_prompt import ChatPrompt
from mlxcache.types import Chat, Tokens

LEAST_LOSS = 64
"""Largest loss, in tokens, that is ignored: templates change a few at the end of each turn."""

RULE_OF = {
    "tool_reordered": "tool_order",
    "tool_calls": "argument_order",
    "tool_result_cleared": "cleared_results",
    "reminder_moved": "date_reminder",
}
"""Canonicalisation rule that removes a cause, for rules with another name than the cause."""

LEAST_RUN = 16
"""Fewest equal tokens in sequence that count; shorter sequences are often equal by chance."""

_NEAR = 600
"""Characters around the first difference of two texts within which its cause must be visible."""
_OPENS = re.compile(r"<think|<\|channel\|>analysis|\[THINK", re.IGNORECASE)
_CLOSES = re.compile(r"\s*(?:</think|\[/THINK)", re.IGNORECASE)
_BACK, _AHEAD = 12, 40
"""Number of tokens shown before and after the first difference of two prompts."""
_BLOCK = 8
"""Tokens per hash: `2 * _BLOCK - 1` equal tokens always contain a whole block of the old prompt."""
_TRIED = 4
_FACTOR = np.uint64(0x9E3779B97F4A7C15)

Runs = tuple[tuple[int, int], ...]
"""Half-open ranges of tokens, in order and without overlap."""


@dataclass(frozen=True, slots=True)
class Explanation:
    """The first difference between two prompts, if it comes before the new messages.

    `at_token`: number of shared leading tokens. `new_from`: token of the later prompt at which its
    new messages begin. `again`: ranges of tokens between these two that the earlier prompt had too.
    `first`: the difference; None if only a few tokens of the last reply differ before `new_from`,
    or if the prompts are not `related`. `removed`: differences that canonicalisation removed, each
    with the name of the rule. `related`: see `differences.related`; False also if the later prompt
    begins a new conversation with the same tools and system text.
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
        return sum(end - start for start, end in self.again)

    @property
    def advice(self) -> str:
        if self.first is None:
            return advice_for("new_conversation")
        reason, causes = self.first.reason, [self.first.cause]
        if reason == "moved":
            causes += [one.cause for one in self.later if one.reason == "moved"]
        return " ".join(advice_for(cause, reason) for cause in dict.fromkeys(causes))


def compare_prompts(
    builder: PromptBuilder,
    old: ChatPrompt,
    new: ChatPrompt,
    served: Tokens | None = None,
    computed: int | None = None,
) -> Explanation:
    """Return the first difference of prompt `new` from prompt `old`, and its cause.

    `served`: token ids of `old` and its reply, if it was served. `computed`: number of the leading
    ones whose KV was computed; all by default.
    """
    before = old.ids if served is None else served
    found = _explain(builder, old, new, before)
    if begins_anew(found.first, new.chat) or not related(old.chat, new.chat):
        later = found.later if found.first is None else (found.first, *found.later)
        # messages of another conversation are not changed ones
        later = tuple(one for one in later if not one.where.startswith("messages["))
        found = replace(found, first=None, later=later, related=False)
    again: Runs = ()
    if found.first is not None:
        at = found.at_token
        runs = shared_runs(before[:computed][at:], new.ids[at : found.new_from])
        again = tuple((at + start, at + end) for start, end in runs)
    return replace(found, removed=_removed(old, new), again=again)


def text_of(builder: PromptBuilder, ids: Tokens, at: int) -> str:
    shown = ids[max(0, at - _BACK) : at + _AHEAD]
    return builder.decode([int(i) for i in shown if i >= 0])


def _explain(
    builder: PromptBuilder, old: ChatPrompt, new: ChatPrompt, before: Tokens
) -> Explanation:
    shared = common_length(before, new.ids)
    new_from = builder.message_position(new, first_new(old.chat, new.chat))
    found = differences(old.chat, new.chat)
    generation = builder.message_position(old, len(old.chat.messages))
    whole = shared >= min(generation, len(before))
    if whole and not found and shared + LEAST_LOSS >= min(len(before), new_from):
        return Explanation(shared, new_from)
    seen = _visible_difference(found, old, new)
    if seen is None:
        if shared >= new_from or (found and whole):
            return Explanation(shared, new_from, later=tuple(found))
        drift = _drift(builder, old, new, before, shared)
        return Explanation(shared, new_from, drift, tuple(found))
    later = tuple(one for one in found if one is not seen)
    return Explanation(shared, new_from, seen, later)


def _visible_difference(
    found: Sequence[Difference], was: ChatPrompt, now: ChatPrompt
) -> Difference | None:
    """Return the one of `found` that is visible where the two rendered texts first differ.

    Returns None if `now` has all text of `was` up to its generation prompt.
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


def _drift(
    builder: PromptBuilder, old: ChatPrompt, new: ChatPrompt, before: Tokens, shared: int
) -> Difference:
    """Return the difference of two prompts whose tokens differ where their messages are equal.

    The template rendered the messages in another way, or a reply was not replayed.
    """
    texts = text_of(builder, before, shared), text_of(builder, new.ids, shared)
    parted = [text_of(builder, ids[shared:], 0) for ids in (before, new.ids)]
    opens, closes = (
        [bool(look(text)) for text in parted] for look in (_OPENS.search, _CLOSES.match)
    )
    thinking = opens[0] != opens[1] or closes[0] != closes[1]
    thinking = thinking or _reasons(new.chat) != _reasons(old.chat)
    cause = "thinking_dropped" if thinking else "rerendered"
    return Difference("history", "template_drift", cause, *texts, ("", ""))


def _removed(old: ChatPrompt, new: ChatPrompt) -> tuple[tuple[str, Difference], ...]:
    rules = {*old.rules, *new.rules}
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
    """Return the letters and digits of a text; templates may change others, and JSON's escapes."""
    return re.sub(r"\\[nrtbf\"\\]|[\W_]", "", text)


# -- tokens that are computed again ------------------------------------------------------------


def shared_runs(old: Tokens, new: Tokens) -> Runs:
    """Return ranges of `new` whose tokens `old` has too, in the same sequence.

    Each token of `old` is used at most once, in any order of the sequences. Takes about O(n + m):
    only blocks with equal hashes are compared.
    """
    if min(len(old), len(new)) < LEAST_RUN:
        return ()
    held, sought = _hashes(old)[::_BLOCK], _hashes(new)
    places = defaultdict[int, deque[int]](deque)
    for n, one in enumerate(held.tolist()):
        places[one].append(n * _BLOCK)
    used = np.zeros(len(old), bool)
    found: list[tuple[int, int]] = []
    end = 0
    for at in np.flatnonzero(np.isin(sought, held)).tolist():
        if at < end:
            continue
        left = places[int(sought[at])]
        while left and used[left[0]]:
            left.popleft()
        tried = [place for place in islice(left, _TRIED) if not used[place]]
        start, place, size = _longest(old, new, used, (at, end), tried)
        if size >= LEAST_RUN:
            end = start + size
            used[place : place + size] = True
            found.append((start, end))
    return tuple(found)


def count_within(runs: Iterable[tuple[int, int]], start: int, end: int) -> int:
    return sum(max(0, min(end, last) - max(start, first)) for first, last in runs)


def _hashes(ids: Tokens) -> NDArray[np.uint64]:
    """Return a hash of the `_BLOCK` tokens from each position on; it wraps around intentionally."""
    values = np.ascontiguousarray(ids).astype(np.int64).view(np.uint64)
    size = len(values) - _BLOCK + 1
    hashed = np.zeros(size, np.uint64)
    for offset in range(_BLOCK):
        hashed = hashed * _FACTOR + values[offset : offset + size]
    return hashed


def _longest(
    old: Tokens, new: Tokens, used: NDArray[np.bool_], at: tuple[int, int], places: Sequence[int]
) -> tuple[int, int, int]:
    """Return (start in `new`, start in `old`, size) of the longest sequence around a token of both.

    `at`: (position of the token in `new`, least start of the sequence there). `places`: those tried
    in `old`, of whose tokens the `used` ones are taken.
    """
    best = at[0], 0, 0
    for place in places:
        size = common_length(old[place:], new[at[0] :])
        taken = used[place : place + size]
        size = int(taken.argmax()) if taken.any() else size
        back = 0
        most = min(at[0] - at[1], place) if size else 0
        while back < most and not used[place - back - 1]:
            if old[place - back - 1] != new[at[0] - back - 1]:
                break
            back += 1
        if back + size > best[2]:
            best = at[0] - back, place - back, back + size
    return best
