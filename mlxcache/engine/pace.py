"""How prefill and decoding share the MLX thread."""

from __future__ import annotations

from collections.abc import Callable

BURST_S, ARRIVAL_S = 2.0, 8.0
"""Prefill that is over within so many seconds goes first: what it lets in decodes as one batch.

The second holds where nothing was decoding when it began, so that all arrived together.
"""

STALL_S = 1.0
"""Seconds that a reply waits for its next token at most, plus one chunk, while a burst goes on."""


SHARE = 1.15
"""Seconds of decoding for each of prefill: a reply keeps half of its speed, all else included."""

FIRST_ROUND_S = 0.05
"""What a round of decoding is taken to take before one was measured."""


class Pace:
    """Decoding gets a little more time than prefill. A short burst of prefill may run up a debt.

    `owed` is that debt in seconds, about the burst's bound plus one chunk at most; `round_s` what a
    round of decoding takes, a moving average. What is still due where decoding stopped to see what
    has arrived is due before the next chunk, unless that is of a request that has just come.
    """

    def __init__(self, clock: Callable[[], float]):
        self._clock = clock
        self.owed = 0.0
        self.round_s = FIRST_ROUND_S
        self.bound = BURST_S
        self._round_at = clock()

    def begin(self, *, decoding: bool) -> None:
        """Prefill begins after a pause; `decoding`: somebody would notice a burst."""
        self.bound = BURST_S if decoding else ARRIVAL_S

    def prefill(self, chunk: Callable[[], None], *, owing: bool = True) -> None:
        """Run one chunk, and owe decoding its share for it, if somebody waits meanwhile."""
        if not owing:
            self.owed = 0.0
        began = self._clock()
        chunk()
        if owing:
            self.owed += SHARE * (self._clock() - began)

    def entered(self, chunk_s: float) -> None:
        """A reply begins: it decodes first, and the next chunk, of `chunk_s` or so, comes then."""
        self.owed = max(self.owed, SHARE * chunk_s)

    def due(self, left_s: float) -> float:
        """Seconds of decoding that are due now, where prefill has about `left_s` to go."""
        if not left_s:
            self.owed = 0.0
        return self.owed - (self.bound if left_s <= self.bound else 0.0)

    def holds(self, due: float) -> bool:
        """Whether decoding can wait for another chunk."""
        return due <= 0 and self._clock() - self._round_at < STALL_S

    def decode(self, round_: Callable[[], None], due: float, more: Callable[[], bool]) -> None:
        """Run rounds for `due` seconds, at least one, while there is `more`; pay them off."""
        began = self._clock()
        round_()
        rounds = 1
        while self._clock() - began < due and more():
            round_()
            rounds += 1
        self._round_at = self._clock()
        if more() or rounds > 1:  # with nobody to decode for, a round takes no time
            self.round_s += 0.1 * ((self._round_at - began) / rounds - self.round_s)
        self.owed = max(0.0, self.owed - (self._round_at - began))
