"""The order of eviction: what goes first, what later, and that all goes in the end."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.tree.eviction import EvictionClock, EvictionOrder, Worth
from mlxcache.tree.node import Node
from mlxcache.tree.prefix_tree import PrefixTree
from mlxcache.types import NO_TOKENS, token_ids
from tests.tree.check import check_order, check_tree

HEAD = 20
"""Tokens of tools and system in these conversations, and 10 more are their first message."""


def node(used_at: int) -> Node:
    """A node that was used then, and found once by then."""
    made = Node(None, NO_TOKENS, 0, None, used_at)
    made.usage.clock = float(used_at)
    return made


def order(eligible=lambda _: True) -> EvictionOrder:
    return EvictionOrder(Worth(1), eligible, EvictionClock(lambda: 1))


def test_discarded_nodes_do_not_pile_up():
    """A tree that loses as many nodes as it gains keeps a small heap; wishes end in it too."""
    leaves = order()
    kept = node(0)
    kept.usage.keep(((1, 9.0),))
    leaves.add(kept)
    for tick in range(1000):
        each = node(tick)
        each.usage.keep(((1, 1e9),))
        leaves.add(each)
        leaves.renew(kept)
        leaves.discard(each)
    assert leaves.first() is kept
    assert len(leaves._heap) < 100
    assert len(leaves._ends) < 100
    check_order(leaves)


class Traffic:
    """Conversations of one server, whose tree holds `room` tokens: what does not fit is evicted.

    A turn computes what is not there: `fed` tokens. Each conversation has a number, and a head
    that it shares with those whose numbers are equal modulo 3.
    """

    def __init__(self, room: int, worth: Worth | None = None, clock: EvictionClock | None = None):
        self.time = 0.0
        self.tree = PrefixTree(1, worth, now=lambda: self.time, clock=clock)
        self.room = room
        self.lengths: dict[int, int] = {}

    def ids(self, number: int, length: int, variant: int = 0):
        made = np.random.default_rng(number).integers(0, 1 << 30, 5000, dtype=np.int32)
        made[:HEAD] = number % 3
        if variant:
            made[length - 5 : length] = variant
        return made[:length]

    def ask(self, number: int, length: int, variant: int = 0, keeps=()) -> int:
        """A request of `length` tokens; another `variant` ends in other tokens. How many it fed."""
        ids = self.ids(number, length, variant)
        found = self.tree.match(ids)
        self.tree.count_use(found, length, HEAD + 10)
        leaf = self.tree.insert(ids, object(), HEAD + 10)
        self.tree.keep(leaf, keeps)
        self.tree.lock(leaf)
        while self.tree.tokens > self.room:
            first = self.tree.least_leaf()
            assert first is not None
            self.tree.note_eviction(first, first.start)
            self.tree.cut(first, first.start)
        self.tree.unlock(leaf)
        check_tree(self.tree)
        return length - found.length

    def turn(self, number: int, new: int = 10) -> int:
        self.lengths[number] = self.lengths.get(number, 30) + new
        return self.ask(number, self.lengths[number])

    def held(self, number: int) -> int:
        ids = self.ids(number, 5000)
        return self.tree.match(ids, touch=False).length


def test_who_was_never_found_again_goes_before_an_older_conversation():
    """A title, a suggestion, a sub-agent's one turn."""
    traffic = Traffic(200)
    for _ in range(5):
        traffic.turn(1)
    for title in (2, 5, 3):
        traffic.ask(title, 60)
    assert traffic.held(1) == 80
    assert traffic.held(2) <= HEAD


def test_the_tail_that_a_newer_turn_replaced_goes_first():
    """Before what is older and was never found either; what both share stays."""
    traffic = Traffic(200)
    traffic.ask(1, 60)
    traffic.ask(2, 60)
    traffic.ask(2, 70, variant=9)
    traffic.ask(2, 80)
    assert traffic.held(1) == 60
    assert traffic.tree.tokens == 60 + 80 + 5
    first = traffic.tree.least_leaf()
    assert first is not None
    assert (first.start, first.end) == (65, 70)
    assert first.usage.replaced
    traffic.ask(3, 58)
    assert [traffic.held(1), traffic.held(2)] == [60, 80]


def test_who_comes_back_to_a_tail_has_not_left_it():
    """A fork of which both ends go on: neither replaces the other."""
    traffic = Traffic(1000)
    traffic.ask(1, 60, variant=7)
    traffic.ask(1, 60, variant=8)
    for variant in (7, 8):
        ids = traffic.ids(1, 60, variant)
        traffic.tree.count_use(traffic.tree.match(ids), 70, HEAD + 10)
    traffic.ask(1, 60, variant=9)
    leaves = {
        variant: traffic.tree.match(traffic.ids(1, 60, variant)).nodes[-1] for variant in (7, 8)
    }
    assert not any(leaf.usage.replaced for leaf in leaves.values())


def test_another_conversation_under_the_same_head_replaces_nothing():
    """They share tools and system, and no message."""
    traffic = Traffic(1000)
    traffic.ask(1, 60)
    traffic.ask(4, 60)
    leaf = traffic.tree.match(traffic.ids(1, 60), touch=False).nodes[-1]
    assert leaf.start == HEAD
    assert not leaf.usage.replaced


@settings(deadline=None, max_examples=10)
@given(turns=st.integers(2, 60), size=st.integers(60, 120))
def test_what_nobody_uses_goes_in_the_end(turns, size):
    """However often it was used, once others filled the room a few times; not before they do."""
    traffic = Traffic(1000)
    for _ in range(turns):
        traffic.turn(1)
    others = 0
    while traffic.held(1) > HEAD:
        others += 1
        traffic.ask(1 + 3 * others, size)
        assert others * (size - HEAD) < 1000 * 8
    assert others * (size - HEAD) >= 1000 - traffic.lengths[1] - size


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 40)), max_size=60))
def test_a_conversation_outlasts_all_that_is_asked_once(others):
    """It goes on between one-offs that could fill the room it leaves: it feeds what is new."""
    traffic = Traffic(600)
    traffic.turn(1, 100)
    traffic.turn(1, 10)
    aside = 0
    for number, (burst, size) in enumerate(others):
        for each in range(burst):
            traffic.ask(10 + 10 * number + each, 40 + size)
            aside += 40 + size
        assert traffic.turn(1, 3) == 3, aside


@given(
    uses=st.integers(0, 1),
    tokens=st.integers(1, 100_000),
    end=st.integers(1, 1_000_000),
    nbytes=st.integers(0, 10**12),
)
def test_one_use_weighs_more_than_any_place(uses, tokens, end, nbytes):
    """Of the first; twice the uses always count the same, and so does a wish."""
    worth = Worth(1000, 10**6, growth=0.001)
    mine = worth.of(uses, tokens, end, nbytes)
    assert worth.of(uses + 1, 1, 1, 10**15) > mine or uses
    assert worth.of(2 * uses + 1, tokens, end, nbytes) == mine + 1
    assert worth.of(uses, tokens, end, nbytes, kept=True) == mine + 1


WISH = ((60, 300.0),)


def test_a_prefix_that_is_wished_kept_outlasts_one_that_is_not_while_that_holds():
    """It goes after what was used later and not wished; once the time is over, before that."""
    for waited, first in ((299.0, 2), (301.0, 1)):
        traffic = Traffic(1000)
        traffic.ask(1, 60, keeps=WISH)
        traffic.ask(2, 60)
        traffic.time += waited
        assert (
            traffic.tree.least_leaf()
            is traffic.tree.match(traffic.ids(first, 60), touch=False).nodes[-1]
        )


def test_each_use_begins_the_time_again():
    traffic = Traffic(1000)
    traffic.ask(1, 60, keeps=WISH)
    traffic.ask(2, 60)
    traffic.time += 299
    traffic.tree.match(traffic.ids(1, 60))
    traffic.time += 299
    first = traffic.tree.least_leaf()
    assert first is not None
    assert first.end == 60
    assert traffic.tree.match(traffic.ids(2, 60), touch=False).nodes[-1] is first


def test_what_follows_a_mark_is_not_wished():
    """An end beyond it goes as ever; eviction is told where the wish begins."""
    traffic = Traffic(1000)
    traffic.ask(1, 90, keeps=WISH)
    leaf = traffic.tree.least_leaf()
    assert leaf is not None
    assert traffic.tree.wished(leaf) == 60
    traffic.tree.cut(leaf, 60)
    assert traffic.tree.wished(leaf) == 0


def test_who_marks_everything_gains_no_more_than_the_weight():
    """One-offs, all marked for ever, push nobody out who goes on; and they go in the end."""
    traffic = Traffic(600)
    traffic.turn(1, 100)
    traffic.turn(1, 10)
    for number in range(10, 60):
        traffic.ask(3 * number, 60, keeps=((60, 1e9),))
        assert traffic.turn(1, 2) == 2
    assert traffic.held(30) <= HEAD
    assert traffic.held(3 * 59) == 60


def test_leaves_of_trees_that_share_a_clock_are_ranked_by_use():
    """What one tree evicts ages the other's; replaced leaves come before all others."""
    clock = EvictionClock(lambda: 100)
    quiet, busy = Traffic(400, clock=clock), Traffic(100, clock=clock)
    for _ in range(2):
        quiet.turn(1)
    for number in range(2, 12):
        busy.turn(number)
        busy.turn(number)
    old, new = quiet.tree.least_leaf(), busy.tree.least_leaf()
    assert old is not None
    assert new is not None
    assert clock.now > 0.0
    assert quiet.tree.rank(old) < busy.tree.rank(new)
    quiet.turn(1)
    assert quiet.tree.rank(old) > busy.tree.rank(new)
    old.usage.replaced = True
    assert quiet.tree.rank(old) < busy.tree.rank(new)


def test_a_shared_clock_counts_bytes_of_all_its_trees():
    """The only leaf of a small tree is a small part of them, so its eviction ages little."""
    trees: list[PrefixTree] = []
    clock = EvictionClock(lambda: sum(tree.kv_bytes for tree in trees))
    trees += [PrefixTree(1, clock=clock), PrefixTree(1, clock=clock)]
    trees[0].insert(token_ids(range(10)), object())
    trees[1].insert(token_ids(range(990)), object())
    leaf = trees[0].least_leaf()
    assert leaf is not None
    trees[0].note_eviction(leaf, 0)
    assert clock.now == 0.01
