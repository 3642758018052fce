"""How prefill and decoding share the MLX thread."""

from __future__ import annotations

from collections.abc import Callable

BURST_S = 1.0
"""Prefill that is over within so many seconds goes first: what it lets in decodes as one batch."""


class Pace:
    """Decoding gets as much time as prefill takes. A short burst of prefill may run up a debt.

    `owed` is that debt in seconds, never above `BURST_S` plus one chunk.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.owed = 0.0

    def prefill(self, chunk: Callable[[], None]) -> None:
        """Run one chunk, and owe decoding the time that it took."""
        began = self._clock()
        chunk()
        self.owed += self._clock() - began

    def due(self, left_s: float) -> float:
        """Seconds of decoding that are due now, where prefill has about `left_s` to go."""
        if not left_s:
            self.owed = 0.0
        return self.owed - (BURST_S if left_s <= BURST_S else 0.0)

    def decode(self, round_: Callable[[], None], due: float, more: Callable[[], bool]) -> None:
        """Run rounds for `due` seconds, at least one, while there is `more`; pay them off."""
        began = self._clock()
        round_()
        while self._clock() - began < due and more():
            round_()
        self.owed = max(0.0, self.owed - (self._clock() - began))
