"""The proof that kill -9 costs nothing that was durable, and that it would notice if it did."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.proofs.crash import OTHER_FILES, Proof, look


@pytest.mark.slow
def test_three_kills_cost_nothing(tmp_path: Path) -> None:
    proof = Proof(tmp_path, 3, random.Random(5), lambda line: None)
    proof.run(("llama", "qwen3_5", "gemma3"), time.monotonic() + 200)
    assert proof.wrong == []
    assert sum(proof.done[name] for name in ("llama", "qwen3_5", "gemma3")) == 3
    assert sum(proof.seen.durable.values()) > 0
    store = tmp_path / "cache" / "store"
    _notices_what_is_wrong(proof, store)


def _notices_what_is_wrong(proof: Proof, store: Path) -> None:
    seen = proof.seen
    id = max(seen.durable, key=seen.durable.__getitem__)
    seen.durable[id] += 1_000_000
    assert any(f"session {id} had" in line for line in look(store, seen))
    seen.durable = {"ses_absent": 5}
    assert look(store, seen) == ["session ses_absent is gone"]
    seen.durable = {}
    assert look(store, seen) == []
    for number in range(OTHER_FILES):
        (store / f"stray{number}").touch()
    (found,) = look(store, seen)
    assert "of which the index knows" in found
    for stray in store.glob("stray*"):
        stray.unlink()
    file = next((store / "runs").rglob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert any("is damaged" in line for line in look(store, seen))
