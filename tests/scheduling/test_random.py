"""Random histories: whatever clients do, warm equals cold and the accounts are right.

`MLXCACHE_HISTORIES=50` runs so many of each kind, and longer ones.
"""

from __future__ import annotations

import os

import pytest

from tests.conftest import ToyMaker
from tests.scheduled import FAMILIES
from tests.scheduling.history import live

MANY = int(os.environ.get("MLXCACHE_HISTORIES", "0"))
STEPS = 200 if MANY else 30


@pytest.mark.parametrize("seed", range(MANY or 1))
@pytest.mark.parametrize("ram_tokens", [None, pytest.param(1100, marks=pytest.mark.slow), 400])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_history(toy: ToyMaker, family: str, ram_tokens: int | None, seed: int) -> None:
    """`ram_tokens` is what the budget holds; at 400 nearly everything is evicted again."""
    live(toy(family), seed, STEPS, ram_tokens=ram_tokens, longest=300 if MANY else 120)


ALSO = ("qwen3_next", "mamba2", "deepseek_v41")


@pytest.mark.parametrize("seed", range(MANY or 1))
@pytest.mark.parametrize("ram_tokens", [pytest.param(None, marks=pytest.mark.slow), 700])
@pytest.mark.parametrize(
    "family",
    [
        "gpt_oss",
        "deepseek_v3",
        "llama4",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ALSO),
    ],
)
def test_a_random_history_of_another_family(
    toy: ToyMaker, family: str, ram_tokens: int | None, seed: int
) -> None:
    """Experts, pure recurrence, compressed attention of two kinds, chunked attention."""
    live(toy(family), seed, STEPS if MANY else 25, ram_tokens=ram_tokens, longest=120)


def test_many_lanes_of_chunked_attention_keep_the_budget(toy: ToyMaker) -> None:
    """While it is stepped, a chunk's buffer is larger than its checkpoint."""
    live(toy("llama4"), 2, 25, ram_tokens=700, longest=120)
