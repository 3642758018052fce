"""The model's own time."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxcache.bench.own import NoOwnTime, measuring
from mlxcache.model.own_time import OwnTime
from tests.toys.toy import make_toy


def test_each_measurement_starts_from_the_prefix_and_leaves_no_trace(tmp_path: Path) -> None:
    """The cache is cut back, also to a shorter prefix, and fed where it is too short."""
    own = OwnTime(make_toy(tmp_path))
    for prefix in (300, 300, 100, 200):
        assert own.seconds(prefix, 20) > 0
        assert prefix + 20 <= own.cache[0].offset <= prefix + 22
    # four layers, keys and values, two heads of 32, four bytes each
    assert own.kv_bytes_per_token() == 4 * 2 * 2 * 32 * 4


def test_a_cache_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    """A copy of its state would be measured with it."""
    model = make_toy(tmp_path, "qwen3_5")
    with pytest.raises(ValueError, match="cannot be cut back"):
        OwnTime(model)


def test_the_process_answers_until_the_block_ends(tmp_path: Path) -> None:
    """And a question that it cannot answer is an error, not a wait."""
    with measuring(make_toy(tmp_path / "model"), tmp_path) as own:
        assert own is not None
        seconds, kv_bytes = own.ask(64, 8)
        assert seconds > 0
        assert kv_bytes == 2048
        with pytest.raises(NoOwnTime):
            own.ask(64, -1)
    assert own.process.returncode is not None
