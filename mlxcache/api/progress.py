"""How far a request is that is not over, as the API shows it."""

from __future__ import annotations

import time
from typing import Any

from mlxcache.types import RequestRecord


def progress(record: RequestRecord, now: float | None = None) -> dict[str, Any] | None:
    """The phase of a request, and how far it is in it; None once it is over.

    `done_tokens` of `total_tokens`: those of the prompt that the cache holds, in `decode` those
    of the reply, whose number nobody knows. `tokens_per_s` is the reply's average so far, null
    before its second token. `now`: seconds since 1970.
    """
    if record.status not in ("queued", "prefill", "decode"):
        return None
    done, total, speed = 0, record.prompt_tokens, None
    if record.status == "prefill":
        done = min(total, record.cached_tokens + record.fed_tokens)
    elif record.status == "decode":
        done, speed = record.generated_tokens, _speed(record, now or time.time())
    return {
        "phase": record.status,
        "done_tokens": done,
        "total_tokens": None if record.status == "decode" else total,
        "tokens_per_s": speed,
    }


def _speed(record: RequestRecord, now: float) -> float | None:
    """Tokens per second since the first one, from the clock of the record's creation."""
    timing = record.timing
    if "first_token_s" not in timing or record.generated_tokens < 2:
        return None
    first_at = record.created_at + timing["first_token_s"] - timing.get("render_s", 0.0)
    return round((record.generated_tokens - 1) / max(0.001, now - first_at), 1)
