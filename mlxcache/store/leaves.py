"""Which leaf a request belongs to: rules over token ids alone, with no database behind them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlxcache.types import Tokens

Kind = Literal["main", "agent"]

SETTLED_TURNS = 8
"""Turns after which a conversation begun later, under the same head, is what a session is about."""

TINY_SHARE = 4
"""A first request this many times shorter than a later one was a side request: a title, a probe."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One conversation of a session: `ids` is the newest prompt with its reply, int32, (n,).

    `prompt_tokens` of them are the prompt. `anchor`: how many tokens a prompt must share with it
    to continue it. `turns`: finished requests. `last_used_at`: seconds since 1970.
    """

    id: int
    session: str
    kind: Kind
    ids: Tokens
    prompt_tokens: int
    anchor: int
    turns: int
    last_used_at: float


def anchor_of(marks: Sequence[int], prompt_tokens: int) -> int:
    """How many of a prompt's tokens make it this conversation and no other.

    The head (tools and system, up to the first mark) is every conversation's, and so are the
    tokens that open the first message; the message itself, up to the second mark, is not. A
    prompt with one mark has no head, only that message.
    """
    return next(iter(marks[1:2] or marks[:1]), prompt_tokens)


def digest_of(ids: Tokens) -> bytes:
    """What stands for exactly these tokens: 16 bytes."""
    return hashlib.blake2b(_raw(ids), digest_size=16).digest()


def digests_at(ids: Tokens, lengths: Iterable[int]) -> dict[int, bytes]:
    """The digest of each of these prefixes of `ids`, by its length; too long ones are left out."""
    hasher, at, found = hashlib.blake2b(digest_size=16), 0, {}
    for length in sorted(set(lengths)):
        if length <= len(ids):
            hasher.update(_raw(ids[at:length]))
            found[length], at = hasher.copy().digest(), length
    return found


def _raw(ids: Tokens) -> bytes:
    return np.ascontiguousarray(ids, "<i4").tobytes()


def common(a: Tokens, b: Tokens) -> int:
    """The number of leading tokens in which the two agree."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if len(differ) else size


def continued(ids: Tokens, leaves: Iterable[Leaf]) -> Leaf | None:
    """The leaf that a request with `ids` goes on with, or None: it begins a conversation.

    The one with the longest common prefix, at least its anchor. Of equals one that is contained
    whole, so that a fork and what it was forked from go their own ways; then the oldest.
    """
    best, rank = None, (0, False, 0)
    for leaf in leaves:
        shared = common(ids, leaf.ids)
        if shared >= leaf.anchor and (key := (shared, shared == len(leaf.ids), -leaf.id)) > rank:
            best, rank = leaf, key
    return best


def takes_over(leaf: Leaf, main: Leaf, head: int, *, first: bool = False) -> bool:
    """Whether `leaf`, just used, is from now on what its session is about, and not `main`.

    The first leaf is the main one, unless it was a side request that came before the conversation.
    After a compaction the same agent (`head` tokens of tools and system are shared) goes on under
    a new prefix; if it was a sub-agent and the older leaf goes on after all, that is main again.
    `first`: it is the session's first and goes on with a longer prompt, so it was no side request.
    """
    if first:
        return True
    if main.turns <= 1 and len(main.ids) * TINY_SHARE < len(leaf.ids):
        return True
    if not head or common(leaf.ids, main.ids) < head:
        return False
    return leaf.id < main.id or (leaf.turns >= SETTLED_TURNS and leaf.turns > main.turns)
