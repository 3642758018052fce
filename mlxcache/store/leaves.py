"""Rules that assign a request to a leaf of a session, over token ids alone."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mlxcache.common_prefix import common_length
from mlxcache.types import Tokens

Kind = Literal["main", "agent"]

SETTLED_TURNS = 8
"""Turns after which a later conversation with the same head becomes the main one."""

TINY_SHARE = 4
"""A first request shorter than a later one by this factor was a side request: a title, a probe."""


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One conversation of a session: `ids` is the newest prompt with its reply, int32, (n,).

    `prompt_tokens` of them are the prompt. `key_tokens`: length of its conversation key, the
    leading tokens that a prompt must share to continue it. `turns`: finished requests.
    `last_used_at`: seconds since 1970. `replies`: keys of the replies in it, in order; None where
    an earlier version wrote it.
    """

    id: int
    session: str
    kind: Kind
    ids: Tokens
    prompt_tokens: int
    key_tokens: int
    turns: int
    last_used_at: float
    replies: tuple[bytes, ...] | None = None


def conversation_key_tokens(marks: Sequence[int], prompt_tokens: int) -> int:
    """Length of a prompt's conversation key: the leading tokens that tell it from all others.

    Conversations share the head (tools and system, up to the first mark) and the tokens that open
    the first message, but not that message, which ends at the second mark. A prompt with one mark
    has no head and only that message.
    """
    return next(iter(marks[1:2] or marks[:1]), prompt_tokens)


def digest_of(ids: Tokens) -> bytes:
    """BLAKE2b digest of exactly these tokens, 16 bytes."""
    return hashlib.blake2b(_raw(ids), digest_size=16).digest()


def digests_at(ids: Tokens, lengths: Iterable[int]) -> dict[int, bytes]:
    """Digests of prefixes of `ids`, by length; lengths beyond `ids` are left out."""
    hasher, at, found = hashlib.blake2b(digest_size=16), 0, {}
    for length in sorted(set(lengths)):
        if length <= len(ids):
            hasher.update(_raw(ids[at:length]))
            found[length], at = hasher.copy().digest(), length
    return found


def _raw(ids: Tokens) -> bytes:
    return np.ascontiguousarray(ids, "<i4").tobytes()


def find_continued(ids: Tokens, leaves: Iterable[Leaf]) -> Leaf | None:
    """Find the leaf that a request with `ids` continues; None if it begins a conversation.

    A leaf is considered if `ids` begins with its conversation key, its first `key_tokens` tokens.
    Of those, the one with the longest common prefix with `ids` is returned. Of equally long ones it
    is a leaf whose tokens are all in that prefix: if only the source of a fork has got a further
    turn, a request without that turn continues the fork. After that the leaf with the lowest id.
    """
    best, rank = None, (0, False, 0)
    for leaf in leaves:
        shared = common_length(ids, leaf.ids)
        order = (shared, shared == len(leaf.ids), -leaf.id)
        if shared >= leaf.key_tokens and order > rank:
            best, rank = leaf, order
    return best


def becomes_main(
    *, main_turns: int, main_tokens: int, tokens: int, same_head: bool, settled: bool
) -> bool:
    """True if a conversation of `tokens` tokens becomes its session's main one.

    The one rule for the table of sessions and for eviction in RAM. A main conversation of one turn
    and far fewer tokens was a side request, such as a title. Else the other must share its head
    (tools and system prompt), as an agent's does after a compaction, and be `settled`: have enough
    turns.
    """
    if main_turns <= 1 and main_tokens * TINY_SHARE < tokens:
        return True
    return same_head and settled


def replaces_main(leaf: Leaf, main: Leaf, head: int, *, first: bool = False) -> bool:
    """Decide if `leaf`, just used, replaces `main` as the main conversation of its session.

    The first leaf is the main one, unless it was a side request before the conversation. After a
    compaction an agent continues under a new prefix that shares its `head` tokens of tools and
    system; if that was a sub-agent and the older leaf continues after all, the older is main again.
    `first`: the leaf is the session's first and got a longer prompt, so it was no side request.
    """
    if first:
        return True
    settled = leaf.turns >= SETTLED_TURNS and leaf.turns > main.turns
    return becomes_main(
        main_turns=main.turns,
        main_tokens=len(main.ids),
        tokens=len(leaf.ids),
        same_head=bool(head) and common_length(leaf.ids, main.ids) >= head,
        settled=leaf.id < main.id or settled,
    )
