"""Names of objects, and the search for those of a prompt."""

from __future__ import annotations

import random

import pytest

from mlxcache.remote import grid
from mlxcache.store.digests import Chains
from tests.store.content import branch, tokens


@pytest.mark.parametrize(
    ("nbytes", "cell"),
    [(0, 2048), (1, 2048), (16 << 10, 2048), (128 << 10, 256), (130_000, 256), (1 << 20, 64)],
)
def test_a_cell_is_the_largest_power_of_two_of_blocks_within_its_bytes(nbytes: int, cell: int):
    """131,072 bytes per token are those of a model with 8 billion parameters."""
    assert grid.cell_tokens(nbytes) == cell


def test_the_last_cell_is_found_in_few_rounds():
    drawn = random.Random(1)
    for _ in range(300):
        low = drawn.randrange(50)
        high = low + drawn.randrange(900)
        last = drawn.randint(low, high)
        rounds: list[int] = []

        def exist(cells, last=last, rounds=rounds):
            rounds.append(len(cells))
            return [cell <= last for cell in cells]

        assert grid.find_last(low, high, exist) == last
        assert len(rounds) <= 4
        assert max(rounds, default=0) <= grid.PROBES


def test_servers_agree_on_names_as_far_as_prompts_are_equal():
    ids = tokens(700)
    one, other = Chains("space").of(ids), Chains("space").of(branch(ids, 300, 700))
    assert grid.run_name(one, 256) == grid.run_name(other, 256)
    assert grid.run_name(one, 320) != grid.run_name(other, 320)
    assert grid.run_name(one, 64) != grid.run_name(Chains("else").of(ids), 64)
