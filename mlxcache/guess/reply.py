"""Guesses for one reply: which tokens to check next, what that costs, and what it has brought."""

from __future__ import annotations

from collections.abc import Sequence

from mlxcache.guess.history import NO_GUESS, Guess, History
from mlxcache.guess.rule import LONGEST, PassCost, Purse, Survival, best_length


class ReplyGuesses:
    """Chooses the guesses of one reply; `saved` is what they brought, in passes of one token.

    `survival`: how long earlier guesses stayed right, which this reply adds to. `redo`: after a
    wrong token, the right ones before it must be fed again, as recurrent layers need it.
    """

    def __init__(
        self, history: History, survival: Survival, *, most: int = LONGEST, redo: bool = False
    ):
        self.history = history
        self.saved = 0.0
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

    def note_pass(self, cost: float, accepted: int) -> None:
        """Account for a pass of which `accepted` guessed tokens were right.

        `cost` includes tokens that it fed again. For a pass without a guess it is above 1 if it did
        so, or if its launch had to wait for the result of a guess.
        """
        self.purse.note(cost, 1 + accepted)
        self.saved += 1 + accepted - cost

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
