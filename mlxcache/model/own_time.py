"""Time that a model itself takes for a warm turn, without a server: a program for `mlxcache bench`.

`python -m mlxcache.model.own_time MODEL` reads one JSON object per line, `{"prefix", "fed"}` in
tokens, and answers each with `{"seconds", "kv_bytes_per_token"}`, or with `{"error"}`.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import can_trim_prompt_cache, make_prompt_cache, trim_prompt_cache
from mlx_lm.utils import load_model

from mlxcache.types import Tokens

TOKEN_IDS = 256
"""Every vocabulary has ids below this."""


class OwnTime:
    """A loaded model with one cache of its own, which is cut back before each measurement.

    Raises ValueError for a model whose cache cannot be cut: its state at the prefix would have to
    be copied, and the copy would be measured too.
    """

    def __init__(self, path: Path):
        self.model, config = load_model(path)
        self.cache: list[Any] = make_prompt_cache(self.model)
        if not can_trim_prompt_cache(self.cache):
            raise ValueError(f"the cache of {config['model_type']} cannot be cut back")
        self.rng = np.random.default_rng(0)

    def seconds(self, prefix: int, fed: int) -> float:
        """Time from feeding `fed` new tokens (at least 1) after `prefix` to the next token.

        Measures mlx-lm's `generate_step` up to its first yield: it feeds all but one, feeds the
        last, draws a token, and starts the next step. The tokens are random, which does not affect
        the time.
        """
        self._reach(prefix)
        prompt = mx.array(self._tokens(fed))
        mx.eval(prompt)
        mx.synchronize()
        began = time.perf_counter()
        steps = generate_step(prompt, self.model, max_tokens=1, prompt_cache=self.cache)
        next(steps)
        taken = time.perf_counter() - began
        steps.close()
        self._settle()
        return taken

    def kv_bytes_per_token(self) -> float:
        """KV bytes per token over all layers, from the arrays' shapes.

        Keys and values have shape (1, heads, positions, width); positions include padding.
        """
        arrays = [
            value
            for _, value in tree_flatten([layer.state for layer in self.cache])
            if isinstance(value, mx.array) and value.ndim == 4
        ]
        return sum(int(array.nbytes) / int(array.shape[2]) for array in arrays)

    def _length(self) -> int:
        return int(self.cache[0].offset)

    def _tokens(self, count: int) -> Tokens:
        return self.rng.integers(0, TOKEN_IDS, count, dtype=np.int32)

    def _settle(self) -> None:
        mx.eval([layer.state for layer in self.cache])
        mx.synchronize()

    def _reach(self, prefix: int) -> None:
        """Bring the cache to `prefix` tokens: cut it, or feed the missing ones."""
        if self._length() < prefix:
            missing = mx.array(self._tokens(prefix - self._length()))
            for _ in generate_step(missing, self.model, max_tokens=1, prompt_cache=self.cache):
                pass
            self._settle()
        trim_prompt_cache(self.cache, self._length() - prefix)


def answer(own: OwnTime, line: str) -> dict[str, float]:
    """Measure once. Raises ValueError or KeyError if `line` is not a valid question."""
    question = json.loads(line)
    seconds = own.seconds(int(question["prefix"]), int(question["fed"]))
    return {"seconds": seconds, "kv_bytes_per_token": own.kv_bytes_per_token()}


def main() -> None:
    """Answer the questions on standard input until it ends."""
    try:
        own = OwnTime(Path(sys.argv[1]))
    except ValueError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(own, line)), flush=True)


if __name__ == "__main__":
    main()
