"""Passes over 1 to 32 tokens, measured on the loaded model: seconds, and which give equal bits."""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec

from mlxcache import typed
from mlxcache.guess.rule import LENGTHS, Passes
from mlxcache.model import kv
from mlxcache.model.kv import Layout
from mlxcache.model.lineage import Lineage
from mlxcache.private import replace
from mlxcache.scheduling.decoder import normalised

log = logging.getLogger("mlxcache.engine")

PASSES_NEAR, PASSES_FAR = 256, 4096
"""Numbers of cached positions after which short passes are measured, or less if memory is short."""

REPEATS = 3
"""Number of times that a pass of each length is measured; the fastest counts."""

FIRST = (1, 2, 4, 8, 16, 32)  # lengths, in tokens, that are always measured, before the others

LONGEST_S = 4.0
"""Seconds of measuring after one number of cached positions, from which on lengths are left out."""

MOST_EQUAL = 8
"""Most tokens of a pass whose bits are compared with those of passes over one."""

MOST_KEPT = 31  # models whose measurements are kept beside the newest


def measure_passes(model: Any, layout: Layout, room: int) -> Passes:
    """Measure passes over the numbers of tokens in `LENGTHS`, with a draw at each position.

    `room`: bytes that the KV may take. Blocks; MLX thread only.
    """
    most = room // max(1, layout.bytes_per_token) - 2 * LENGTHS[-1]
    places = sorted({max(1, min(PASSES_NEAR, most)), max(1, min(PASSES_FAR, most))})
    line = Lineage(layout)
    line.grow(places[-1] + LENGTHS[-1])
    curves = {at: _curve(model, line, at) for at in places}
    equal = set.intersection(*(_equal_lengths(model, line, at) for at in places))
    line.release()
    mx.clear_cache()
    return Passes(curves, sorted(equal))


def _equal_lengths(model: Any, line: Lineage, at: int) -> set[int]:
    """Return the lengths, 2 to `MOST_EQUAL`, whose logits are those of passes over one token.

    None with recurrent layers: a state that is recomputed or put back is equal up to rounding.
    """
    layout, lengths = line.layout, range(2, MOST_EQUAL + 1)
    if layout.recurrent:
        return set()
    line.truncate(0)
    line.append(
        ([_noise((1, h, at, d), dtype) for h, d, dtype in spec] for spec in layout.specs), at
    )
    ids = mx.random.randint(0, layout.vocab_size, (1, MOST_EQUAL + 1), key=mx.random.key(at))

    def feed(*lengths: int) -> mx.array:
        """Feed the ids after `at` in passes of these lengths; return their logits."""
        line.pretend(at)
        found, start = list[mx.array](), 0
        for tokens in lengths:
            found.append(model(ids[:, start : start + tokens], cache=line.caches)[0])
            kv.eval_states(line.caches)
            start += tokens
        return mx.concatenate(found)

    single = feed(*[1] * (MOST_EQUAL + 1))
    # the token after a pass shows whether its KV is equal too
    return {n for n in lengths if mx.array_equal(feed(n, 1), single[: n + 1]).item()}


def _noise(shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    noise, words = mx.random.normal(shape, key=mx.random.key(1)), mx.issubdtype(dtype, mx.integer)
    return noise.view(mx.uint32).astype(dtype) if words else noise.astype(dtype)


def _curve(model: Any, line: Lineage, at: int) -> list[tuple[int, float]]:
    began, found = time.perf_counter(), dict[int, float]()
    for tokens in sorted(LENGTHS, key=lambda n: (n not in FIRST, n)):
        if len(found) >= len(FIRST) and time.perf_counter() - began > LONGEST_S:
            break
        _feed(model, line, at, tokens)  # compiles the kernels
        repeats = REPEATS if time.perf_counter() - began < LONGEST_S else 1
        found[tokens] = min(_feed(model, line, at, tokens) for _ in range(repeats))
    return sorted(found.items())


def _feed(model: Any, line: Lineage, at: int, tokens: int) -> float:
    line.pretend(at)
    line.settle()
    fed = mx.zeros((1, tokens), mx.int32)
    mx.synchronize()
    began = time.perf_counter()
    logits = model(fed, cache=line.caches)
    lines = [normalised(logits[:, i, :])[0] for i in range(tokens)]
    mx.eval([mx.argmax(one, axis=-1) for one in lines])
    kv.eval_states(line.caches)
    return max(1e-6, time.perf_counter() - began)


def stored_passes(file: Path, key: str | None, measure: Callable[[], Passes]) -> Passes:
    if key is None:
        return measure()
    found = read_passes(file).get(key)
    if found is None:
        found = measure()
        save_passes(file, key, found)
    return found


def read_passes(file: Path) -> dict[str, Passes]:
    """Return the stored measurements by key, none if `file` cannot be read."""
    try:
        return typed.decode(dict[str, Passes], file.read_bytes())
    except (OSError, msgspec.MsgspecError, UnicodeError, RecursionError):
        return {}


def save_passes(file: Path, key: str, passes: Passes) -> None:
    """Store `passes` for `key` in `file`, replaced atomically; log a warning if that fails."""
    known = dict(list(read_passes(file).items())[-MOST_KEPT:])
    try:
        replace(file, msgspec.json.encode({**known, key: passes}))
    except OSError as error:
        log.warning(
            "measured costs of passes not stored, so the next start measures them again: %s", error
        )


def passes_key(namespace: str, layout: Layout) -> str:
    """It depends on the device and on the versions of MLX and mlx-lm too."""
    info = mx.device_info() if mx.default_device() == mx.gpu else {}
    machine = (str(info.get("device_name", "cpu")), str(os.cpu_count()))
    parts = (namespace, repr(layout.specs), *machine, version("mlx"), version("mlx-lm"))
    text = "\n".join(parts)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
