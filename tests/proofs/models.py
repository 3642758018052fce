"""Default models of `bin/bench`: random weights, made in seconds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from tokenizers import Tokenizer

from mlxcache.bench.random_model import lonely_letters
from tests.toys.toy import make_bench_toy, make_toy

VOCABULARY = 4096


def for_speed(path: Path) -> Path:
    """Make a model of 5 million float32 parameters, with 4 KB of KV per token.

    Its replies consist of single characters that no merge joins, so that they encode to the tokens
    that were generated, as those of a trained model do: a next turn is then new from the end of the
    reply on, and not from within it.
    """
    make_bench_toy(path)
    return _lonely_replies(path)


def windowed(path: Path) -> Path:
    """Make a model like `for_speed`, every other layer with a sliding window of 512 tokens."""
    return of_family(path, "gemma3")


def recurrent(path: Path) -> Path:
    """Make a model like `for_speed`, every other layer recurrent."""
    return of_family(path, "qwen3_5")


def of_family(path: Path, family: str) -> Path:
    """Make a model like `for_speed`, of any family in `configs.FAMILIES`. Raises KeyError."""
    return _lonely_replies(_middling(path, family))


def tiny(path: Path, family: str) -> Path:
    """Make the smallest model of a family, where only the server matters. Raises KeyError."""
    return _lonely_replies(make_toy(path, family))


def of_experts(
    path: Path, family: str, seed: int, kv_heads: int, experts: Mapping[str, Any]
) -> Path:
    """Make a model of `family` with many experts of which a token uses few.

    `experts`: the keys of its configuration that say how many and how large. A token has
    `kv_heads` x 4 KB of KV if all layers attend.
    """
    return _lonely_replies(
        make_toy(
            path, family, seed=seed, hidden=256, heads=8, kv_heads=kv_heads, head_dim=128,
            more=experts,
        )
    )  # fmt: skip


def _middling(path: Path, family: str) -> Path:
    return make_toy(
        path, family, vocab_size=VOCABULARY, hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32,
        intermediate=768, context=131072, window=512,
    )  # fmt: skip


def _lonely_replies(path: Path) -> Path:
    """Zero the head's rows in the model in `path`, except of characters that no merge joins."""
    vocabulary: dict[str, int] = Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab()
    kept = [vocabulary[letter] for letter in lonely_letters(vocabulary)]
    weights = mx.load(str(path / "model.safetensors"))
    assert isinstance(weights, dict)
    (name,) = (name for name in weights if name.endswith("lm_head.weight"))
    head = weights[name]
    silenced = mx.zeros_like(head)
    silenced[mx.array(kept)] = head[mx.array(kept)]
    weights[name] = silenced
    mx.eval(weights)
    mx.save_safetensors(str(path / "model.safetensors"), weights, metadata={"format": "mlx"})
    return path


def light(path: Path) -> Path:
    """Make a model with 2 KB of KV per token and little work, for long prompts.

    As in a real model, each array is a small part of the KV: an array that grows exists twice for a
    moment.
    """
    return make_toy(path, hidden=64, layers=8, heads=1, kv_heads=1, head_dim=32)


def heavy(path: Path) -> Path:
    """Make a model with 32 KB of KV per token and little work, to fill a budget soon."""
    return make_toy(path, hidden=64, layers=8, heads=8, kv_heads=8, head_dim=64)


def wordy(path: Path) -> Path:
    """Make a model with a vocabulary of 120,000 tokens, as real ones have; its steps take 30 ms."""
    return make_toy(
        path, vocab_size=131072, hidden=512, layers=4, heads=8, kv_heads=4, head_dim=64,
        intermediate=1536,
    )  # fmt: skip


def grouped(path: Path, hidden: int, layers: int = 4) -> Path:
    """Make a model with grouped attention and a long context, whose passes guesses are to save."""
    return make_toy(
        path, "llama", vocab_size=VOCABULARY, hidden=hidden, layers=layers, heads=6, kv_heads=2,
        head_dim=64, intermediate=4 * hidden, context=131072,
    )  # fmt: skip


def wide(path: Path) -> Path:
    """Make a model like `heavy`, whose replies encode to the tokens that were generated."""
    return _lonely_replies(heavy(path))
