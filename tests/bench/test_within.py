"""Figures of an engine in a process of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxcache.bench.context import QUICK
from mlxcache.bench.findings import Findings
from mlxcache.bench.prove_engine import peak_memory
from mlxcache.model import kv
from mlxcache.model.load import Loaded
from tests.toys.toy import make_toy


class Holding:
    """A model of which somebody reads the KV of the first layer during each step."""

    def __init__(self, model: Any):
        self.model = model

    def __call__(self, tokens: mx.array, *, cache: Any, **inputs: Any) -> Any:
        offset = cache[0].offset
        held = [array[..., :offset, :] for array in kv.arrays_of(cache[0])] if offset else []
        mx.eval(held)
        logits = self.model(tokens, cache=cache, **inputs)
        mx.eval(logits, kv.arrays_of(cache[0]))
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def test_a_decode_that_copies_its_kv_is_told(tmp_path: Path) -> None:
    """A slice that is held during a step makes MLX copy the buffer."""
    model = make_toy(tmp_path / "model", hidden=64, layers=2, heads=8, kv_heads=8, head_dim=64)
    scale = replace(QUICK, deep=3_000)

    def held(loaded: Loaded) -> Loaded:
        return replace(loaded, model=Holding(loaded.model))

    def note(name: str, prepare: Callable[[Loaded], Loaded]) -> str:
        found = Findings("peak_memory", "m")
        asyncio.run(peak_memory(model, tmp_path / name, scale, found, prepare))
        return found.notes[0].partition(": ")[2]

    assert note("plain", lambda loaded: loaded) == "no copy of the KV."
    assert note("held", held).endswith("times the KV of one layer: a copy.")
