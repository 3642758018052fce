"""What proposes the tokens that passes of one reply check: the parts, and who chooses among them.

Nothing is computed for a proposal before it is chosen. MLX thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import cast

import mlx.core as mx

from mlxcache.guess.rule import LONGEST, Offer, PassCosts, ReplyRule
from mlxcache.model.guidance.guide import Bitmask, Guide
from mlxcache.model.sampling import Sampler, masked
from mlxcache.scheduling.decoder import DecoderRow, normalised, processed
from mlxcache.scheduling.task import Task
from mlxcache.types import GuessSource

STEERS_WITHIN = 3 * (LONGEST + 1)
"""Tokens before a possible change of a reply's guide, from which on nothing is proposed.

A guide changes where thinking reaches its budget. The change must apply to the same token as
without proposals.
"""


@dataclass(slots=True)
class Draws:
    """State of sampler, context and guide before the next draw.

    Each state has its own copy of the sampler, which every draw changes, and of the guide, which
    every token changes. `context`: all token ids so far, shape (n,); None without processors.
    `mask`: tokens that `guide` allows next; None if it allows all or was not asked yet.
    """

    row: DecoderRow
    sampler: Sampler
    context: mx.array | None
    guide: Guide | None = None
    mask: Bitmask | None = None

    def draw(self, logits: mx.array) -> tuple[mx.array, mx.array, mx.array, Draws]:
        """Draw a token from `logits`, shape (1, vocabulary). Exceptions are recorded in the row.

        Returns the token, the log-probabilities of all tokens, whether they are finite, and the
        state after the draw.
        """
        sampler = copy(self.sampler)
        if self.context is not None:
            logits = processed(self.row, self.context, logits)
        self.ask()
        if self.mask is not None:
            logits = masked(logits, [self.mask])
        logprobs, finite = normalised(logits)
        try:
            token = sampler(logprobs)
        except Exception as error:  # noqa: BLE001 - logged as the request fails
            self.row.fail(error)
            token = mx.zeros(1, mx.uint32)
        return token, logprobs, finite, Draws(self.row, sampler, self.context, self.guide)

    def ask(self) -> None:
        """Let the guide say which tokens it allows next, unless it did."""
        if self.guide is not None and self.mask is None:
            self.mask = self.row.allowed(self.guide)

    def seen(self, token: mx.array, *, drawn: bool = True) -> Draws:
        """Return the state with `token`, shape (1,), appended to the context."""
        context, guide = self.context, self.guide
        if context is not None:
            context = mx.concatenate([context, token.astype(mx.int32)])
        if guide is not None and drawn:
            guide = guide.copy()
            self.row.advance(guide, int(cast(int, token.item())))
        return Draws(self.row, self.sampler, context, guide)

    def trial(self) -> Draws:
        return replace(self, row=self.row.trial())


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass over `fed` tokens that has ended; it checked `checked` of which `right` were right.

    `seconds`: from when the tokens before it were known, with what making the guess took; None if
    the model did other work meanwhile. `waited`: it was launched only when these were known, so
    `seconds` includes the launch.
    """

    fed: int
    seconds: float | None
    waited: bool
    checked: int = 0
    right: int = 0


class Proposer:
    """Proposes tokens for the passes of one reply, and learns what was right.

    `costs`: of passes that check what it proposes.
    """

    source: GuessSource
    costs: PassCosts

    def offer(self, most: int, ready: Sequence[int]) -> Offer:
        """Return what can be proposed for the next pass, up to `most` tokens, maybe 0.

        `ready`: the tokens drawn but not handed out, if they are known.
        """
        raise NotImplementedError

    def draft(self, count: int, newest: mx.array, state: Draws) -> tuple[mx.array, Sequence[Draws]]:
        """Return `count` tokens that may follow `newest`, shape (count,), and states with them.

        `state`: before the draw after `newest`. The states, with a trial row, are those before each
        further draw; none if the caller is to make them.
        """
        raise NotImplementedError

    def learn(self, checked: int, right: int) -> None:
        """Learn how many tokens of the last `draft` a pass has checked, and how many were right."""

    def pass_over(self) -> float:
        """Take note that the next pass checks none of this; return the cost of what it computes."""
        return 0.0

    def note_fed(self, tokens: Sequence[int]) -> None:
        """Take note of tokens that the lineage holds now."""

    def undo(self) -> None:
        """Forget the last `draft` and what was noted since, because the pass has failed."""

    def catch_up(self) -> None:
        """Complete what this proposer keeps in the lineage, for a commit. Does not block."""

    def rewind(self, cut: int) -> None:
        """Do what `catch_up` does, after `cut` positions were cut from the lineage."""

    def end(self) -> None:
        """End the reply, or its present computation."""


class Proposals:
    """The proposers of one reply, of which `rule` chooses one for each pass.

    `costs`: of passes that check nothing.
    """

    def __init__(
        self, task: Task, proposers: Sequence[Proposer], rule: ReplyRule, costs: PassCosts
    ):
        self._task = task
        self._proposers = proposers
        self._chosen = proposers[0]
        self._rule = rule
        self._costs = costs
        self._saved = {one.source: 0.0 for one in proposers}
        self._stopped = False

    @property
    def source(self) -> GuessSource:
        """The source of the tokens that were checked last."""
        return self._chosen.source

    def choose(self, most: int, ready: Sequence[int], again: int) -> int:
        """Return how many tokens, up to `most`, the next pass should check.

        `again`: number of tokens that the pass feeds again.
        """
        if self._stopped or self._task.may_steer(STEERS_WITHIN):
            most = 0
        offers = [one.offer(max(0, most), ready) for one in self._proposers]
        before = self._rule.saved
        index, count = self._rule.choose(offers, again)
        for number, one in enumerate(self._proposers):
            if count and number == index:
                self._chosen = one
                self._saved[one.source] += self._rule.saved - before
            else:
                self._pay(one, one.pass_over())
        return count

    def _pay(self, proposer: Proposer, cost: float) -> None:
        self._rule.pay(cost)
        self._saved[proposer.source] -= cost

    def draft(self, count: int, newest: mx.array, state: Draws) -> tuple[mx.array, Sequence[Draws]]:
        return self._chosen.draft(count, newest, state)

    def note(self, ended: Pass) -> None:
        """Learn from a pass, which may have checked nothing."""
        costs, cached = self._chosen.costs if ended.checked else self._costs, self._task.length
        cost, plain = costs.at(cached)(ended.fed), ended.fed == 1 and not ended.waited
        if ended.seconds and ended.waited and not ended.checked:
            cost += costs.excess(ended.fed, ended.seconds, cached)
        elif ended.seconds:
            cost = costs.observe(ended.fed, ended.seconds, cached)
            for other in self._proposers if plain else ():
                if other.costs is not costs:
                    other.costs.observe(1, ended.seconds, cached)
        before = self._rule.saved
        self._rule.note_pass(cost, ended.right, plain=plain)
        self._saved[self._chosen.source] += self._rule.saved - before
        if ended.checked:
            self._chosen.learn(ended.checked, ended.right)

    def note_fed(self, tokens: Sequence[int]) -> None:
        for one in self._proposers:
            one.note_fed(tokens)

    def undo(self) -> None:
        """Forget the last proposal, whose pass has failed; propose no more."""
        self._stopped = True
        for one in self._proposers:
            one.undo()

    def catch_up(self) -> None:
        for one in self._proposers:
            one.catch_up()

    def rewind(self, cut: int) -> None:
        for one in self._proposers:
            one.rewind(cut)

    def end(self) -> dict[GuessSource, float]:
        """End the reply, or its present computation; return the seconds saved by each source."""
        for one in self._proposers:
            one.end()
        seconds = self._costs.seconds(self._task.length)
        return {source: saved * seconds for source, saved in self._saved.items()}
