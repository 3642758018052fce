"""The models that are measured where none is named: random weights, made in seconds."""

from __future__ import annotations

from pathlib import Path
from string import ascii_letters, digits, punctuation

import mlx.core as mx
from tokenizers import Tokenizer

from tests.toys.toy import make_bench_toy, make_toy

LETTERS = [c for c in punctuation + ascii_letters + digits if c not in "<'"]
"""What a reply may be made of: `<` opens the template's marks, and `'` is cut by its own rule."""


def for_speed(path: Path) -> Path:
    """About 5 million parameters in float32, 4 kB of KV per token.

    Its replies are made of single characters that no merge joins, so that they come back from a
    client as the tokens they were, as a trained model's do: a next turn is then new from the
    reply's end on, and not from somewhere within it.
    """
    make_bench_toy(path)
    return _lonely_replies(path)


def windowed(path: Path) -> Path:
    """As `for_speed`, every other layer with a sliding window of 512 tokens."""
    return of_family(path, "gemma3")


def recurrent(path: Path) -> Path:
    """As `for_speed`, every other layer recurrent."""
    return of_family(path, "qwen3_5")


def of_family(path: Path, family: str) -> Path:
    """As `for_speed`, of any family in `configs.FAMILIES`. Raises KeyError."""
    return _lonely_replies(_middling(path, family))


def tiny(path: Path, family: str) -> Path:
    """The least of a family, for where only the server counts. Raises KeyError."""
    return _lonely_replies(make_toy(path, family))


def _middling(path: Path, family: str) -> Path:
    return make_toy(
        path, family, vocab_size=4096, hidden=256, layers=4, heads=8, kv_heads=4, head_dim=32,
        intermediate=768, context=131072, window=512,
    )  # fmt: skip


def _lonely_replies(path: Path) -> Path:
    """Silence all tokens of the model in `path` but those of characters that no merge joins."""
    vocabulary: dict[str, int] = Tokenizer.from_file(str(path / "tokenizer.json")).get_vocab()
    kept = [vocabulary[letter] for letter in lonely(vocabulary)]
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


def lonely(vocabulary: dict[str, int]) -> list[str]:
    """Characters of which no two, nor one twice, are a token together."""
    chosen: list[str] = []
    for letter in LETTERS:
        among = [*chosen, letter]
        joins = any(letter + c in vocabulary or c + letter in vocabulary for c in among)
        if letter in vocabulary and not joins:
            chosen.append(letter)
    return chosen


def light(path: Path) -> Path:
    """2 kB of KV per token and little work: for long prompts whose time does not matter.

    As in a real model each of its arrays is a small part of the whole, for one that grows is
    there twice for a moment.
    """
    return make_toy(path, hidden=64, layers=8, heads=1, kv_heads=1, head_dim=32)


def heavy(path: Path) -> Path:
    """32 kB of KV per token and little work: for filling a budget soon."""
    return make_toy(path, hidden=64, layers=8, heads=8, kv_heads=8, head_dim=64)


def wide(path: Path) -> Path:
    """As `heavy`, with replies that come back as the tokens they were."""
    return _lonely_replies(heavy(path))
