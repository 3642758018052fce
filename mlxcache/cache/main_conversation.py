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
"""Number of session labels whose main conversation is remembered; the most recent ones are."""

MAX_SIDE_REQUESTS = 256
"""Maximum number of consecutive side requests that count as uses of the main conversation."""


@dataclass(frozen=True, slots=True)
class CacheHints:
    """Hints of a request about the eviction of its KV.

    `conversation_key`: number of leading tokens that identify the conversation, or None if unknown.
    `head`: number of leading tokens that are tools and system prompt. `label`: the label of the
    session, or None if there is none. `keeps`: the client's keep hints, as pairs of a position up
    to which to keep the prefix and the seconds to keep it after each use. `asked`: a client waits
    for the request; False if the server computes its prompt before a request needs it.
    """

    conversation_key: int | None = None
    head: int = 0
    label: str | None = None
    keeps: tuple[tuple[int, float], ...] = ()
    asked: bool = True

    @classmethod
    def of(cls, job: Job) -> CacheHints:
        """Return the eviction hints of the request `job`; `label` is None if `asked` is False."""
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
    """Identity of a conversation, by digests of leading tokens.

    `digest`: that of the first `key_tokens` tokens. `head`: that of tools and system prompt, empty
    if there are none.
    """

    key_tokens: int
    digest: bytes
    head: bytes

    @classmethod
    def of(cls, ids: Tokens, hints: CacheHints) -> ConversationId:
        """Return the identity of the conversation to which a prompt belongs.

        `ids`: the tokens of the prompt. `hints`: how many of them are the conversation key, or all
        if that is unknown, and how many are tools and system prompt.
        """
        key = len(ids) if hints.conversation_key is None else hints.conversation_key
        head = digest_of(ids[: hints.head]) if hints.head else b""
        return cls(key, digest_of(ids[:key]), head)

    def includes(self, ids: Tokens) -> bool:
        """Return whether the prompt with tokens `ids` begins with this conversation's key."""
        return len(ids) >= self.key_tokens and digest_of(ids[: self.key_tokens]) == self.digest


@dataclass(slots=True)
class MainConversation:
    """The main conversation of a session, as of its newest turn.

    `tokens`: number of tokens of that turn's prompt and reply. `nodes`: nodes of the prefix tree on
    the path to the end of the reply, without the root. `turns`: number of turns of the
    conversation. `side_requests`: number of requests of the session since the newest turn, all of
    other conversations. `rival`: another conversation with the same tools and system prompt, and
    how many consecutive turns it has had, or None; it may become the main one. `former`: the
    previous main conversation, which becomes the main one again if it continues.
    """

    id: ConversationId
    tokens: int
    nodes: Sequence[Node]
    turns: int = 1
    side_requests: int = 0
    rival: tuple[ConversationId, int] | None = None
    former: MainConversation | None = None

    def count_rival(self, rival: ConversationId) -> int:
        """Count a turn of `rival`, another conversation with the same tools and system prompt.

        Returns how many turns `rival` has had, this one included, since the last turn of the main
        conversation or of another conversation with these tools and system prompt.
        """
        before = self.rival[1] if self.rival and self.rival[0] == rival else 0
        self.rival = (rival, before + 1)
        return before + 1

    def extend(self, node: Node) -> None:
        """Record a new turn, whose reply ends at `node` of the prefix tree, as the newest one."""
        self.tokens, self.nodes, self.turns = node.end, node.path()[1:], self.turns + 1
        self.side_requests, self.rival = 0, None


class MainConversations:
    """The main conversation of each of the `MAX_LABELS` latest sessions, by session label.

    The first conversation of a session is the main one. Another one replaces it if the first was
    only a short side request, or if the other one has the same tools and system prompt and has
    taken at least `SETTLED_TURNS` (8) consecutive turns. The rule is `store.leaves.becomes_main`.
    """

    def __init__(self) -> None:
        self._by_label: LRU[str, MainConversation] = LRU(MAX_LABELS)

    def __len__(self) -> int:
        return len(self._by_label)

    def main_beside(self, ids: Tokens, hints: CacheHints) -> Sequence[Node]:
        """Return the nodes of the session's main conversation if a request belongs to another one.

        `ids`: the tokens of the request. `hints`: its hints, with the label of the session. The
        nodes are `MainConversation.nodes`. Returns an empty sequence if the request belongs to the
        main conversation, if the session has none, or after `MAX_SIDE_REQUESTS` requests in a row
        that belong to other conversations.
        """
        main = self._by_label.peek(hints.label) if hints.label else None
        if main is None or main.side_requests >= MAX_SIDE_REQUESTS or main.id.includes(ids):
            return ()
        return main.nodes

    def note_end(self, ids: Tokens, hints: CacheHints, node: Node) -> None:
        """Record that a request has ended, with its reply, at `node` of the prefix tree.

        `ids`: the tokens of its prompt. `hints`: its hints; does nothing if they have no label.
        """
        if hints.label is None:
            return
        main = self._by_label.peek(hints.label)
        self._by_label.put(hints.label, self._after(main, ids, hints, node))

    def _after(
        self, main: MainConversation | None, ids: Tokens, hints: CacheHints, node: Node
    ) -> MainConversation:
        """Return the session's main conversation after a request.

        `main`: the main conversation before the request, or None. `ids`: the tokens of the
        request's prompt. `hints`: its hints, of which the label is that of `main`. `node`: the last
        node of the prefix tree with tokens of its prompt and reply. Changes `main`, and may return
        it.
        """
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
        """Return whether a request begins a new main conversation.

        `main`: the main conversation so far, to which the request does not belong. `ids`: the
        tokens of the request's prompt. `tokens`: the number of those and of the reply's.

        Returns True if `main` was only a side request, such as one for a title. Also if the
        request's conversation has the tools and system prompt of `main`, and at least
        `SETTLED_TURNS` consecutive turns, as after a compaction. If it has those tools and that
        system prompt, the request is counted in `main.rival` as one of these turns.
        """
        now = ConversationId.of(ids, hints)
        same_head = bool(now.head) and now.head == main.id.head
        return becomes_main(
            main_turns=main.turns,
            main_tokens=main.tokens,
            tokens=tokens,
            same_head=same_head,
            settled=same_head and main.count_rival(now) >= SETTLED_TURNS,
        )
