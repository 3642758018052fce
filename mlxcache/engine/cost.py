"""What a forward pass costs, measured on the model itself: transient bytes and seconds.

Attention scores may be materialised (the CPU does; Metal's fused kernel does not), so the bytes
of a chunk of c tokens after k cached ones are taken as `per_token * c + per_pair * c * (k + c)`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlxcache.model import kv

PROBE = 128
"""Tokens in each probing chunk."""

SAFETY = 1.3
"""Allowance over what was measured."""


@dataclass(slots=True)
class Cost:
    """Measured costs of one model on this machine.

    `per_token` and `per_pair` are bytes, `fixed` too; `rate` is prefill tokens per second, a moving
    average that `observe` keeps.
    """

    per_token: float
    per_pair: float
    fixed: float
    rate: float

    def transient(self, chunk: int, cached: int, rows: int = 1) -> int:
        """Bytes that feeding `chunk` tokens after `cached` takes beyond the KV it leaves."""
        pairs = chunk * (cached + chunk)
        return int(SAFETY * rows * (self.per_token * chunk + self.per_pair * pairs) + self.fixed)

    def chunk(self, cached: int, *, bytes_: int, seconds: float, most: int) -> int:
        """The longest chunk that stays within `bytes_` and about `seconds`; at least 16 tokens."""
        size = min(most, max(32, int(self.rate * seconds)))
        while size > 16 and self.transient(size, cached) > bytes_:
            size //= 2
        return max(16, size)

    def observe(self, tokens: int, seconds: float) -> None:
        """Take a measured chunk into the moving average."""
        if tokens >= 16 and seconds > 0:
            self.rate = 0.7 * self.rate + 0.3 * tokens / seconds


def _peak(feed: Callable[[int], None], tokens: int) -> tuple[int, float]:
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    start = time.perf_counter()
    feed(tokens)
    seconds = time.perf_counter() - start
    return max(0, mx.get_peak_memory() - max(before, mx.get_active_memory())), seconds


def measure(model: Any, make: Callable[[], kv.Caches], per_kv: int, vocab: int) -> Cost:
    """Feed a few short chunks and see what memory and time they take.

    `per_kv` is the KV's bytes per token, `vocab` the number of logits. Also warms up kernels.
    """
    caches = make()

    def feed(tokens: int) -> None:
        model(mx.zeros((1, tokens), mx.int32), cache=caches)
        kv.eval_states(caches)

    feed(2)
    first, _ = _peak(feed, PROBE)
    _peak(feed, 3 * PROBE)
    last, seconds = _peak(feed, PROBE)
    per_pair = max(0.0, (last - first) / (PROBE * 4 * PROBE))
    per_token = max(first / PROBE - per_pair * PROBE, 64.0)
    logits = 6.0 * 4 * vocab
    mx.clear_cache()
    return Cost(per_token + per_kv, per_pair, logits + (1 << 20), PROBE / max(seconds, 1e-6))
