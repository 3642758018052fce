"""The measurement of a large index runs, here with few files."""

from __future__ import annotations

import sys

import pytest

from tests.proofs.index_scale import BOUNDS, fill, measure


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_every_figure_with_a_bound_is_measured(tmp_path):
    figures: dict[str, float] = {}
    measure(tmp_path / "store", fill(tmp_path / "store", 400), figures.__setitem__)
    assert figures.keys() > BOUNDS.keys()
    assert all(figure >= 0 for figure in figures.values())
    assert figures["evict_100_files"] > 50
