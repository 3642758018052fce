"""Reference for greedy replies: mlx-lm, over a whole text in one pass, without reuse."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mlxcache.model import demo

TOLERANCE = 2e-3
"""Allowed difference of a greedy token's logit from the largest: float32 sums differ."""


class Reference:
    """The tiny model in `path`, whose template is ChatML's."""

    def __init__(self, path: Path):
        self._model = load_model(path)[0]
        spec = (path / "tokenizer.json").read_text(encoding="utf-8")
        self._tokenizer = Tokenizer.from_str(spec)
        self._plain = Tokenizer.from_str(json.dumps(json.loads(spec) | {"added_tokens": []}))
        self.turn_start = self._control_id(demo.TURN_START)
        self.turn_end = self._control_id(demo.TURN_END)

    def _control_id(self, token: str) -> int:
        found = self._tokenizer.token_to_id(token)
        assert found is not None, f"{token} is not in the vocabulary"
        return found

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the token ids of a conversation; text of messages is never a control token."""
        ids: list[int] = []
        for message in messages:
            text = f"{message['role']}\n{message['content']}"
            ids += [self.turn_start, *self.tokens(text), self.turn_end, *self.tokens("\n")]
        return [*ids, self.turn_start, *self.tokens("assistant\n")]

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text, none of which is a control token."""
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def shortfalls(self, ids: list[int], chunk: int | None = None) -> NDArray[np.float32]:
        """Return how far the logit of each token but the first is below the largest.

        The shape is (n - 1,) for n tokens. `chunk`: tokens that are computed at once, all of them
        if None.
        """
        cache, found = make_prompt_cache(self._model), []
        for start in range(0, len(ids) - 1, chunk or len(ids)):
            fed = ids[start : min(len(ids) - 1, start + (chunk or len(ids)))]
            logits = self._model(mx.array([fed]), cache=cache)[0]
            rows = np.asarray(logits.astype(mx.float32))
            drawn = ids[start + 1 : start + 1 + len(fed)]
            found.append(rows.max(axis=-1) - rows[np.arange(len(fed)), drawn])
        return np.concatenate(found)

    def check(self, messages: Sequence[Mapping[str, Any]], reply: str, prompt: int) -> str | None:
        """Check a greedy reply and its number of prompt tokens.

        Returns a sentence on the first error, or None.
        """
        ids, out = self.prompt(messages), self.tokens(reply)
        if len(ids) != prompt:
            return f"a prompt of {len(ids)} tokens was counted as {prompt}"
        if not out:
            return None
        short = self.shortfalls(ids + out)[len(ids) - 1 :]
        parts = np.flatnonzero(short > TOLERANCE)
        if not len(parts):
            return None
        at = int(parts[0])
        return (
            f"token {at} of a reply to {len(ids)} tokens is not the likeliest, by {short[at]:.4f}; "
            f"so are {len(parts)} of {len(out)} tokens"
        )
