"""Seconds of passes over 1 to 32 tokens, measured on the loaded model and kept between starts."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxcache.guess.rule import LENGTHS, Curves
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

MOST_KEPT = 31  # models whose measurements are kept beside the newest


def measure_passes(model: Any, layout: Layout, room: int) -> Curves:
    """Measure passes over the numbers of tokens in `LENGTHS`, with a draw at each position.

    Returns lists of (tokens, seconds) by the number of cached positions before the pass. `room`:
    bytes that the KV may take. Blocks; MLX thread only.
    """
    most = room // max(1, layout.bytes_per_token) - 2 * LENGTHS[-1]
    places = sorted({max(1, min(PASSES_NEAR, most)), max(1, min(PASSES_FAR, most))})
    line = Lineage(layout)
    line.grow(places[-1] + LENGTHS[-1])
    curves = {at: _curve(model, line, at) for at in places}
    line.release()
    mx.clear_cache()
    return curves


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


def stored_passes(file: Path, key: str | None, measure: Callable[[], Curves]) -> Curves:
    if key is None:
        return measure()
    found = load_passes(file, key)
    if found is None:
        found = measure()
        save_passes(file, key, found)
    return found


def load_passes(file: Path, key: str) -> Curves | None:
    try:
        held = json.loads(file.read_bytes())[key]
        return {int(at): [(int(n), float(s)) for n, s in points] for at, points in held.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def save_passes(file: Path, key: str, curves: Curves) -> None:
    """Store `curves` for `key` in `file`, replaced atomically; log a warning if that fails."""
    try:
        known = json.loads(file.read_bytes())
    except (OSError, ValueError):
        known = {}
    known = dict(list(known.items())[-MOST_KEPT:]) if isinstance(known, dict) else {}
    entry = {str(at): [list(point) for point in points] for at, points in curves.items()}
    try:
        replace(file, json.dumps({**known, key: entry}).encode())
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
