"""Reference replies of mlx-lm alone, without server, cache or batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from mlx_lm import generate, load


@lru_cache
def _loaded(model: Path) -> tuple[Any, Any]:
    return load(str(model))[:2]


def greedy(model: Path, messages: Sequence[Mapping[str, Any]], tokens: int = 24) -> str:
    """The likeliest `tokens` tokens after a conversation, as text."""
    network, tokenizer = _loaded(model)
    prompt = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
    return str(generate(network, tokenizer, prompt, max_tokens=tokens))
