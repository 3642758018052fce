"""The proof that a lost rank ends the group and costs nothing that is durable."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.proofs.ranks_crash import FREEZE, KILL, Proof


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_killed_and_a_frozen_rank(tmp_path: Path):
    proof = Proof(tmp_path, random.Random(3), print)
    proof.run(2, time.monotonic() + 300)
    assert not proof.wrong
    assert set(proof.faults) == {KILL, FREEZE}
    assert len(proof.report()) == 4
