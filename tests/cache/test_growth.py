"""How much growing buffers copy over a conversation, and when, counted without arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import mlx_lm
import numpy as np
import pytest

from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.ram import with_slack
from mlxcache.model import kv
from mlxcache.model.lineage import Span
from mlxcache.plan.cache import CountedLineage
from mlxcache.tree.budget import Budget
from mlxcache.types import token_ids
from tests.conftest import ToyMaker

FIRST, LAST, REPLY = 20_000, 200_000, 220


class Conversation:
    """One conversation with a cache; `copied` counts positions by when they were copied."""

    def __init__(self, layout: kv.Layout, limit: int, monkeypatch: pytest.MonkeyPatch):
        self.budget = Budget(limit * layout.bytes_per_token)
        self.cache = KVCache.open(layout, self.budget, lineage=CountedLineage)
        self.copied: Counter[str] = Counter()
        self._when = ""
        refill = CountedLineage._refill

        def counted(line: CountedLineage, sources: Sequence[Span], capacity: int) -> None:
            self.copied[self._when] += sum(end - start for _, start, end in sources)
            refill(line, sources, capacity)

        monkeypatch.setattr(CountedLineage, "_refill", counted)
        self.ids = np.random.default_rng(1).integers(0, 1000, LAST + 5000, np.int32)

    def turn(self, prompt: int, *, idle: bool) -> None:
        """Send a prompt of `prompt` tokens, and draw its reply; then be idle, or not."""
        self._when = "first token"
        ids = token_ids(self.ids[: prompt + REPLY])
        lease = self.cache.acquire(ids[:prompt], REPLY)
        assert lease is not None
        lease.lineage.advance(prompt - lease.length)
        self._when = "reply"
        while lease.length < len(ids):
            assert self.cache.extend(lease, lease.length + 1)
            lease.lineage.advance(1)
        self.cache.commit(lease, ids, checkpoint=False)
        self.cache.release(lease)
        assert self.budget.used <= self.budget.limit
        self._when = "idle"
        while idle and self.cache.may_grow_ahead:
            self.cache.grow_ahead()
            assert self.budget.used <= self.budget.limit

    def play(self, added: int, *, idle: bool) -> int:
        """Let the conversation grow to its end by `added` tokens a turn; the tokens it added."""
        prompt = FIRST
        self.turn(prompt, idle=idle)
        self.copied.clear()
        while prompt + added + REPLY < LAST:
            prompt += added
            self.turn(prompt, idle=idle)
        return prompt - FIRST


@pytest.fixture
def layout(toy: ToyMaker) -> kv.Layout:
    return kv.survey(mlx_lm.load(str(toy("llama")))[0])


@pytest.mark.parametrize("added", [300, 1500, 3000])
@pytest.mark.parametrize("idle", [True, False])
def test_growth_copies_six_times_what_is_added_at_most(
    layout: kv.Layout, monkeypatch: pytest.MonkeyPatch, added: int, idle: bool
) -> None:
    """With memory to spare; and, after a pause, not while a user waits for a first token."""
    talk = Conversation(layout, 2 * LAST, monkeypatch)
    new = talk.play(added, idle=idle)
    assert new < talk.copied.total() < 6 * new
    if idle:
        assert set(talk.copied) == {"idle"}


def test_with_little_memory_buffers_have_little_slack(
    layout: kv.Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is copied in advance then."""
    talk = Conversation(layout, LAST + LAST // 4, monkeypatch)
    talk.play(3000, idle=True)
    (line,) = talk.cache.ram.idle.values()
    assert line.capacity <= with_slack(LAST)
    assert talk.copied["first token"] > 0
