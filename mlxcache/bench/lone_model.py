"""The process that `own_time` starts: mlx-lm alone, without a server, runs a model and is timed.

`python -m mlxcache.bench.lone_model MODEL` prints `null` once the model is loaded, or
`{"error": TEXT}` if it cannot be measured. Each line of its standard input is then `[METHOD, ...]`,
a method of `LoneModel` with its arguments, and each line that it prints the result, as JSON.
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
from mlx_lm.generate import generate_step, stream_generate
from mlx_lm.models.cache import (
    KVCache,
    can_trim_prompt_cache,
    make_prompt_cache,
    trim_prompt_cache,
)
from mlx_lm.utils import load_model, load_tokenizer

from mlxcache.kernels import keep_kernels_private
from mlxcache.types import Tokens, token_ids

TOKEN_IDS = 256
"""Number of token ids that random prompts are drawn from; every vocabulary has them."""


class LoneModel:
    """A model loaded by mlx-lm, with methods that measure how fast mlx-lm alone runs it.

    Raises ValueError if the cache cannot be truncated: the state at the prefix would have to be
    copied, and the copy would be measured too.
    """

    def __init__(self, path: Path):
        self.path = path
        self.model, config = load_model(path)
        self.cache: list[Any] = make_prompt_cache(self.model)
        if not can_trim_prompt_cache(self.cache):
            raise ValueError(f"the cache of {config['model_type']} cannot be cut back")
        self.rng = np.random.default_rng(0)

    def seconds(self, prefix: int, fed: int) -> float:
        """Measure the seconds from feeding `fed` random tokens after `prefix` to the next token."""
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

    def decoding(self, prefix: int, reply: int) -> tuple[float, int]:
        """Measure tokens per second and MLX's peak memory of a reply after `prefix` tokens."""
        self._reach(prefix - 1)
        tokenizer = load_tokenizer(self.path)
        tokenizer.eos_token_ids = []
        times: list[float] = []
        active = 0
        for _ in stream_generate(
            self.model, tokenizer, self._tokens(1).tolist(), reply, prompt_cache=self.cache
        ):
            times.append(time.perf_counter())
            if len(times) == 1:
                active = mx.get_active_memory()
                mx.reset_peak_memory()
        peak = mx.get_peak_memory() - active
        self._settle()
        return (len(times) - 1) / (times[-1] - times[0]), max(0, peak)

    def prefill(self, prompt: int, step: int) -> float:
        """Measure the prefill of mlx-lm from an empty cache, in prompt tokens per second."""
        tokens = mx.array(self._tokens(prompt))
        cache = make_prompt_cache(self.model)
        mx.eval(tokens)
        mx.synchronize()
        began = time.perf_counter()
        steps = generate_step(
            tokens, self.model, max_tokens=1, prompt_cache=cache, prefill_step_size=step
        )
        next(steps)
        taken = time.perf_counter() - began
        steps.close()
        mx.eval([layer.state for layer in cache])
        del cache
        mx.clear_cache()
        return prompt / taken

    def kv_bytes_per_token(self) -> float:
        """Return the KV bytes per token over all layers, without spare capacity."""
        arrays = [
            value
            for _, value in tree_flatten([layer.state for layer in self.cache])
            if isinstance(value, mx.array) and value.ndim == 4
        ]
        return sum(int(array.nbytes) / int(array.shape[2]) for array in arrays)

    def _length(self) -> int:
        return int(self.cache[0].offset)

    def _tokens(self, count: int) -> Tokens:
        return token_ids(self.rng.integers(0, TOKEN_IDS, count, np.int32))

    def _settle(self) -> None:
        mx.eval([layer.state for layer in self.cache])
        mx.synchronize()

    def _reach(self, prefix: int) -> None:
        """Bring the cache to `prefix` tokens, by random KV: values do not affect the time."""
        if self._length() and all(type(layer) is KVCache for layer in self.cache):
            self._fill(prefix - self._length())
        if self._length() < prefix:
            missing = mx.array(self._tokens(prefix - self._length()))
            for _ in generate_step(missing, self.model, max_tokens=1, prompt_cache=self.cache):
                pass
            self._settle()
        trim_prompt_cache(self.cache, self._length() - prefix)

    def _fill(self, count: int) -> None:
        for layer in self.cache if count > 0 else ():
            shapes = [(*array.shape[:2], count, array.shape[3]) for array in layer.state[:2]]
            noise = [mx.random.normal(shape, dtype=layer.keys.dtype) for shape in shapes]
            layer.update_and_fetch(*noise)
            mx.eval(layer.state)
            del noise
            mx.clear_cache()


def main() -> None:
    keep_kernels_private()
    try:
        own = LoneModel(Path(sys.argv[1]))
    except ValueError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print("null", flush=True)
    for line in sys.stdin:
        method, *args = json.loads(line)
        print(json.dumps(getattr(own, method)(*args)), flush=True)


if __name__ == "__main__":
    main()
