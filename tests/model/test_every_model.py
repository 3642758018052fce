"""Models of mlx-lm that no toy is of go on alike when they were cut, written and put together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.model import kv
from mlxcache.model import serialise as wire
from mlxcache.model.lineage import Lineage
from tests.model.test_serialise import save
from tests.rounding import rounding
from tests.toys import tiny

NAMES = (
    "baichuan_m1",  # a convolution's state and a window in one layer
    "bailing_moe_v3",
    "deepseek_v32",  # an indexer beside the latents
    "deepseek_v41",  # compressed KV beside a window, and an indexer
    "exaone4",
    "gear",  # all three kinds in one model
    "gemma3n",  # layers that share others' keys and values
    "iquestloopcoder",  # two caches a layer, one after all others
    "kimi_k3",
    "longcat_flash_ngram",  # the last tokens themselves, fewer at the very beginning
    "minimax_m3_vl",
    "nemotron-nas",  # layers without attention
    "plamo2",
    "recurrent_gemma",
    "rwkv7",
)
CHUNKS = (2, 1, 1, 20, 1, 1, 8, 1, 25)
AT = 24
"""A prompt longer than the window of 8 tokens, in chunks shorter and longer than that."""


@pytest.fixture(scope="module", autouse=True)
def not_compiled() -> Iterator[None]:
    """Compiling takes longer than all that is computed here."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def feed(model: Any, line: Lineage, ids: Any) -> mx.array:
    logits: mx.array = model(mx.array(ids)[None], cache=line.caches)[0, -1]
    kv.eval_states(line.caches)
    line.length += len(ids)
    assert line.aligned()
    return logits


def saved(state: kv.State, layout: kv.Layout, path: Path) -> kv.State:
    return wire.load_state(save(path, wire.state_tensors(state)), layout, mx.cpu)


@pytest.mark.parametrize("name", NAMES)
def test_it_goes_on_like_the_whole(name: str, tmp_path: Path) -> None:
    mx.random.seed(3)
    model = tiny.make_tiny(name)
    layout = kv.survey(model)
    ids = np.random.default_rng(2).integers(0, 100, sum(CHUNKS)).astype(np.int32)
    expected = model(mx.array(ids)[None], cache=make_prompt_cache(model))[0, -1]
    line, twin = Lineage(layout), Lineage(layout)
    states = {}
    at = 0
    for size in CHUNKS:
        logits = feed(model, line, ids[at : at + size])
        at += size
        states[at] = saved(line.capture(), layout, tmp_path / f"{at}.safetensors")
    tolerance = rounding(expected)
    assert mx.allclose(logits, expected, rtol=0, atol=tolerance).item()
    if layout.specs:
        twin.fill([(line.detach(0, 10), 0, 10), (line, 10, AT)], 80)
    twin.length = AT
    twin.restore(states[AT])
    assert mx.allclose(feed(model, twin, ids[AT:]), expected, rtol=0, atol=tolerance).item()
