"""Cache hints of requests, and the main conversation of each session, for eviction.

MLX thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxcache.lru import LRU
from mlxcache.store.leaves import SETTLED_TURNS, becomes_main, conversation_key_tokens, digest_of
from mlxcache.tree.node import Node
from mlxcache.types import WARMING, Job, Tokens

MAX_LABELS = 64
"""Session labels whose main conversation is remembered, the most recent."""

MAX_SIDE_REQUESTS = 256
"""Side requests in a row that renew a main conversation which gets no turn of its own."""


@dataclass(frozen=True, slots=True)
class CacheHints:
    """Eviction hints carried by a request.

    `conversation_key`: leading tokens that identify its conversation; None where unknown. `head`:
    leading tokens that are tools and system prompt. `label`: the session's. `keeps`: (position,
    seconds) up to where, and for how long after each use, the client asks to keep the prefix.
    `asked`: a client waits for it; False for what is computed ahead of use.
    """

    conversation_key: int | None = None
    head: int = 0
    label: str | None = None
    keeps: tuple[tuple[int, float], ...] = ()
    asked: bool = True

    @classmethod
    def of(cls, job: Job) -> CacheHints:
        """The hints of a request."""
        prompt, marks = job.prompt, job.prompt.marks
        return cls(
            conversation_key=conversation_key_tokens(marks, len(prompt.ids)) if marks else None,
            head=marks[0] if len(marks) > 1 else 0,
            label=None if job.api == WARMING else job.session,
            keeps=prompt.keeps,
            asked=job.api != WARMING,
        )


NO_HINTS = CacheHints()


@dataclass(frozen=True, slots=True)
class ConversationId:
    """Identity of a conversation: its first `key_tokens` tokens' digest, and its head's digest."""

    key_tokens: int
    digest: bytes
    head: bytes

    @classmethod
    def of(cls, ids: Tokens, hints: CacheHints) -> ConversationId:
        """The conversation that a prompt belongs to."""
        key = len(ids) if hints.conversation_key is None else hints.conversation_key
        head = digest_of(ids[: hints.head]) if hints.head else b""
        return cls(key, digest_of(ids[:key]), head)

    def includes(self, ids: Tokens) -> bool:
        """True if a prompt is a turn of this conversation."""
        return len(ids) >= self.key_tokens and digest_of(ids[: self.key_tokens]) == self.digest


@dataclass(slots=True)
class MainConversation:
    """The newest turn of a session's main conversation: its tokens and tree nodes.

    `side_requests`: requests of the session since that belonged to others. `rival`: a conversation
    under the same head with its turns in a row, which may become the main one. `former`: the main
    conversation before this one, which takes its place again if it continues.
    """

    id: ConversationId
    tokens: int
    nodes: Sequence[Node]
    turns: int = 1
    side_requests: int = 0
    rival: tuple[ConversationId, int] | None = None
    former: MainConversation | None = None

    def count_rival(self, rival: ConversationId) -> int:
        """Count a turn of another conversation under the same head; returns its turns in a row."""
        before = self.rival[1] if self.rival and self.rival[0] == rival else 0
        self.rival = (rival, before + 1)
        return before + 1

    def extend(self, node: Node) -> None:
        """Set the newest turn to the one that ends at `node`."""
        self.tokens, self.nodes, self.turns = node.end, node.path()[1:], self.turns + 1
        self.side_requests, self.rival = 0, None


class MainConversations:
    """The main conversation of each session label seen recently; the rule is that of
    `store.leaves`.
    """

    def __init__(self) -> None:
        self._by_label: LRU[str, MainConversation] = LRU(MAX_LABELS)

    def __len__(self) -> int:
        return len(self._by_label)

    def main_beside(self, ids: Tokens, hints: CacheHints) -> Sequence[Node]:
        """Nodes of the session's main conversation if `ids` is a side request, else empty."""
        main = self._by_label.peek(hints.label) if hints.label else None
        if main is None or main.side_requests >= MAX_SIDE_REQUESTS or main.id.includes(ids):
            return ()
        return main.nodes

    def note_end(self, ids: Tokens, hints: CacheHints, node: Node) -> None:
        """Record the end of the request `ids`; `node` is its last node in the tree."""
        if hints.label is None:
            return
        main = self._by_label.peek(hints.label)
        self._by_label.put(hints.label, self._after(main, ids, hints, node))

    def _after(
        self, main: MainConversation | None, ids: Tokens, hints: CacheHints, node: Node
    ) -> MainConversation:
        """The session's main conversation after a request."""
        if main is None:
            return MainConversation(ConversationId.of(ids, hints), node.end, node.path()[1:])
        for one in (main, main.former):
            if one is not None and one.id.includes(ids) and (one is main or one.tokens < node.end):
                one.extend(node)
                return one
        if self._takes_over(main, ids, hints, node.end):
            turns = main.rival[1] if main.rival else 1
            main.former = None  # one is enough
            id = ConversationId.of(ids, hints)
            return MainConversation(id, node.end, node.path()[1:], turns, former=main)
        main.side_requests += 1
        return main

    def _takes_over(
        self, main: MainConversation, ids: Tokens, hints: CacheHints, tokens: int
    ) -> bool:
        """True if a request begins the main conversation, after a title request or a compaction."""
        now = ConversationId.of(ids, hints)
        same_head = bool(now.head) and now.head == main.id.head
        return becomes_main(
            main_turns=main.turns,
            main_tokens=main.tokens,
            tokens=tokens,
            same_head=same_head,
            settled=same_head and main.count_rival(now) >= SETTLED_TURNS,
        )
