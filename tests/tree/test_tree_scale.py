"""What a look-up costs, in time and in memory, with ten thousand conversations."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from mlxcache.tree.prefix_tree import PrefixTree
from mlxcache.types import join_ids, token_ids
from tests.tree.check import clear

VOCABULARY = 150_000
SYSTEM = 4_000


def tokens(seed: int, count: int):
    return token_ids(np.random.default_rng(seed).integers(0, VOCABULARY, count, dtype=np.int32))


def conversation(system, seed: int, length: int):
    """The shared system prompt and a tail of its own."""
    return join_ids(system, tokens(seed, length - len(system)))


def fill(lengths: list[int], system) -> PrefixTree:
    """One conversation of each length, committed in three turns with a checkpoint after each."""
    tree = PrefixTree(bytes_per_token=1)
    tree.set_checkpoint(tree.insert(system, object()), "state", 1)
    for seed, length in enumerate(lengths):
        ids = conversation(system, seed, length)
        lineage = object()
        for end in np.linspace(len(system), length, 4).astype(int)[1:]:
            tree.set_checkpoint(tree.insert(ids[:end], lineage), "state", 1)
    return tree


def slowest(tree: PrefixTree, lengths: list[int], system, count: int = 200) -> tuple[float, float]:
    """Median and worst seconds of `count` look-ups, each of a conversation and 50 new tokens."""
    seconds = []
    for seed in np.linspace(0, len(lengths) - 1, count).astype(int):
        length = lengths[seed]
        prompt = join_ids(conversation(system, seed, length), tokens(10**6, 50))
        begun = time.perf_counter()
        match = tree.match(prompt)
        spans = match.spans(match.length)
        seconds.append(time.perf_counter() - begun)
        assert match.length >= length
        assert spans[-1][2] == match.length
    return float(np.median(seconds)), max(seconds)


def measure(lengths: list[int]) -> tuple[PrefixTree, float, float, float]:
    """The tree, its bytes per token, and the median and worst seconds of a look-up."""
    system = tokens(10**9, SYSTEM)[: min(SYSTEM, min(lengths) // 2)]
    tracemalloc.start()
    tree = fill(lengths, system)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return tree, used / tree.tokens, *slowest(tree, lengths, system)


def test_a_look_up_takes_as_long_among_many_as_among_few():
    few, many = (measure([2_000] * count) for count in (30, 1_000))
    assert many[2] < 3 * few[2]
    assert many[1] < 1.5 * few[1]


@pytest.mark.slow
def test_look_ups_and_memory_with_ten_thousand_conversations():
    """Under 2 ms and 16 bytes per token, most of them short and some of 20,000 tokens."""
    lengths = [20_000 if seed % 100 == 0 else 2_000 for seed in range(10_000)]
    tree, per_token, median, _ = measure(lengths)
    assert tree.segments > 30_000
    assert median < 0.002
    assert per_token < 16


@pytest.mark.slow
def test_a_deep_path_is_looked_up_fast():
    """200,000 tokens with a checkpoint every 500 are still under 2 ms."""
    tree = PrefixTree(bytes_per_token=1)
    ids = tokens(1, 200_000)
    lineage = object()
    for end in range(500, len(ids) + 1, 500):
        tree.set_checkpoint(tree.insert(ids[:end], lineage), "state", 1)
    seconds = []
    for _ in range(9):
        begun = time.perf_counter()
        match = tree.match(ids)
        assert match.spans(len(ids)) == [(lineage, 0, len(ids))]
        seconds.append(time.perf_counter() - begun)
    assert len(match.checkpoints) == 400
    assert float(np.median(seconds)) < 0.002


@pytest.mark.slow
def test_evicting_ten_thousand_leaves_is_fast():
    """The leaf that is missed least is found by a heap, not by a walk of the tree."""
    tree = fill([60] * 10_000, tokens(10**9, 40))
    assert tree.segments >= 10_000
    begun = time.perf_counter()
    cuts = clear(tree)
    assert time.perf_counter() - begun < 20
    assert sum(cut.tokens for cut in cuts) == 40 + 10_000 * 20 - shared_tails()
    assert tree.tokens == tree.segments == 0


def shared_tails() -> int:
    """Tokens that tails of 20 have in common by chance, each counted once too often."""
    heads = [tuple(tokens(seed, 20)) for seed in range(10_000)]
    distinct = {head[:size] for head in heads for size in range(1, 21)}
    return 10_000 * 20 - len(distinct)
