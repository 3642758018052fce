"""Toys load in mlx-lm, have the caches they are made for, and answer from their whole context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from tests.toys.configs import FAMILIES, RECURRENT, SLICEABLE, WINDOWS


def fed(model: Any, prompt: list[int], chunk: int = 64) -> tuple[mx.array, list[Any]]:
    """The logits after `prompt`, fed in chunks, shape (1, vocabulary), and the cache then."""
    cache = make_prompt_cache(model)
    for start in range(0, len(prompt), chunk):
        logits = model(mx.array([prompt[start : start + chunk]]), cache=cache)[:, -1]
    return logits, cache


def greedy(model: Any, prompt: list[int], count: int, chunk: int = 64) -> list[int]:
    """The next `count` greedy tokens."""
    logits, cache = fed(model, prompt, chunk)
    out: list[int] = []
    for _ in range(count):
        token = mx.argmax(logits, axis=-1)
        out.append(cast(int, token.item()))
        logits = model(token[None], cache=cache)[:, -1]
    return out


def some_prompt(length: int = 420) -> list[int]:
    return [int(token) for token in np.random.default_rng(1).integers(10, 400, length)]


LENGTH = 40
"""Tokens of greedy text that are compared."""

CACHES = {
    **{family: {"KVCache"} for family in SLICEABLE},
    **{family: {"CacheList(KVCache, KVCache)"} for family in ("deepseek_v32", "glm_moe_dsa")},
    **{family: {"RotatingKVCache", "KVCache"} for family in WINDOWS},
    "llama4": {"ChunkedKVCache", "KVCache"},
    "deepseek_v41": {"LayerCache"},
    **{family: {"ArraysCache", "KVCache"} for family in RECURRENT},
    **{family: {"ArraysCache"} for family in ("mamba", "mamba2", "rwkv7")},
    "falcon_h1": {"CacheList(ArraysCache, KVCache)"},
    "recurrent_gemma": {"ArraysCache", "RotatingKVCache"},
}


def kind(cache: Any) -> str:
    """A cache's class, and those of its parts."""
    parts = ", ".join(kind(part) for part in getattr(cache, "caches", ()))
    return type(cache).__name__ + (f"({parts})" if parts else "")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def loaded(toy: Callable[..., Path], family: str) -> tuple[Any, Any]:
    """A family's model and tokenizer."""
    model, tokenizer = mlx_lm.load(str(toy(family)))
    return model, tokenizer


@pytest.fixture(scope="module")
def model(loaded: tuple[Any, Any]) -> Any:
    return loaded[0]


@pytest.fixture(scope="module")
def text(model: Any) -> list[int]:
    """The model's greedy answer to `some_prompt`."""
    return greedy(model, some_prompt(), LENGTH)


def test_each_family_has_its_own_kinds_of_cache(loaded: tuple[Any, Any], family: str) -> None:
    model, tokenizer = loaded
    assert {kind(cache) for cache in make_prompt_cache(model)} == CACHES[family]
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


def test_greedy_text_varies_and_does_not_depend_on_the_chunks(model: Any, text: list[int]) -> None:
    assert len(set(text)) >= 8
    assert greedy(model, some_prompt(), 20, chunk=57) == text[:20]


def test_a_token_300_positions_back_changes_what_follows(model: Any, text: list[int]) -> None:
    """One moves the logits far more than rounding does; ten together change the greedy text."""
    prompt, other = some_prompt(), some_prompt()
    other[-300] += 50
    before, after = (fed(model, ids)[0] for ids in (prompt, other))
    assert mx.abs(before - after).max() > 1e-2
    for back in range(301, 310):
        other[-back] += 50
    assert greedy(model, other, LENGTH) != text
