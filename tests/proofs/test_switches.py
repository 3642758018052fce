"""The proofs of switches and of idle unload, on small models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.proofs.switches import idle_unloads, twenty_switches

TOO_SMALL = ("most memory beyond the budget", "bytes read while a reply is written")
"""Bounds that hold from 1 GB of weights on."""


@pytest.mark.slow
def test_switches_between_small_models_keep_all_bounds(tmp_path: Path) -> None:
    checks = twenty_switches(tmp_path, 200_000_000, 4, 0.7)
    assert [one for one in checks if not one.ok and not one.name.startswith(TOO_SMALL)] == []
    assert len(checks) >= 8


@pytest.mark.slow
def test_idle_small_models_are_unloaded_again_and_again(tmp_path: Path) -> None:
    assert [one for one in idle_unloads(tmp_path, 50_000_000, 4) if not one.ok] == []
