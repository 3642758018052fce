"""Cache hints of requests, and the main conversation of each session, for eviction.

MLX thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from xxhash import xxh3_128_digest

from mlxcache.lru import LRU
from mlxcache.store.leaves import SETTLED_TURNS, becomes_main, conversation_key_tokens
from mlxcache.tree.node import Node
from mlxcache.types import WARMING, Job, Tokens

MAX_LABELS = 64
"""Number of session labels whose main conversation is remembered; the most recent ones are."""

MAX_SIDE_REQUESTS = 256
"""Maximum number of consecutive side requests that count as uses of the main conversation."""


@dataclass(frozen=True, slots=True)
class CacheHints:
    """Hints of a request about the eviction of its KV.

    `conversation_key`: number of leading tokens that identify the conversation, if known. `head`:
    number of leading tokens that are tools and system prompt. `keeps`: see `tree.node.Usage`.
    `asked`: a client waits for the request; False if the server computes its prompt before a
    request needs it. `kept`: KV is reused, and what is computed is added to the tree. `parting`:
    positions at which an edited last message and another reply part from the prompt.
    """

    conversation_key: int | None = None
    head: int = 0
    label: str | None = None
    keeps: tuple[tuple[int, float], ...] = ()
    asked: bool = True
    kept: bool = True
    parting: tuple[int, ...] = ()

    @classmethod
    def of(cls, job: Job) -> CacheHints:
        prompt, marks = job.prompt, job.prompt.marks
        return cls(
            conversation_key=conversation_key_tokens(marks, len(prompt.ids)) if marks else None,
            head=marks[0] if len(marks) > 1 else 0,
            label=None if job.api == WARMING else job.session,
            keeps=prompt.keeps,
            asked=job.api != WARMING and not job.prompt_logprobs,
            kept=not job.prompt_logprobs,
            parting=marks[-2:],
        )


NO_HINTS = CacheHints()


@dataclass(frozen=True, slots=True)
class ConversationId:
    """Digests of a conversation's first `key_tokens` tokens, and of tools and system prompt."""

    key_tokens: int
    digest: bytes
    head: bytes

    @classmethod
    def of(cls, ids: Tokens, hints: CacheHints) -> ConversationId:
        key = len(ids) if hints.conversation_key is None else hints.conversation_key
        head = xxh3_128_digest(ids[: hints.head].data) if hints.head else b""
        return cls(key, xxh3_128_digest(ids[:key].data), head)

    def includes(self, ids: Tokens) -> bool:
        key = ids[: self.key_tokens]
        return len(key) == self.key_tokens and xxh3_128_digest(key.data) == self.digest


@dataclass(slots=True)
class MainConversation:
    """The main conversation of a session, as of its newest turn.

    `nodes`: the path to the end of the reply in the prefix tree. `side_requests`: number of
    requests of the session since then. `rival`: another conversation with the same tools and system
    prompt, and how many consecutive turns it has had. `former`: the previous main conversation,
    which becomes the main one again if it continues.
    """

    id: ConversationId
    tokens: int
    nodes: Sequence[Node]
    turns: int = 1
    side_requests: int = 0
    rival: tuple[ConversationId, int] | None = None
    former: MainConversation | None = None

    def count_rival(self, rival: ConversationId) -> int:
        before = self.rival[1] if self.rival and self.rival[0] == rival else 0
        self.rival = (rival, before + 1)
        return before + 1

    def extend(self, node: Node) -> None:
        self.tokens, self.nodes, self.turns = node.end, node.path()[1:], self.turns + 1
        self.side_requests, self.rival = 0, None


class MainConversations:
    """The main conversation of each of the `MAX_LABELS` latest sessions, by session label.

    The first conversation of a session is the main one, until `store.leaves.becomes_main` another.
    """

    def __init__(self) -> None:
        self._by_label: LRU[str, MainConversation] = LRU(MAX_LABELS)

    def __len__(self) -> int:
        return len(self._by_label)

    def main_beside(self, ids: Tokens, hints: CacheHints) -> Sequence[Node]:
        """Return the nodes of the session's main conversation if a request belongs to another one.

        Empty after `MAX_SIDE_REQUESTS` requests in a row that belong to other conversations.
        """
        main = self._by_label.peek(hints.label) if hints.label else None
        if main is None or main.side_requests >= MAX_SIDE_REQUESTS or main.id.includes(ids):
            return ()
        return main.nodes

    def note_end(self, ids: Tokens, hints: CacheHints, node: Node) -> None:
        if hints.label is not None:
            main = self._by_label.peek(hints.label)
            self._by_label.put(hints.label, _main_after(main, ids, hints, node))


def _main_after(
    main: MainConversation | None, ids: Tokens, hints: CacheHints, node: Node
) -> MainConversation:
    for one in (main, main.former) if main is not None else ():
        if one is not None and one.id.includes(ids) and (one is main or one.tokens < node.end):
            one.extend(node)
            return one
    now = ConversationId.of(ids, hints)
    if main is None:
        return MainConversation(now, node.end, node.path()[1:])
    same_head = bool(now.head) and now.head == main.id.head
    taken_over = becomes_main(
        main_turns=main.turns,
        main_tokens=main.tokens,
        tokens=node.end,
        same_head=same_head,
        settled=same_head and main.count_rival(now) >= SETTLED_TURNS,
    )
    if not taken_over:
        main.side_requests += 1
        return main
    main.former = None  # one is enough
    turns = main.rival[1] if main.rival else 1
    return MainConversation(now, node.end, node.path()[1:], turns, former=main)
