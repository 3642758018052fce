"""The number of tokens that a draft model should propose for one pass: as many as pay.

A round of k drafted tokens costs k passes of the draft model and a pass of the served model over
1 + k tokens, and gives 1 + a tokens, where a is the number that the served model draws too. All
costs are in passes of the served model over one token.
"""

from __future__ import annotations

from mlxcache.guess.rule import PassCosts, Purse, corrected

KEPT = 0.95
"""Factor by which older counts of right drafts lose weight with each new one."""

PRIOR, PRIOR_RIGHT = 4.0, 0.7
"""Weight of the expectation before anything was drafted, in drafts, and its share of right ones."""

TRIED = 1
"""Tokens drafted to see whether drafting pays again."""

TRIES, TRIES_SHARE = 2.0, 0.004
"""Passes of one token that may be lost to such tries: at first, and more for each token decoded."""


class DraftCosts:
    """Costs of rounds with drafted tokens, measured on one device and corrected while serving.

    A round is a pass of the served model that checks drafted tokens, with the passes of the draft
    model that made them. `cached`: positions before it.
    """

    def __init__(self, target: PassCosts, draft: PassCosts):
        self.target = target
        self._draft = draft
        self._live = 1.0

    def round(self, drafts: int, cached: int) -> float:
        return max(1.0, self._live * self._measured(drafts, cached)) if drafts else 1.0

    def catch_up(self, tokens: int, cached: int) -> float:
        """Return the cost of feeding the draft model `tokens` tokens that it has not seen."""
        return self._share(cached) * self._draft.at(cached)(tokens) if tokens else 0.0

    def observe(self, drafts: int, seconds: float, cached: int) -> float:
        if not drafts:
            return self.target.observe(1, seconds, cached)
        cost = seconds / self.target.seconds(cached)
        self._live, cost = corrected(self._live, self._measured(drafts, cached), cost)
        return cost

    def excess(self, seconds: float, cached: int) -> float:
        return self.target.excess(1, seconds, cached)

    def _measured(self, drafts: int, cached: int) -> float:
        return self.target.at(cached)(1 + drafts) + drafts * self._share(cached)

    def _share(self, cached: int) -> float:
        return self._draft.seconds(cached) / self.target.seconds(cached)


class DraftRule:
    """What is known of one draft model: its costs, and how often its tokens were accepted."""

    def __init__(self, costs: DraftCosts):
        self.costs = costs
        self._tries = TRIES
        self._tried, self._right = PRIOR, PRIOR * PRIOR_RIGHT

    @property
    def right(self) -> float:
        """Probability that a drafted token is accepted if all before it in its pass were."""
        return self._right / self._tried

    def note(self, drafted: int, right: int) -> None:
        seen = min(drafted, right + 1)
        fade = KEPT**seen
        self._tried = fade * self._tried + seen
        self._right = fade * self._right + right

    def may_try(self, cost: float) -> bool:
        """Return whether tokens may be drafted at this cost only to see whether drafting pays."""
        return cost - 1.0 <= self._tries

    def note_token(self) -> None:
        self._tries = min(TRIES, self._tries + TRIES_SHARE)

    def note_try(self, cost: float) -> None:
        """Account for a try; `cost` is less the number of drafted tokens that were accepted."""
        self._tries -= max(0.0, cost - 1.0)

    def best(self, most: int, cached: int) -> int:
        """Return how many tokens to draft, up to `most`, to expect the most tokens per second."""
        best, count = 1.0, 0
        tokens = chance = 1.0
        right = self.right
        for drafts in range(1, most + 1):
            chance *= right
            tokens += chance
            cost = self.costs.round(drafts, cached)
            if tokens > best * cost:
                best, count = tokens / cost, drafts
            if chance * right <= (best * cost - tokens) * (1 - right):
                break  # all further drafts together are expected to give less than they cost
        return count


class ReplyDrafts:
    """The drafts of one reply, which cost it at most one pass and 2% of its time."""

    def __init__(self, rule: DraftRule):
        self.saved = 0.0
        self._rule = rule
        self._trying = False
        self._purse = Purse()

    def choose(self, most: int, cached: int, unseen: int) -> int:
        """Return how many tokens to draft next; `unseen`: those to feed the draft model before."""
        costs, rule = self._rule.costs, self._rule
        before = costs.catch_up(unseen, cached)
        drafts = rule.best(most, cached)
        self._trying = not drafts
        if not drafts and rule.may_try(before + costs.round(TRIED, cached)):
            drafts = min(TRIED, most)
        while drafts and not self._purse.affords(before + costs.round(drafts, cached)):
            drafts //= 2
        if drafts:
            self._pay(before)
        return drafts

    def note_round(
        self, drafted: int, right: int, seconds: float | None, cached: int, *, waited: bool = False
    ) -> None:
        """Account for a pass that checked `drafted` tokens and accepted the first `right` of them.

        `seconds`: what it took, drafting included, if that is known. `waited`: a pass without
        drafts was launched only when the pass before it had ended, so `seconds` includes the
        launch.
        """
        costs, rule = self._rule.costs, self._rule
        if seconds is None:
            cost = costs.round(drafted, cached)
        elif waited and not drafted:
            cost = 1.0 + costs.excess(seconds, cached)
        else:
            cost = costs.observe(drafted, seconds, cached)
        self._purse.note(cost, 1 + right)
        if drafted or waited:
            self.saved += 1 + right - cost
        if self._trying and (drafted or waited):
            rule.note_try(cost - right)
        elif not drafted:
            rule.note_token()
        if drafted:
            rule.note(drafted, right)

    def note_catch_up(self, tokens: int, cached: int) -> None:
        self._pay(self._rule.costs.catch_up(tokens, cached))

    def seconds_saved(self, cached: int) -> float:
        return self.saved * self._rule.costs.target.seconds(cached)

    def _pay(self, cost: float) -> None:
        self._purse.pay(cost)
        self.saved -= cost
