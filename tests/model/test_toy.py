"""Toys load in mlx-lm, have the caches they are made for, and answer from their whole context."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.model.toy import make_bench_toy, make_toy
from mlxcache.model.toy_configs import FAMILIES

TOOLS = [{"type": "function", "function": {"name": "Read", "parameters": {"type": "object"}}}]


def greedy(model: Any, prompt: list[int], count: int, chunk: int = 64) -> list[int]:
    """The next `count` greedy tokens, the prompt fed in chunks."""
    cache = make_prompt_cache(model)
    for start in range(0, len(prompt), chunk):
        logits = model(mx.array([prompt[start : start + chunk]]), cache=cache)[:, -1]
    out = []
    for _ in range(count):
        token = mx.argmax(logits, axis=-1)
        out.append(int(token.item()))
        logits = model(token[None], cache=cache)[:, -1]
    return out


def some_prompt(length: int = 700) -> list[int]:
    return [int(token) for token in np.random.default_rng(1).integers(10, 400, length)]


CACHES = {
    "llama": {"KVCache"},
    "qwen3": {"KVCache"},
    "deepseek_v3": {"KVCache"},
    "gemma3": {"RotatingKVCache", "KVCache"},
    "gpt_oss": {"RotatingKVCache", "KVCache"},
    "qwen3_5": {"ArraysCache", "KVCache"},
    "qwen3_next": {"ArraysCache", "KVCache"},
    "mamba2": {"ArraysCache"},
    "llama4": {"ChunkedKVCache", "KVCache"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_its_own_kinds_of_cache(toy: Callable[..., Path], family: str) -> None:
    model, tokenizer = mlx_lm.load(str(toy(family)))
    assert {type(layer).__name__ for layer in make_prompt_cache(model)} == CACHES[family]
    assert tokenizer.eos_token_ids == {tokenizer.convert_tokens_to_ids("<|im_end|>")}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_varies_and_does_not_depend_on_the_chunks(
    toy: Callable[..., Path], family: str
) -> None:
    model, _ = mlx_lm.load(str(toy(family)))
    text = greedy(model, some_prompt(), 48)
    assert len(set(text)) >= 8
    assert greedy(model, some_prompt(), 48, chunk=57) == text


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_300_positions_back_changes_the_greedy_text(
    toy: Callable[..., Path], family: str
) -> None:
    """True of most single tokens; three replaced together must always show."""
    model, _ = mlx_lm.load(str(toy(family)))
    other = some_prompt()
    for back in (300, 301, 302):
        other[-back] += 50
    assert greedy(model, other, 64) != greedy(model, some_prompt(), 64)


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    first, again, other = (
        mx.load(str(make_toy(tmp_path / name, seed=seed) / "model.safetensors"))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert all(mx.array_equal(first[name], again[name]) for name in first)
    assert not all(mx.array_equal(first[name], other[name]) for name in first)


def test_control_tokens_are_never_the_likeliest_unless_asked_for(
    toy: Callable[..., Path], toy_llama: Path
) -> None:
    ends = toy("llama", emits={"<|im_end|>": 20})
    lengths = []
    for path in (toy_llama, ends):
        model, tokenizer = mlx_lm.load(str(path))
        for number in range(6):
            prompt = tokenizer.apply_chat_template(
                [{"role": "user", "content": f"question {number}"}], add_generation_prompt=True
            )
            text = greedy(model, prompt, 200)
            end = tokenizer.eos_token_id
            lengths.append(text.index(end) if end in text else None)
    assert lengths[:6] == [None] * 6
    assert sum(length is not None for length in lengths[6:]) >= 5


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
    weights = mx.load(str(make_bench_toy(tmp_path) / "model.safetensors"))
    assert 4e6 < sum(value.size for value in weights.values()) < 6e6


def test_an_odd_number_of_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="even"):
        make_toy(tmp_path, layers=3)
