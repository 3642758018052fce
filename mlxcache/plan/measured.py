"""Speed of a machine, computed from the request records of a running server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mlxcache.plan.simulate import Speed

LEAST_FED = 128
"""Fewest prompt tokens fed by a request whose prefill counts; shorter ones show fixed costs."""


def speed_of(records: Iterable[Mapping[str, Any]], bytes_per_token: int) -> Speed:
    """Compute speeds from records of requests, as `GET /v1/requests` returns them.

    Only requests with the status "done" or "cancelled" count. A speed that no record shows is None;
    that of the remote always is. `bytes_per_token`: bytes of KV per token. Prefill is fitted by
    least squares: the seconds per token rise linearly with the position.
    """
    ended = [one for one in records if one.get("status") in ("done", "cancelled")]
    prefill, growth = _prefill(ended)
    steps = seconds = restored = reading = 0.0
    for one in ended:
        timing = one.get("timing") or {}
        if timing.get("decode_s") and one["generated_tokens"] > 1:
            steps += one["generated_tokens"] - 1
            seconds += timing["decode_s"]
        if timing.get("restore_s") and one["restored_tokens"]:
            restored += one["restored_tokens"]
            reading += timing["restore_s"]
    return Speed(
        prefill=prefill,
        growth=growth,
        decode=steps / seconds if seconds else None,
        disk=restored * bytes_per_token / reading if reading else None,
    )


def _prefill(records: Iterable[Mapping[str, Any]]) -> tuple[float | None, float]:
    """Return the prefill speed at the beginning of a prompt, and its growth.

    The speed is in tokens per second, None if no record shows it. For growth, see
    `plan.simulate.Speed`.
    """
    rows, times = [], []
    for one in records:
        fed, seconds = one["fed_tokens"], (one.get("timing") or {}).get("prefill_s")
        if seconds and fed >= LEAST_FED:
            rows.append((fed, fed * (one["prompt_tokens"] - fed / 2)))
            times.append(seconds)
    if not times:
        return None, 0.0
    fed, at = np.array(rows, float).T
    average = float(sum(times) / fed.sum())
    if len(times) < 3:
        return 1 / average, 0.0
    (base, slope), *_ = np.linalg.lstsq(np.array([fed, at]).T, np.array(times), rcond=None)
    if base <= 0 or slope < 0:
        return 1 / average, 0.0
    return 1 / float(base), float(slope / base)
