"""The prefix tree against a model that stores every prefix on its own."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mlxcache.tree.eviction import Worth
from mlxcache.tree.node import Node
from mlxcache.tree.prefix_tree import PathEnds, PrefixTree
from mlxcache.types import token_ids
from tests.tree.check import chain, check_tree, clear

Prefix = tuple[int, ...]

SEQUENCES = st.lists(st.integers(0, 2), max_size=9).map(tuple)
NAMES = ["a", "b", "c", "d"]
CHOICE = st.integers(0, 1000)


def ids(prefix: Prefix):
    return token_ids(prefix)


def prefixes(sequence: Prefix) -> list[Prefix]:
    """Every prefix but the empty one, shortest first."""
    return [sequence[: size + 1] for size in range(len(sequence))]


def nodes_of(tree: PrefixTree) -> list[Node]:
    found: list[Node] = []
    pending = list(tree.root.children.values())
    while pending:
        node = pending.pop()
        found.append(node)
        pending.extend(node.children.values())
    return found


def prefix_of(node: Node) -> Prefix:
    """The tokens from the root to the end of `node`."""
    return tuple(int(token) for each in node.path() for token in each.tokens)


class Against(RuleBasedStateMachine):
    """`held` is the value of each prefix, `states` its checkpoint, `locks` what is locked."""

    def __init__(self):
        super().__init__()
        self.time = 0.0
        self.tree = PrefixTree(3, Worth(3, 5, 0.1), now=lambda: self.time)
        self.held: dict[Prefix, list[str]] = {}
        self.states: dict[Prefix, tuple[object, int]] = {}
        self.locks: list[tuple[Node, Prefix]] = []
        self.ends = PathEnds(self.tree)
        self.followed: set[Prefix] = set()

    @initialize()
    def make_values(self):
        """Lists: equal ones are still different values."""
        self.values: list[list[object]] = [[] for _ in NAMES]

    def found(self, sequence: Prefix) -> Prefix:
        """The longest held prefix of `sequence`."""
        return max((p for p in prefixes(sequence) if p in self.held), key=len, default=())

    def is_leaf(self, prefix: Prefix) -> bool:
        """Whether nothing held goes beyond `prefix`."""
        return not any(len(p) > len(prefix) and p[: len(prefix)] == prefix for p in self.held)

    def pick(self, of, choice: int):
        """One of them, by a number."""
        some = sorted(of, key=lambda x: (len(x), x))
        return some[choice % len(some)]

    def spans(self, prefix: Prefix):
        """Who holds `prefix`, by the model."""
        spans: list[tuple[object, int, int]] = []
        for end, each in enumerate(prefixes(prefix), 1):
            if spans and spans[-1][0] is self.held[each]:
                spans[-1] = (spans[-1][0], spans[-1][1], end)
            else:
                spans.append((self.held[each], end - 1, end))
        return spans

    @rule(sequence=SEQUENCES, which=CHOICE, anchor=st.none() | st.integers(0, 5))
    def insert(self, sequence, which, anchor):
        """What is held keeps its value; the tail gets the new one, unless that lives elsewhere."""
        value = self.values[which % len(self.values)]
        found = self.found(sequence)
        mine = [p for p, v in self.held.items() if v is value]
        if len(found) < len(sequence) and any(p != found[: len(p)] for p in mine):
            with pytest.raises(ValueError, match="holds other tokens"):
                self.tree.insert(ids(sequence), value)
            return
        grows = found and self.held[found] is value and self.is_leaf(found)
        if len(found) < len(sequence) and grows and found not in self.states:
            self.locks = [(n, sequence if p == found else p) for n, p in self.locks]
        node = self.tree.insert(ids(sequence), value, anchor)
        for prefix in prefixes(sequence):
            self.held.setdefault(prefix, value)
        assert prefix_of(node) == sequence
        assert self.tree.match(ids(sequence), touch=False).nodes[-1:] == (node,)[: len(sequence)]

    @rule(sequence=SEQUENCES, touch=st.booleans())
    def match(self, sequence, touch):
        found = self.found(sequence)
        self.followed.add(sequence)
        match = self.tree.match(ids(sequence), touch)
        assert match.length == len(found)
        for upto in range(len(found) + 1):
            spans = match.spans(upto)
            expected = self.spans(found[:upto])
            assert [span[1:] for span in spans] == [span[1:] for span in expected]
            assert all(one[0] is two[0] for one, two in zip(spans, expected, strict=True))
        states = [(len(p), self.states[p][0]) for p in prefixes(found) if p in self.states]
        assert [(at, node.checkpoint) for at, node in match.checkpoints] == states
        touched = [n for n in match.nodes if n.end <= match.length]
        if touch and touched:
            newest = max(node.used_at for node in nodes_of(self.tree))
            assert {node.used_at for node in touched} == {newest}

    @precondition(lambda self: self.held)
    @rule(choice=CHOICE)
    def lock(self, choice):
        """Any prefix can be locked, after a boundary was made there."""
        prefix = self.pick(self.held, choice)
        node = self.tree.insert(ids(prefix), None)
        self.tree.lock(node)
        self.locks.append((node, prefix))

    @precondition(lambda self: self.locks)
    @rule(choice=CHOICE)
    def unlock(self, choice):
        self.tree.unlock(self.locks.pop(choice % len(self.locks))[0])

    @precondition(lambda self: self.held)
    @rule(choice=CHOICE, nbytes=st.integers(0, 9))
    def set_checkpoint(self, choice, nbytes):
        """At any held prefix; the state it replaces comes back."""
        prefix = self.pick(self.held, choice)
        state = object()
        replaced = self.tree.set_checkpoint(self.tree.insert(ids(prefix), None), state, nbytes)
        assert replaced is self.states.get(prefix, (None,))[0]
        self.states[prefix] = (state, nbytes)

    @precondition(lambda self: self.states)
    @rule(choice=CHOICE)
    def drop_checkpoint(self, choice):
        prefix = self.pick(self.states, choice)
        node = self.tree.match(ids(prefix), touch=False).nodes[-1]
        assert self.tree.drop_checkpoint(node) is self.states.pop(prefix)[0]

    @precondition(lambda self: self.held)
    @rule(choice=CHOICE)
    def split(self, choice):
        prefix = self.pick(self.held, choice)
        node = self.tree.match(ids(prefix), touch=False).nodes[-1]
        assert prefix_of(self.tree.split_at(node, len(prefix))) == prefix

    @precondition(lambda self: self.held)
    @rule(choice=CHOICE)
    def cut(self, choice):
        prefix = self.pick(self.held, choice)
        node = self.tree.match(ids(prefix), touch=False).nodes[-1]
        whole = prefix_of(node)
        position = len(prefix) - 1
        locked = any(p[: len(whole)] == whole for _, p in self.locks)
        if locked or not self.is_leaf(whole):
            with pytest.raises(ValueError, match="cannot cut"):
                self.tree.cut(node, position)
        else:
            self.cut_leaf(node, position)

    def cut_leaf(self, node: Node, position: int):
        whole = prefix_of(node)
        state, nbytes = self.states.pop(whole, (None, 0))
        cut = self.tree.cut(node, position)
        assert cut.value is self.held[whole]
        assert (cut.start, cut.end, cut.tokens) == (position, len(whole), len(whole) - position)
        assert (cut.checkpoint, cut.checkpoint_bytes) == (state, nbytes)
        for prefix in prefixes(whole)[position:]:
            del self.held[prefix]

    @rule()
    def evict_leaf(self):
        """Of the unlocked leaves the one that is missed least is offered, if there is any."""
        nodes = nodes_of(self.tree)
        unlocked = [node for node in nodes if not node.children and not node.locks]
        leaf = self.tree.least_leaf()
        if not unlocked:
            assert leaf is None
        else:
            assert leaf in unlocked
            order = self.tree._leaves
            assert order.key(leaf) == min(order.key(node) for node in unlocked)
            self.tree.note_eviction(leaf, leaf.start)
            self.cut_leaf(leaf, leaf.start)

    @rule(sequence=SEQUENCES, anchor=st.none() | st.integers(0, 5))
    def ask(self, sequence, anchor):
        self.tree.count_use(self.tree.match(ids(sequence)), len(sequence), anchor)

    @precondition(lambda self: self.held)
    @rule(choice=CHOICE, position=st.integers(1, 9), seconds=st.integers(1, 9))
    def keep(self, choice, position, seconds):
        prefix = self.pick(self.held, choice)
        node = self.tree.match(ids(prefix), touch=False).nodes[-1]
        self.tree.keep(node, ((position, float(seconds)),))

    @rule(seconds=st.integers(1, 5))
    def time_passes(self, seconds):
        self.time += seconds

    @precondition(lambda self: self.held)
    @rule(choice=CHOICE, which=CHOICE)
    def retarget(self, choice, which):
        """A chain moves to a value that is free or lives on the same path."""
        value = self.values[which % len(self.values)]
        prefix = self.pick(self.held, choice)
        node = self.tree.match(ids(prefix), touch=False).nodes[-1]
        held = chain(self.tree, node, node.value)
        deepest = prefix_of(held[-1])
        moved = prefixes(deepest)[node.start :]
        assert all(self.held[each] is node.value for each in moved)
        both = {*moved, *(p for p, v in self.held.items() if v is value)}
        longest = max(both, key=len)
        if any(longest[: len(each)] != each for each in both):
            with pytest.raises(ValueError, match="two branches"):
                self.tree.retarget(held, value)
        else:
            self.tree.retarget(held, value)
            self.held.update(dict.fromkeys(moved, value))

    @rule()
    def clear(self):
        clear(self.tree)
        locked = {each for _, p in self.locks for each in prefixes(p)}
        self.held = {p: v for p, v in self.held.items() if p in locked}
        self.states = {p: s for p, s in self.states.items() if p in locked}

    @invariant()
    def agrees(self):
        check_tree(self.tree)
        assert self.tree.tokens == len(self.held)
        assert self.tree.kv_bytes == 3 * len(self.held)
        assert self.tree.checkpoints == len(self.states)
        assert self.tree.checkpoint_bytes == sum(nbytes for _, nbytes in self.states.values())
        assert self.tree.root.locks == len(self.locks)
        ranges: dict[int, tuple[int, int]] = {}
        for prefix, value in self.held.items():
            start, end = ranges.get(id(value), (99, 0))
            ranges[id(value)] = (min(start, len(prefix) - 1), max(end, len(prefix)))
        assert {id(value) for value in self.tree.values()} == set(ranges)
        for each in self.values if self.held else ():
            assert self.tree.live_range(each) == ranges.get(id(each))
        for node, prefix in self.locks:
            assert prefix_of(node) == prefix
            assert not node.detached
        for path in self.followed:
            known = self.ends.match(path, None) or self.ends.match(path, ids(path))
            assert known == self.tree.match(ids(path), touch=False)


# A failure is told as found: making it smaller takes minutes, which a suite does not have.
Against.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
)
TestAgainstModel = Against.TestCase
