"""An agent's session as the RAM tier sees it: side requests must not push the conversation out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.model.kv import Layout
from mlxcache.tree.budget import Budget
from mlxcache.tree.eviction import Worth
from mlxcache.types import token_ids
from tests.scheduled import Bench, admitted

HEAD, NEW = 250, 80
"""Tokens of the main agent's tools and system, and of each of its turns."""

SLACK = 64
"""Tokens that a turn may feed beside what is new."""


class Agent:
    """One session: a main conversation that grows, and what its client asks besides.

    Each request opens with a head of its kind; `fed` are those of the main turns, beyond `NEW`.
    """

    def __init__(self, bench: Bench, *, labelled: bool = True):
        self.bench = bench
        self.rng = np.random.default_rng(5)
        self.session = "agent" if labelled else None
        self.heads = {kind: self.text(n) for kind, n in (("title", 60), ("sub", 120))}
        self.main = self.text(HEAD)
        self.marks = [HEAD]
        self.fed: list[int] = []

    def text(self, tokens: int) -> list[int]:
        return [int(t) for t in self.rng.integers(10, 400, tokens)]

    def ask(self, ids: list[int], marks: list[int]) -> tuple[list[int], int]:
        """A request; its reply, and how many tokens it fed."""
        task = self.bench.ask(ids, marks=[*marks, len(ids) - 4], tokens=6, session=self.session)
        return task.out, len(ids) - admitted(task).cached_tokens

    def turn(self) -> None:
        """The main conversation's next."""
        self.main += self.text(NEW)
        out, fed = self.ask(self.main, self.marks)
        self.marks.append(len(self.main))
        self.main += out
        self.fed.append(fed - NEW)

    def suggestion(self) -> None:
        """What the person may say next: the whole conversation, and a question about it."""
        self.ask(self.main + self.text(40), self.marks)

    def title(self) -> None:
        """A short head of its own, and one message."""
        self.ask(self.heads["title"] + self.text(150), [60])

    def sub_agent(self, turns: int) -> None:
        """Its own head, and several turns."""
        ids, marks = self.heads["sub"] + self.text(200), [120]
        for _ in range(turns):
            marks.append(len(ids))
            out, _ = self.ask(ids, marks)
            ids += out + self.text(60)

    def work(self) -> list[int]:
        """Six turns with all of that between; what each but the first fed beyond what is new."""
        for turn in range(6):
            self.turn()
            self.suggestion()
            self.title()
            if turn % 2:
                self.sub_agent(3)
                self.sub_agent(5)
                self.title()
        return self.fed[1:]


class LeastRecentlyUsed(Worth):
    """All segments are worth the same: what remains is the order of use."""

    def of(self, *_: object, **__: object) -> float:
        return 0.0


def limited(bench: Bench, tokens: int, *, lru: bool = False) -> Bench:
    """The model with a budget of so many tokens, and the states of one path."""
    layout: Layout = bench.kv.layout
    size = tokens * layout.bytes_per_token + 24 * layout.checkpoint_bytes
    worth = LeastRecentlyUsed(layout.bytes_per_token) if lru else None
    memory = KVCache.open(layout, Budget(size), worth=worth)
    if lru:
        memory.tree.count_use = lambda *args: 0  # type: ignore[method-assign]
        memory.tree.renew = lambda *args: None  # type: ignore[method-assign]
    bench.use(memory)
    return bench


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_the_main_conversation_feeds_only_what_is_new(
    toy_paths: dict[str, Path], family: str
) -> None:
    """Whatever runs beside it under the same label, where not all fits; in the order of use alone
    it is fed again and again."""
    bench = Bench(toy_paths[family])
    ours = Agent(limited(bench, 1900)).work()
    assert max(ours) <= SLACK
    room = bench.kv.ram
    assert room.dropped + room.spilled > 10, "there was room for all"
    plain = Agent(limited(bench, 1900, lru=True)).work()
    again = sum(plain) + NEW * len(plain)
    assert again > 2 * (sum(ours) + NEW * len(ours)), (ours, plain)


def test_without_a_label_it_is_how_often_they_were_asked_for_that_tells(
    toy_paths: dict[str, Path],
) -> None:
    """Titles and suggestions alone then: nobody can tell a finished sub-agent from one at work."""
    bench = limited(Bench(toy_paths["llama"]), 1500)
    agent = Agent(bench, labelled=False)
    for _ in range(7):
        agent.turn()
        agent.suggestion()
        for _ in range(4):
            agent.title()
    assert max(agent.fed[1:]) <= SLACK
    assert bench.kv.ram.dropped > 10


@pytest.mark.slow
def test_an_agent_that_is_left_gives_way_to_the_next(toy_paths: dict[str, Path]) -> None:
    """After two turns at the latest the budget is the new session's, however much the old one was
    used."""
    bench = limited(Bench(toy_paths["llama"]), 1900)
    old = Agent(bench)
    old.work()
    new = Agent(bench)
    new.rng = np.random.default_rng(6)
    new.session, new.main = "other", new.text(HEAD)
    fed = new.work()
    assert max(fed[2:]) <= SLACK, fed
    assert bench.kv.reusable(token_ids(old.main)) < len(old.main) // 2


def test_a_mark_holds_a_prefix_through_what_came_later(toy_paths: dict[str, Path]) -> None:
    """Of two prompts asked once, the older stays if it is marked; the budget holds as ever."""
    held = {}
    for marked in (True, False):
        bench = limited(Bench(toy_paths["llama"]), 1600)
        rng = np.random.default_rng(3)
        first, later, last = ([int(t) for t in rng.integers(10, 400, 600)] for _ in range(3))
        bench.ask(first, marks=[300, 596], keeps=[(596, 300.0)] if marked else [])
        bench.ask(later, marks=[300, 596])
        bench.ask(last, marks=[300, 596])
        held[marked] = bench.kv.reusable(token_ids([*first, 1]))
        assert bench.kv.budget.high_water <= bench.kv.budget.limit
    assert held[True] >= 590
    assert held[False] < 590
