"""Who proposes the tokens that passes check: a conversation, a draft model, or a model's heads.

Guesses from a conversation are made from its text alone, which is kept by owner between turns.
Conversations share only numbers: the cost of passes, and counts of how long guesses stayed right.
MLX thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from mlxcache.guess.history import Histories
from mlxcache.guess.rule import (
    LONGEST,
    DraftCosts,
    Offer,
    PassCosts,
    Repeats,
    ReplyRule,
    Survival,
    Tries,
)
from mlxcache.model.heads import HeadsDraft, KnownRows, WithHeads
from mlxcache.model.kv import eval_states
from mlxcache.model.pair import Pair
from mlxcache.scheduling.proposer import Draws, Proposals, Proposer
from mlxcache.scheduling.task import Task
from mlxcache.types import GuessSource, Tokens

FORMS_EVERY = 64
"""Tokens of a reply between two looks for forms of tool results that were made meanwhile."""

CATCH_UP = 256
"""Tokens that a draft model has not seen, while nothing is drafted, from which it is fed them.

Also the most tokens of a pass that feeds them.
"""


class Source(Protocol):
    """Makes the proposers of one kind for the replies of one model.

    `redo`: it can propose where, after a wrong token, the right ones before it are fed again.
    """

    redo: bool

    def begin(self, task: Task, costs: PassCosts) -> Proposer:
        """Return the proposer of a reply. `costs`: of passes of the served model."""


class Speculation:
    """Makes the proposers of all kinds for the replies of one model.

    `costs`: of passes that check nothing. `equal`: see `Passes`.
    """

    def __init__(self, costs: PassCosts, sources: Sequence[Source], equal: Sequence[int] = ()):
        self.costs = costs
        self.sources = sources
        self.equal = equal
        self._tries = Tries()

    def set_costs(self, costs: PassCosts) -> None:
        self.costs = costs

    def begin(self, task: Task, *, redo: bool) -> Proposals | None:
        """Return the proposers of a reply, or None if nothing is to be proposed in it.

        `redo`: after a wrong token, the right ones before it are fed again.
        """
        sources = [one for one in self.sources if one.redo or not redo]
        if not (task.job.speculate and sources):
            return None
        rule = ReplyRule(self._tries, redo=redo)
        proposers = [one.begin(task, self.costs) for one in sources]
        return Proposals(task, proposers, rule, self.costs)


class Conversations:
    """Proposes what a reply may repeat of its own conversation.

    `most`: most tokens of a guess. `forms(task)`: returns the tool results of a task's conversation
    as a reply would repeat them, as token ids by the text of the result; those that are not
    tokenised yet are left out.
    """

    redo = True

    def __init__(
        self,
        most: int = LONGEST,
        *,
        forms: Callable[[Task], Mapping[str, Tokens]] = lambda task: {},
    ):
        self.most = most
        self.forms = forms
        self.histories = Histories()
        self.survival = Survival()

    def begin(self, task: Task, costs: PassCosts) -> Proposer:
        return HistoryProposer(self, task, costs)


class HistoryProposer(Proposer):
    """Proposes earlier text of one reply's conversation.

    Nothing is proposed before the reply's first token, which would wait until the conversation's
    tokens are indexed.
    """

    source: GuessSource = "history"

    def __init__(self, made_by: Conversations, task: Task, costs: PassCosts):
        self.task = task
        self.costs = costs
        self._model = made_by
        self._repeats: Repeats | None = None
        self._known = 0

    def offer(self, most: int, ready: Sequence[int]) -> Offer:
        cost = self.costs.at(self.task.length + len(ready))
        if not self.task.out:
            return Offer((), cost)
        repeats = self._repeats or self._begin()
        if self._tell(repeats, ready):
            repeats.history.add_forms(self._model.forms(self.task))
        return repeats.offer(cost, most, ahead=not ready)

    def _begin(self) -> Repeats:
        model, task = self._model, self.task
        history = model.histories.take(task.job.owner, task.fed_ids())
        history.add_forms(model.forms(task))
        self._repeats = Repeats(history, model.survival, most=model.most)
        self._known = len(task.out)
        return self._repeats

    def _tell(self, repeats: Repeats, ready: Sequence[int]) -> bool:
        """Give `repeats` what it lacks of the reply; return whether to look for forms again."""
        out, before = self.task.out, self._known
        said = self._known = len(out) + len(ready)
        repeats.say([*out[before:], *ready[max(0, before - len(out)) :]])
        return said // FORMS_EVERY != before // FORMS_EVERY

    def draft(self, count: int, newest: mx.array, state: Draws) -> tuple[mx.array, Sequence[Draws]]:
        assert self._repeats is not None
        return mx.array(list(self._repeats.tokens[:count]), mx.uint32), ()

    def end(self) -> None:
        repeats, self._repeats = self._repeats, None
        if repeats is not None:
            self._model.histories.keep(self.task.job.owner, repeats.history)


class DraftModel:
    """Proposes what a draft model draws, with the same random keys, processors and guides.

    The two models therefore draw the same token wherever their probabilities agree, at any
    temperature. `most`: most tokens that are drafted at once.
    """

    redo = True

    def __init__(self, pair: Pair, costs: DraftCosts, most: int):
        self.pair = pair
        self.costs = costs
        self.most = most
        self.survival = Survival.of_drafts()

    def begin(self, task: Task, costs: PassCosts) -> Proposer:
        return DraftProposer(self, task)


class DraftProposer(Proposer):
    """Drafts of one reply, made over its lineage, which holds the KV of both models.

    Where drafting does not pay, only the served model is fed; the draft model is fed the same
    tokens later, many in one pass. `_unseen`: those that it lacks. `_ahead`: the number of tokens
    that it was fed before the lineage holds them.
    """

    source: GuessSource = "draft"

    def __init__(self, made_by: DraftModel, task: Task):
        self.task = task
        self.costs: DraftCosts = made_by.costs
        self._model = made_by
        self._lineage = task.held.lineage
        self._unseen: list[int] = []
        self._before: list[int] = []
        self._ahead = 0

    def offer(self, most: int, ready: Sequence[int]) -> Offer:
        model, cached = self._model, self.task.length
        self._before = self._unseen
        chances = model.survival.chances(0, min(model.most, most))
        before = self.costs.catch_up(len(self._unseen), cached)
        return Offer(chances, self.costs.at(cached), before, unseen=True)

    def pass_over(self) -> float:
        behind = len(self._unseen)
        if behind < CATCH_UP:
            return 0.0
        self.catch_up()
        return self.costs.catch_up(behind, self.task.length)

    def draft(self, count: int, newest: mx.array, state: Draws) -> tuple[mx.array, Sequence[Draws]]:
        pair, lineage = self._model.pair, self._lineage
        pair.set_draft_length(lineage.caches, lineage.length - len(self._unseen))
        shown = mx.concatenate([mx.array(self._unseen, mx.uint32), newest.astype(mx.uint32)])
        self._unseen, self._ahead = [], count
        return _drawn(
            count, shown, state, lambda ids: pair.propose(ids[None], lineage.caches)[:, -1, :]
        )

    def learn(self, checked: int, right: int) -> None:
        self._ahead = 0
        self._model.survival.observe(0, checked, right)

    def note_fed(self, tokens: Sequence[int]) -> None:
        known = min(self._ahead, len(tokens))
        self._ahead -= known
        self._unseen = [*self._unseen, *tokens[known:]]

    def undo(self) -> None:
        self._unseen, self._ahead = self._before, 0

    def catch_up(self) -> None:
        """Feed the draft model what it has not seen of the lineage."""
        pair, lineage, unseen = self._model.pair, self._lineage, self._unseen
        if not unseen:
            return
        lineage.note_pass()
        pair.set_draft_length(lineage.caches, lineage.length - len(unseen))
        for start in range(0, len(unseen), CATCH_UP):
            piece = mx.array([unseen[start : start + CATCH_UP]], mx.uint32)
            pair.propose(piece, lineage.caches)
        eval_states(lineage.caches, wait=False)
        self._unseen = []

    def rewind(self, cut: int) -> None:
        self._ahead = 0
        self._unseen = self._unseen[: max(0, len(self._unseen) - cut)]
        try:
            self.catch_up()
        except BaseException:  # the KV of both models stays complete
            self._lineage.truncate(self._lineage.length - len(self._unseen))
            raise


class HeadsOfModel:
    """Proposes what a model's heads for multi-token prediction draw, as `DraftModel` does."""

    redo = False

    def __init__(self, model: WithHeads, costs: DraftCosts, most: int):
        self.model = model
        self.costs = costs
        self.most = most
        self.survival = Survival.of_drafts()

    def begin(self, task: Task, costs: PassCosts) -> Proposer:
        return HeadsProposer(self, task)


class HeadsProposer(Proposer):
    """Drafts of one reply by the heads, whose KV each pass of the model appends to the lineage."""

    source: GuessSource = "heads"

    def __init__(self, made_by: HeadsOfModel, task: Task):
        self.task = task
        self.costs = made_by.costs
        self._made_by = made_by
        self._known: KnownRows | None = None

    def offer(self, most: int, ready: Sequence[int]) -> Offer:
        chances = self._made_by.survival.chances(0, min(self._made_by.most, most))
        return Offer(chances, self.costs.at(self.task.length), unseen=True)

    def draft(self, count: int, newest: mx.array, state: Draws) -> tuple[mx.array, Sequence[Draws]]:
        caches = self.task.held.lineage.caches
        self._known = self._known or KnownRows(caches)
        draft = HeadsDraft(self._made_by.model, caches, self._known)
        try:
            return _drawn(count, newest, state, draft.feed)
        finally:
            draft.end()

    def learn(self, checked: int, right: int) -> None:
        self._made_by.survival.observe(0, checked, right)


def _drawn(
    count: int, shown: mx.array, state: Draws, feed: Callable[[mx.array], mx.array]
) -> tuple[mx.array, Sequence[Draws]]:
    """Draw a draft: `feed` takes `shown`, then each drafted token, and returns the next logits."""
    state.ask()  # once for both
    drafted, states = list[mx.array](), [state.trial()]
    for _ in range(count):
        shown, _, _, after = states[-1].draw(feed(shown))
        drafted.append(shown)
        states.append(after.seen(shown))
    return mx.concatenate(drafted), states[1:]
