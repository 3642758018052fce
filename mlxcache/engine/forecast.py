"""How long it will be until a request that is turned away may find a place, as measured here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlxcache.types import RequestRecord

LEAST_S, MOST_S = 1.0, 600.0
"""What a client is told at least, and at most: by then the guess would be of no use."""

FIRST_REPLY = 200.0
"""Tokens that a reply is taken to have while none has ended."""


@dataclass(frozen=True, slots=True)
class Going:
    """A request that is computed: what it did, and the most tokens that its reply may have."""

    record: RequestRecord
    limit: int | None


class Forecast:
    """Seconds until something that is computed ends. Call from the event loop."""

    def __init__(self) -> None:
        self._reply = FIRST_REPLY

    def ended(self, record: RequestRecord) -> None:
        """Take a finished reply into the average length."""
        if record.status == "done":
            self._reply = 0.8 * self._reply + 0.2 * record.generated_tokens

    def next_place(self, going: Iterable[Going], *, rate: float, round_s: float) -> float:
        """Seconds until the first of those that are computed is over.

        `rate`: prefill tokens per second, `round_s`: seconds per round of decoding.
        """
        prefill, decode = [], []
        for one in going:
            record = one.record
            left = record.prompt_tokens - record.cached_tokens - record.fed_tokens
            prefill.append(max(0, left) / rate if rate > 0 else 0.0)
            likely = self._reply if one.limit is None else min(one.limit, self._reply)
            decode.append(max(1.0, likely - record.generated_tokens) * round_s)
        # both share the thread evenly while there is both
        share = 2.0 if any(prefill) and not all(prefill) else 1.0
        ends = [share * (first + then) for first, then in zip(prefill, decode, strict=True)]
        return min(MOST_S, max(LEAST_S, min(ends, default=LEAST_S)))
