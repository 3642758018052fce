"""What is cut from the tree on purpose, and what of others stays."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mlxcache.types import token_ids
from tests.conftest import ToyMaker
from tests.scheduled import Bench


def test_what_the_tree_does_not_hold_costs_nobody_else(toy: ToyMaker) -> None:
    """A conversation that is evicted, or failed at once, begins as all others do."""
    path: Path = toy("llama")
    bench = Bench(path)
    ids = np.random.default_rng(1).integers(10, 400, 300).tolist()
    bench.ask(ids, tokens=4)
    gone = token_ids([*ids[:4], 401, *ids[5:200]])
    assert bench.kv.forget(gone, 4) == 0
    assert bench.kv.reusable(token_ids(ids)) == 299
    assert bench.kv.forget(token_ids(ids), 4) > 200
    assert bench.kv.reusable(token_ids(ids)) == 4
    bench.check()
