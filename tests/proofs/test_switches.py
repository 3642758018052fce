"""The proofs of switches and of idle unload, on small models."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.proofs.switches import idle_unloads, twenty_switches
from tests.proofs.system_count import Count, counting, read_peak

TOO_SMALL = ("most memory beyond the budget", "bytes read while a reply is written")
"""Bounds that hold from 1 GB of weights on."""


def test_samples_tell_the_most_memory_and_what_was_read_between_two_times() -> None:
    count = Count([1.0, 1.1, 1.2, 1.5], [5, 9, 7, 6], [0, 100, 350, 400])
    assert count.most == 9
    assert count.longest_gap_s == pytest.approx(0.3)
    assert count.per_second == pytest.approx(6.0)
    assert count.read_between(1.05, 1.3) == 250
    assert count.read_between(1.25, 1.3) is None
    assert Count([1.0, 1.1], [5, 9], []).read_between(0.0, 2.0) is None


def test_a_process_is_sampled_many_times_a_second() -> None:
    with counting(os.getpid()) as count:
        time.sleep(0.3)
    assert len(count.times) == len(count.footprints) >= 5
    peak = read_peak(os.getpid())
    assert count.most > 10**6
    assert peak is None or peak >= count.most - (1 << 20)  # the kernel adds up its counts late


@pytest.mark.slow
def test_switches_between_small_models_keep_all_bounds(tmp_path: Path) -> None:
    checks = twenty_switches(tmp_path, 200_000_000, 4, 0.7)
    assert [one for one in checks if not one.ok and not one.name.startswith(TOO_SMALL)] == []
    assert len(checks) >= 8


@pytest.mark.slow
def test_idle_small_models_are_unloaded_again_and_again(tmp_path: Path) -> None:
    assert [one for one in idle_unloads(tmp_path, 50_000_000, 4) if not one.ok] == []
