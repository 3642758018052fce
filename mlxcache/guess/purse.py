"""Budget of one reply for guesses, so that wrong ones cost at most a few per cent of its time.

The unit is the time of a pass over one token. If the costs of passes are estimated correctly, a
reply of n tokens takes at most 1.02 n + 1 of these units, however many guesses are wrong: the speed
of a reply of 100 tokens or more is at least 0.97 times that without guesses.
"""

from __future__ import annotations

FIRST = 1.0
"""Balance of a new reply, in passes of one token."""

SHARE = 0.02
"""What each token of a reply adds to the balance, in passes of one token."""


class Purse:
    """The time that one reply may still spend on guesses: `balance`, in passes of one token."""

    def __init__(self) -> None:
        self.balance = FIRST

    def affords(self, cost: float) -> bool:
        """Return whether the reply can pay for a pass even if all of its guess is wrong.

        `cost`: that of the pass, in passes of one token.
        """
        return cost - 1.0 <= self.balance

    def note(self, cost: float, tokens: int) -> None:
        """Account for a pass that gave `tokens` tokens of the reply.

        `cost`: that of the pass, in passes of one token.
        """
        self.balance += tokens - cost + SHARE * tokens

    def pay(self, cost: float) -> None:
        """Account for time that gave no token, such as feeding a draft model.

        `cost`: this time, in passes of one token.
        """
        self.balance -= cost
