"""Filler text of an exact number of tokens, reproducible from a seed."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

WORDS = [
    "the", "file", "path", "tool", "command", "agent", "session", "cache", "prefix",
    "token", "model", "server", "request", "response", "error", "value", "string",
    "number", "array", "object", "when", "with", "from", "that", "this", "into", "must",
    "should", "may", "return", "read", "write", "edit", "search", "run", "test", "build",
    "check", "result", "output", "input", "user", "system", "message", "history", "state",
    "memory", "budget", "window", "layer", "thread", "queue", "order", "branch", "commit",
    "release", "import", "export",
]  # fmt: skip


class Filler:
    """Generator of text with an exact number of tokens of the model in `folder`.

    Raises OSError or ValueError if its tokenizer.json is missing or cannot be parsed.
    """

    def __init__(self, folder: Path):
        self._tokenizer = Tokenizer.from_str(
            (folder / "tokenizer.json").read_text(encoding="utf-8")
        )

    def text(self, tokens: int, seed: str) -> str:
        """Return text of exactly `tokens` tokens.

        Texts of different seeds differ within their first few tokens.
        """
        rng = random.Random(seed)
        out = [f"{rng.getrandbits(32):08x}:"]
        while True:
            out += [self._sentence(rng) for _ in range(tokens // 16 + 1)]
            text = "\n".join(out)
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            if len(encoding) >= tokens:
                return text[: encoding.offsets[tokens - 1][1]]

    def _sentence(self, rng: random.Random) -> str:
        words = [rng.choice(WORDS) for _ in range(rng.randrange(6, 18))]
        return " ".join([words[0].capitalize(), *words[1:]]) + "."
