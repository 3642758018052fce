"""What mlx-lm's own generator replies, for the features that it has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx_lm
from mlx_lm.sample_utils import make_logits_processors

from mlxcache.model.sampling import make_sampler, text_ends
from mlxcache.types import Sampling
from tests.proofs.features.plan import Features

OWN = {"tokens", "words", "odd", "stop", "temperature", "top_p", "top_k", "min_p", "xtc", "bias"}
OWN |= {
    "repetition",
    "ids",
    "echo",
    "stream",
    "restart",
    "beside",
    "logprobs",
    "previous",
    "cancel",
}
"""Features that mlx-lm has too, or that change no token. Its presence and frequency penalties count
the prompt as well."""


class MlxLm:
    """A model in mlx-lm, with a tokenizer."""

    def __init__(self, path: Path):
        self._model, self.tokenizer = mlx_lm.load(str(path))[:2]
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        self.vocab_size = int(config.get("text_config", config)["vocab_size"])

    def can(self, features: Features) -> bool:
        """Return whether mlx-lm has these features. It adds biases before the penalty."""
        return features.keys() <= OWN and not {"bias", "repetition"} <= features.keys()

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, whose control tokens are tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the prompt of a conversation."""
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True))

    def complete(self, ids: Sequence[int], wishes: Features, *, blank: bool) -> str:
        """Return the reply to a prompt, alone and without reuse; the draws are the server's.

        `blank`: begin with the blank of the first token, which mlx-lm leaves out.
        """
        temperature, seed = wishes.get("temperature", (0.0, None))
        chance, threshold = wishes.get("xtc", (0.0, 0.1))
        sampling = Sampling(
            temperature=temperature, seed=seed, xtc_probability=chance, xtc_threshold=threshold,
            **{name: wishes[name] for name in ("top_p", "top_k", "min_p") if name in wishes},
        )  # fmt: skip
        penalty, context = wishes.get("repetition", (None, 20))
        parts = list(mlx_lm.stream_generate(
            self._model, self.tokenizer, list(ids),
            max_tokens=wishes["tokens"],
            sampler=make_sampler(sampling, self.vocab_size, text_ends(self.tokenizer)),
            logits_processors=make_logits_processors(
                dict(wishes.get("bias", ())) or None, penalty, context
            ),
        ))  # fmt: skip
        first = self.tokenizer.convert_ids_to_tokens(parts[0].token)
        lost = " " if blank and first.startswith("\u0120") else ""
        return lost + "".join(part.text for part in parts)
