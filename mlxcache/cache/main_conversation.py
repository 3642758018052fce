"""What requests say of themselves that eviction heeds. MLX thread only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from mlxcache.store.leaves import SETTLED_TURNS, TINY_SHARE, conversation_key_tokens, digest_of
from mlxcache.tree.prefix_tree import Node
from mlxcache.types import WARMING, Job, Tokens

MOST_SESSIONS = 64
"""Labels of which the main conversation is known, those heard of last."""

MOST_ASIDE = 256
"""Side requests in a row that renew a main conversation nobody went on with."""


@dataclass(frozen=True, slots=True)
class Claim:
    """Of a request: how many of its tokens make it its conversation (None: nobody knows), and are
    tools and system; its session's label; what its client wishes kept, (position, seconds).
    `asked`: somebody waits for it; it is not computed ahead of use."""

    anchor: int | None = None
    head: int = 0
    label: str | None = None
    keeps: tuple[tuple[int, float], ...] = ()
    asked: bool = True

    @classmethod
    def of(cls, job: Job) -> Claim:
        """That of a request."""
        prompt, marks = job.prompt, job.prompt.marks
        return cls(
            anchor=conversation_key_tokens(marks, len(prompt.ids)) if marks else None,
            head=marks[0] if len(marks) > 1 else 0,
            label=None if job.api == WARMING else job.session,
            keeps=prompt.keeps,
            asked=job.api != WARMING,
        )


NOTHING = Claim()


@dataclass(frozen=True, slots=True)
class Known:
    """What makes a conversation itself: `anchor` tokens, their digest, and that of its head."""

    anchor: int
    digest: bytes
    head: bytes

    @classmethod
    def of(cls, ids: Tokens, claim: Claim) -> Known:
        """The conversation of a prompt."""
        anchor = len(ids) if claim.anchor is None else claim.anchor
        head = digest_of(ids[: claim.head]) if claim.head else b""
        return cls(anchor, digest_of(ids[:anchor]), head)

    def goes_on(self, ids: Tokens) -> bool:
        """Whether a prompt is a turn of it."""
        return len(ids) >= self.anchor and digest_of(ids[: self.anchor]) == self.digest


@dataclass(slots=True)
class Main:
    """What a session is about: its newest turn's tokens and segments. `aside`: side requests
    since. `rival`: who may take its place, and in how many turns; `former`: whose it took."""

    who: Known
    tokens: int
    nodes: Sequence[Node]
    turns: int = 1
    aside: int = 0
    rival: tuple[Known, int] | None = None
    former: Main | None = None


class Mains:
    """The main conversation of each session that was heard of lately, as `leaves` tells them."""

    def __init__(self) -> None:
        self._by_label: OrderedDict[str, Main] = OrderedDict()

    def beside(self, ids: Tokens, claim: Claim) -> Sequence[Node]:
        """The segments of the main conversation beside which a request comes; none if it is no
        side request, or one of very many."""
        main = self._by_label.get(claim.label) if claim.label else None
        if main is None or main.aside >= MOST_ASIDE or main.who.goes_on(ids):
            return ()
        return main.nodes

    def ended(self, ids: Tokens, claim: Claim, node: Node) -> None:
        """Note a request for `ids` that is over, and at whose end the tree is `node`."""
        if claim.label is None:
            return
        self._by_label[claim.label] = self._after(self._by_label.get(claim.label), ids, claim, node)
        self._by_label.move_to_end(claim.label)
        while len(self._by_label) > MOST_SESSIONS:
            self._by_label.popitem(last=False)

    def _after(self, main: Main | None, ids: Tokens, claim: Claim, node: Node) -> Main:
        """What the session is about after a request."""
        if main is None:
            return Main(Known.of(ids, claim), node.end, node.path()[1:])
        for one in (main, main.former):
            if one is not None and one.who.goes_on(ids) and (one is main or one.tokens < node.end):
                one.tokens, one.nodes, one.turns = node.end, node.path()[1:], one.turns + 1
                one.aside, one.rival = 0, None
                return one
        if self._takes_over(main, ids, claim, node.end):
            turns = main.rival[1] if main.rival else 1
            main.former = None  # one is enough
            return Main(Known.of(ids, claim), node.end, node.path()[1:], turns, former=main)
        main.aside += 1
        return main

    def _takes_over(self, main: Main, ids: Tokens, claim: Claim, tokens: int) -> bool:
        """A title came before the conversation; or that goes on under a new first message."""
        if main.turns <= 1 and main.tokens * TINY_SHARE < tokens:
            return True
        now = Known.of(ids, claim)
        if not now.head or now.head != main.who.head:
            return False
        before = main.rival[1] if main.rival and main.rival[0] == now else 0
        main.rival = (now, before + 1)
        return before + 1 >= SETTLED_TURNS
