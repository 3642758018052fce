"""Rules that assign a request to a conversation of a session, based only on token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from mlxcache.common_prefix import common_length
from mlxcache.types import Tokens

Kind = Literal["main", "agent"]

SETTLED_TURNS = 8
"""Turns from which a later conversation with the same head can become the main one."""

TINY_SHARE = 4
"""Factor by which a side request (for a title, a probe) is shorter than a later one."""


@dataclass(frozen=True, slots=True)
class LeafRow:
    """A leaf without its token ids, which never change unless `turns` does."""

    id: int
    session: str
    kind: Kind
    tokens: int
    prompt_tokens: int
    turns: int
    last_used_at: float


@dataclass(frozen=True, slots=True, eq=False)
class Leaf:
    """One conversation of a session.

    `ids`: newest prompt with its reply; the first `prompt_tokens` are the prompt. `key_tokens`:
    length of its conversation key, the leading tokens that a prompt must share to continue it.
    `turns`: number of finished requests. `replies`: keys of the replies in it, in order (see
    `ReplyRow.key`).
    """

    ids: Tokens
    kind: Kind = "main"
    prompt_tokens: int = 0
    key_tokens: int = 0
    turns: int = 0
    last_used_at: float = 0.0
    replies: tuple[bytes, ...] = ()
    id: int = 0
    session: str = ""


def conversation_key_tokens(marks: Sequence[int], prompt_tokens: int) -> int:
    """Return the length of a prompt's conversation key in tokens.

    The key is the leading part of a prompt that distinguishes its conversation from all others. The
    head (tools and system prompt, up to the first mark) can be the same in many conversations, but
    not the first message, which ends at the second mark. A prompt with a single mark has no head.
    `marks`: see `Prompt`. Without marks, all of the prompt is the key.
    """
    return next(iter(marks[1:2] or marks[:1]), prompt_tokens)


def digest_of(ids: Tokens) -> bytes:
    return hashlib.blake2b(ids.tobytes(), digest_size=16).digest()


def digests_at(ids: Tokens, lengths: Iterable[int]) -> dict[int, bytes]:
    """Return the digest (see `digest_of`) of the prefix of `ids` for each of `lengths`, by length.

    Lengths beyond that of `ids` are left out.
    """
    hasher, at, found = hashlib.blake2b(digest_size=16), 0, {}
    for length in sorted(set(lengths)):
        if length <= len(ids):
            hasher.update(ids[at:length].tobytes())
            found[length], at = hasher.copy().digest(), length
    return found


def find_continued(ids: Tokens, leaves: Iterable[Leaf]) -> Leaf | None:
    """Find the leaf that a request with token ids `ids` continues, or None.

    A leaf is considered if `ids` begins with its conversation key. Among those, the leaf with the
    longest common prefix with `ids` is chosen. If several share as much, a leaf of which `ids`
    contains all tokens is preferred: after a fork, a request without the later turns of the
    original continues the fork. After that, the leaf with the lowest id is chosen.
    """
    best, rank = None, (0, False, 0)
    for leaf in leaves:
        shared = common_length(ids, leaf.ids)
        order = (shared, shared == len(leaf.ids), -leaf.id)
        if shared >= leaf.key_tokens and order > rank:
            best, rank = leaf, order
    return best


def find_reworded(
    ids: Tokens, head: int, prompt_tokens: int, leaves: Iterable[Leaf]
) -> Leaf | None:
    """Find the leaf that a request continues after its client changed the first message, or None.

    `leaves`: those of sessions whose user typed the same first words. The first `head` token ids
    (tools and system prompt) must be the same, and the request's prompt must have more tokens than
    the leaf's prompt. Among such leaves, the one with the longest common prefix is chosen.
    """
    found = [
        (shared, leaf.id, leaf)
        for leaf in leaves
        if leaf.prompt_tokens < prompt_tokens
        and (shared := common_length(ids, leaf.ids)) >= head > 0
    ]
    return max(found)[2] if found else None


def becomes_main(
    *, main_turns: int, main_tokens: int, tokens: int, same_head: bool, settled: bool
) -> bool:
    """Return whether a conversation of `tokens` tokens becomes its session's main one.

    If the present main conversation has one turn at most and less than a quarter of `tokens`, it
    was a side request, such as one for a title, and is replaced. Otherwise it is replaced only if
    the new one has the same tools and system prompt (`same_head`), and is older or has enough turns
    (`settled`), as after an agent has compacted its history. Both the table of sessions and
    eviction in RAM use this rule.
    """
    if main_turns <= 1 and main_tokens * TINY_SHARE < tokens:
        return True
    return same_head and settled


def replaces_main(leaf: Leaf, main: Leaf, head: int, *, first: bool = False) -> bool:
    """Return whether `leaf`, just used, replaces `main` as its session's main conversation.

    It does if `first`: the leaf is the oldest of the session, and its prompt became longer, so it
    was no side request. Otherwise see `becomes_main`; `head`: number of tokens of tools and system
    prompt.
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
