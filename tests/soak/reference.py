"""What the model itself says: by mlx-lm, over a whole text at once, without a cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model
from tokenizers import Tokenizer

from mlxcache.model import demo

TOLERANCE = 2e-3
"""By how much of a logit a greedy token may fall short of the best one: float32 sums differ."""


class Reference:
    """The model in `path`, one of the tiny ones whose template is ChatML's."""

    def __init__(self, path: Path):
        self._model = load_model(path)[0]
        spec = (path / "tokenizer.json").read_text(encoding="utf-8")
        self._tokenizer = Tokenizer.from_str(spec)
        self._plain = Tokenizer.from_str(json.dumps(json.loads(spec) | {"added_tokens": []}))
        ids = [self._tokenizer.token_to_id(mark) for mark in (demo.TURN_START, demo.TURN_END)]
        self._start, self._end = ids

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """The ids of a conversation, in which no text of a message is a control token."""
        ids: list[int] = []
        for message in messages:
            text = f"{message['role']}\n{message['content']}"
            ids += [self._start, *self._text(text), self._end, *self._text("\n")]
        return [*ids, self._start, *self._text("assistant\n")]

    def _text(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)

    def wrong(self, messages: Sequence[Mapping[str, Any]], reply: str, prompt: int) -> str | None:
        """What is wrong with a greedy reply and the count of its prompt's tokens, as a sentence."""
        ids, out = self.prompt(messages), self._text(reply)
        if len(ids) != prompt:
            return f"a prompt of {len(ids)} tokens was counted as {prompt}"
        if not out:
            return None
        cache = make_prompt_cache(self._model)
        logits = self._model(mx.array([ids + out[:-1]]), cache=cache)[0]
        rows = np.asarray(logits[len(ids) - 1 :].astype(mx.float32))
        short = rows.max(axis=-1) - rows[np.arange(len(out)), out]
        parts = np.flatnonzero(short > TOLERANCE)
        if not len(parts):
            return None
        at = int(parts[0])
        return (
            f"token {at} of a reply to {len(ids)} tokens is not the likeliest, by {short[at]:.4f}, "
            f"{len(parts)} of {len(out)} are not"
        )
