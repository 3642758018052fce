"""How fast prompts were really computed, which says what their reuse has saved."""

from __future__ import annotations

from collections.abc import Mapping

from mlxcache.engine.cost import NEAR, NEWEST, range_of
from mlxcache.store.session_figures import Gain, SessionFigures
from mlxcache.types import RequestRecord

LEAST = 128
"""Tokens of the shortest chunk that tells: in shorter ones, what a pass takes however short it is
would be taken for the price of a token."""


class Speed:
    """Measured seconds per token of prefill, by ranges of positions. MLX thread only.

    Unlike `Cost`, which plans the next chunk, it knows nothing that was not measured in a request:
    `paces` begin with what earlier servers of the same model measured, or with nothing.
    """

    def __init__(self) -> None:
        self.paces: dict[int, float] = {}

    def resume(self, paces: Mapping[int, float]) -> None:
        """Begin with what was measured before."""
        self.paces = {**paces, **self.paces}

    def observe(self, tokens: int, seconds: float, cached: int) -> None:
        """Take a chunk of `tokens`, fed after `cached` others, into the moving averages."""
        if tokens < LEAST or seconds <= 0:
            return
        where, pace = range_of(cached), seconds / tokens
        before = self.paces.get(where, pace)
        self.paces[where] = before + NEWEST * (pace - before)

    def seconds(self, tokens: int) -> float | None:
        """What computing a prompt's first `tokens` would have taken; None where nobody knows.

        Positions that were not measured count as the measured ones before them, which take less
        time, and as nothing where there are none: it is never more than what was saved.
        """
        known = pace = None
        start, where = 0, 0
        while start < tokens:
            end = min(tokens, NEAR << where)
            pace = self.paces.get(where, pace)
            if pace is not None:
                known = (known or 0.0) + (end - start) * pace
            start, where = end, where + 1
        return known if tokens else 0.0


def gained(record: RequestRecord, speed: Speed) -> Gain:
    """What a request that is over has gained its session."""
    first = record.timing.get("first_token_s")
    saved = speed.seconds(record.cached_tokens)
    figures = SessionFigures(
        requests=1,
        first_tokens=int(first is not None),
        first_token_s=first or 0.0,
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        restored_tokens=record.restored_tokens,
        fed_tokens=record.fed_tokens,
        generated_tokens=record.generated_tokens,
        saved_tokens=0 if saved is None else record.cached_tokens,
        saved_s=saved or 0.0,
    )
    return Gain(figures, dict(speed.paces))
