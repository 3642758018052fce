"""Guesses for one reply: which tokens to check next, what that costs, and what it has brought."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlxcache.guess.history import NO_GUESS, Guess, History
from mlxcache.guess.rule import LONGEST, PassCost, Purse, Survival, best_length


@dataclass(slots=True)
class Gains:
    """Guessed tokens that were checked, the right ones, passes with a guess, passes saved."""

    drafted: int = 0
    accepted: int = 0
    passes: int = 0
    saved: float = 0.0

    def note(self, checked: int, accepted: int, saved: float) -> None:
        if checked:
            self.drafted += checked
            self.accepted += accepted
            self.passes += 1
        self.saved += saved


class ReplyGuesses:
    """Chooses the guesses of one reply, and counts what they bring.

    `survival`: how long earlier guesses stayed right, which this reply adds to. `redo`: after a
    wrong token, the right ones before it must be fed again, as recurrent layers need it.
    """

    def __init__(
        self, history: History, survival: Survival, *, most: int = LONGEST, redo: bool = False
    ):
        self.history = history
        self.gains = Gains()
        self.purse = Purse()
        self._survival = survival
        self._most = most
        self._redo = redo
        self._watched = NO_GUESS
        self._right = 0

    def propose(self, cost: PassCost, most: int, *, ahead: bool = False, fed: int = 0) -> list[int]:
        """Return the tokens to check in the next pass, behind the newest one; empty if none pays.

        `ahead`: the newest token is not known yet, so that the guess begins with it; it is left out
        of the result. `fed`: number of tokens that the pass feeds again before the newest one.
        """
        count = min(self._most, most)
        if count < 1:
            return []
        guess = self.history.guess(LONGEST)
        self._watch(guess)
        tokens = guess.tokens[ahead:][:count]
        if not tokens:
            return []
        chances = self._survival.chances(guess.matched, ahead + len(tokens))
        length = best_length(chances, cost, skip=int(ahead), fed=fed, redo=self._redo)
        while length and not self.purse.affords(self._worst(cost, length, fed)):
            length //= 2
        return list(tokens[:length])

    def _worst(self, cost: PassCost, length: int, fed: int) -> float:
        """Return the highest net cost of a pass that checks a guess of `length` tokens."""
        spent = cost(1 + fed + length)
        if not self._redo:
            return spent
        return spent + max(cost(2 + fed + right) - 1.0 - right for right in range(length))

    def note_pass(self, cost: float, checked: int, accepted: int) -> None:
        """Account for a pass of which `accepted` of `checked` guessed tokens were right.

        `cost` includes tokens that it fed again. For a pass without a guess `checked` is 0, and
        `cost` is above 1 if it fed tokens again, or if its launch had to wait for the result of a
        guess.
        """
        self.purse.note(cost, 1 + accepted)
        self.gains.note(checked, accepted, saved=1 + accepted - cost)

    def say(self, tokens: Sequence[int]) -> None:
        """Add the newest tokens of the reply, which the model has drawn."""
        for token in tokens:
            self._compare(token)
        self.history.say(tokens)

    def _watch(self, guess: Guess) -> None:
        """Start to compare a guess with what the model draws, also one that no pass checks."""
        if not self._watched.tokens and guess.tokens:
            self._watched, self._right = guess, 0

    def _compare(self, token: int) -> None:
        watched = self._watched
        if not watched.tokens:
            return
        if token == watched.tokens[self._right]:
            self._right += 1
            if self._right < len(watched.tokens):
                return
        self._survival.observe(watched.matched, len(watched.tokens), self._right)
        self._watched = NO_GUESS
