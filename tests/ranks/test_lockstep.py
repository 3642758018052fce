"""Operations that a leader tells, repeated by a follower in the same process: the same KV."""

from __future__ import annotations

import gc
from collections import deque
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.model import kv
from mlxcache.model.arrays import tree_arrays
from mlxcache.model.lineage import Lineage
from mlxcache.ranks.follower import Follower
from mlxcache.ranks.leader import Leader
from mlxcache.ranks.mirrored import MirroredLineage, mirrored_parts
from mlxcache.ranks.operations import Open
from mlxcache.tree.budget import Budget
from tests.conftest import ToyMaker
from tests.scheduling.history import History


class Tape:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.sent: deque[bytes] = deque()

    def send_bytes(self, data: bytes) -> None:
        self.sent.append(data)


class Drawing(Leader):
    """A leader that keeps the tokens it draws, which ranks would get from the pass itself."""

    def __init__(self, tape: Tape):
        super().__init__(None, [tape], [])
        self.drawn: deque[mx.array] = deque()

    def share(self, drawn: mx.array) -> mx.array:
        self.drawn.append(drawn)
        return drawn


class Repeating(Follower):
    """A follower that takes each pass's tokens from its leader's."""

    leader: Drawing

    def share(self, logits: mx.array) -> mx.array:
        drawn = self.leader.drawn.popleft()
        assert len(drawn) == len(logits)
        return drawn


class Pair(History):
    """A random history of a leader, whose operations are repeated after each step."""

    def __init__(self, path: Path, seed: int, ram_tokens: int | None):
        super().__init__(path, seed, ram_tokens=ram_tokens, longest=120)
        bench, plain = self.bench, self.bench.kv.layout
        self.tape = Tape()
        self.leader = Drawing(self.tape)
        self.follower = Repeating(bench.model, plain, None)
        self.follower.leader = self.leader
        old = bench.kv
        bench.parts = mirrored_parts(self.leader)
        memory = bench.open_cache(
            replace(plain, divided=True), Budget(old.budget.limit), copy_bytes=old.ram.copy_bytes
        )
        assert memory.budget.reserve("transient", old.budget.by_kind()["transient"])
        bench.use(memory)

    @property
    def stray(self) -> int:
        """No bound: the follower's KV is in this process too."""
        return 1 << 40

    def repeat(self) -> None:
        """Give the follower everything that was told so far."""
        while self.tape.sent:
            assert self.follower.obey(self.tape.sent.popleft())

    def compare(self) -> int:
        """Compare the KV of both, lineage by lineage; return how many positions were compared."""
        self.repeat()
        ram, total = self.bench.kv.ram, 0
        for mine in [*ram.idle.values(), *ram.busy.values()]:
            assert isinstance(mine, MirroredLineage)
            theirs = self.follower.lineage(mine.number)
            assert (mine.base, mine.capacity) == (theirs.base, theirs.capacity)
            total += compare_rows(mine, theirs)
            for a, b in zip(states(mine), states(theirs), strict=True):
                assert mx.array_equal(a, b, equal_nan=True)
        return total


def states(lineage: Lineage) -> list[mx.array]:
    """The arrays of a lineage's states."""
    return tree_arrays(kv.states(lineage.slots))


def compare_rows(mine: Lineage, theirs: Lineage) -> int:
    """Compare the positions that `mine` holds; return their number."""
    start, end = mine.base, mine.length
    for i, spec in enumerate(mine.layout.specs):
        for j in range(len(spec)):
            own, other = mine.view(i, j, start, end), theirs.view(i, j, start, end)
            assert np.array_equal(np.asarray(own), np.asarray(other)), (i, j, start, end)
    return end - start


@pytest.mark.slow
@pytest.mark.parametrize("ram_tokens", [None, 500])
@pytest.mark.parametrize("family", ["qwen3_5", "llama", "gemma3", "gpt_oss"])
def test_a_follower_has_the_same_kv(toy: ToyMaker, family: str, ram_tokens: int | None) -> None:
    """After any history: prompts that part, batches, cancels, evictions; and nothing more."""
    pair = Pair(toy(family), 5, ram_tokens)
    assert compare_after(pair, steps=12) > 1000
    pair.finish()
    pair.compare()
    pair.clear()
    del pair.bench
    gc.collect()
    pair.leader.tell(Open("", "off"))  # any message tells what was dropped before
    pair.repeat()
    assert pair.follower.counts == (0, 0, 0)


def test_a_follower_has_the_same_kv_after_a_short_history(toy_qwen3_5: Path) -> None:
    """Of a model with recurrent layers, little RAM, and a batch."""
    assert compare_after(Pair(toy_qwen3_5, 5, 500), steps=2) > 100


def compare_after(pair: Pair, steps: int) -> int:
    """Compare both after each step of a history; return how many positions were compared."""
    compared = 0
    for _ in range(steps):
        pair.step()
        compared += pair.compare()
    return compared
