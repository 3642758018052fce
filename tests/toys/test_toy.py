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
from tests.toys.toy import make_bench_toy, make_toy

TOOLS = [{"type": "function", "function": {"name": "Read", "parameters": {"type": "object"}}}]


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


def weights(folder: Path) -> dict[str, mx.array]:
    """The arrays of a model's only file."""
    return cast(dict[str, mx.array], mx.load(str(folder / "model.safetensors")))


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


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_same_seed_gives_the_same_weights(tmp_path: Path, family: str) -> None:
    first, again, other = (
        weights(make_toy(tmp_path / name, family, seed=seed))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(mx.array_equal(first[name], again[name]) for name in first)
    assert not all(mx.array_equal(first[name], other[name]) for name in first)


@pytest.mark.slow
def test_control_tokens_are_never_the_likeliest_unless_asked_for(
    toy: Callable[..., Path], toy_llama: Path
) -> None:
    """Some replies go round in circles and never end, on one tokenizer more than on another."""
    ends = toy("llama", emits={"<|im_end|>": 20})
    words = "the quick brown fox jumps over a lazy dog while seven wizards query parser settings"
    ended = {}
    for path, replies in ((toy_llama, 3), (ends, 8)):
        model, tokenizer = mlx_lm.load(str(path))
        for seed in range(replies):
            said = " ".join(np.random.default_rng(seed).choice(words.split(), 20))
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": said}], add_generation_prompt=True
            )
            end = tokenizer.eos_token_id
            ended[path, seed] = end in greedy(model, prompt, 200)
    assert not any(ended[toy_llama, seed] for seed in range(3))
    assert sum(ended[ends, seed] for seed in range(8)) >= 3


def test_two_emitted_tokens_both_appear(toy: Callable[..., Path]) -> None:
    path = toy("llama", thinking=True, emits={"</think>": 10, "<|im_end|>": 20})
    model, tokenizer = mlx_lm.load(str(path))
    seen = set()
    for number in range(6):
        seen |= set(greedy(model, some_prompt(80 + number), 100))
    assert {tokenizer.think_end_id, tokenizer.eos_token_id} <= seen


def test_the_template_renders_tools_calls_and_results(toy_llama: Path) -> None:
    _, tokenizer = mlx_lm.load(str(toy_llama))
    call = {"type": "function", "function": {"name": "Read", "arguments": {"path": "/x"}}}
    messages = [
        {"role": "system", "content": "Be good."},
        {"role": "user", "content": "Read it"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "its text"},
        {"role": "system", "content": "A note."},
    ]
    text = tokenizer.apply_chat_template(
        messages, tools=TOOLS, tokenize=False, add_generation_prompt=True
    )
    assert text.startswith("<|im_start|>system\nBe good.\n\n# Tools")
    assert '<tool_call>\n{"name": "Read", "arguments": {"path": "/x"}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\nits text\n</tool_response><|im_end|>\n" in text
    assert text.endswith("<|im_start|>system\nA note.<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.has_tool_calling
    assert tokenizer.tool_parser('{"name": "Read", "arguments": {}}')["name"] == "Read"


def test_a_thinking_template_opens_the_block_and_drops_old_reasoning(
    toy: Callable[..., Path],
) -> None:
    _, tokenizer = mlx_lm.load(str(toy("llama", thinking=True)))
    old = {"role": "assistant", "content": "Yes.", "reasoning_content": "an old thought"}
    new = {"role": "assistant", "content": "No.", "reasoning_content": "a new thought"}
    ask = {"role": "user", "content": "Well?"}
    render = tokenizer.apply_chat_template
    text = render([ask, old, ask, new], tokenize=False, add_generation_prompt=True)
    assert "an old thought" not in text
    assert "<think>\na new thought\n</think>\n\nNo.<|im_end|>" in text
    assert text.endswith("<|im_start|>assistant\n<think>\n")
    quiet = render([ask], tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert quiet.endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("text", ["naïve 漢字 🙂 \x00", "  two  spaces\n\n\ttab", "1234567890"])
def test_the_tokenizer_gives_back_any_text(toy_llama: Path, text: str) -> None:
    _, tokenizer = mlx_lm.load(str(toy_llama))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_bench_toy_has_five_million_parameters(tmp_path: Path) -> None:
    arrays = weights(make_bench_toy(tmp_path)).values()
    assert 4e6 < sum(value.size for value in arrays) < 6e6


def test_an_odd_number_of_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="even"):
        make_toy(tmp_path, layers=3)
