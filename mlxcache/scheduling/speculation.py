"""Who proposes the tokens that passes check: a reply's own conversation, or a draft model.

Guesses from a conversation are made from its text alone, which is kept by owner between turns.
Conversations share only numbers: the cost of passes, and counts of how long guesses stayed right.
MLX thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import mlx.core as mx

from mlxcache.guess.drafts import DraftRule, ReplyDrafts
from mlxcache.guess.history import Histories
from mlxcache.guess.rule import LONGEST, PassCosts, ReplyGuesses, Survival
from mlxcache.model.kv import eval_states
from mlxcache.model.pair import Pair
from mlxcache.scheduling.task import Task
from mlxcache.scheduling.verifier import Draws, Pass, Proposer
from mlxcache.types import GuessSource, Tokens

STEERS_WITHIN = 3 * (LONGEST + 1)
"""Tokens before a possible change of a reply's guide, from which on nothing is proposed.

A guide changes where thinking reaches its budget. The change must apply to the same token as
without proposals.
"""

FORMS_EVERY = 64
"""Tokens of a reply between two looks for forms of tool results that were made meanwhile."""

CATCH_UP = 256
"""Tokens that a draft model has not seen, while nothing is drafted, from which it is fed them.

Also the most tokens of a pass that feeds them.
"""


class Speculation(Protocol):
    """Proposers for the replies of one model."""

    def begin(self, task: Task) -> Proposer | None:
        """Return the proposer of a reply, or None if nothing is to be proposed in it."""


class Conversations:
    """Proposes what a reply may repeat of its own conversation.

    `most`: most tokens of a guess. `redo`: after a wrong token, the right ones before it must be
    fed again. `forms(task)`: returns the tool results of a task's conversation as a reply would
    repeat them, as token ids by the text of the result; those that are not tokenised yet are left
    out.
    """

    def __init__(
        self,
        costs: PassCosts,
        most: int = LONGEST,
        *,
        redo: bool = False,
        forms: Callable[[Task], Mapping[str, Tokens]] = lambda task: {},
    ):
        self.costs = costs
        self.most = most
        self.redo = redo
        self.forms = forms
        self.histories = Histories()
        self.survival = Survival()

    def set_costs(self, costs: PassCosts) -> None:
        self.costs = costs

    def begin(self, task: Task) -> Proposer | None:
        return HistoryProposer(self, task) if task.job.speculate else None


class HistoryProposer(Proposer):
    """Proposes earlier text of one reply's conversation.

    Nothing is proposed where that is not expected to save time, nor before the reply's first token,
    which would wait until the conversation's tokens are indexed.
    """

    source: GuessSource = "history"

    def __init__(self, made_by: Conversations, task: Task):
        self.task = task
        self.stopped = False
        self._model = made_by
        self._guesses: ReplyGuesses | None = None
        self._known = 0
        self._guess: Sequence[int] = ()

    def choose(self, most: int, ready: Sequence[int], again: int) -> int:
        self._guess = self.guess(most, ready, again) if self.task.out else ()
        return len(self._guess)

    def guess(self, most: int, ready: Sequence[int], again: int) -> Sequence[int]:
        task = self.task
        guesses = self._guesses or self._begin()
        if self._tell(guesses, ready):
            guesses.history.add_forms(self._model.forms(task))
        if most < 1 or self.stopped or task.may_steer(STEERS_WITHIN):
            return ()
        cost = self._model.costs.at(task.length + len(ready))
        return guesses.propose(cost, most, ahead=not ready, fed=again)

    def _begin(self) -> ReplyGuesses:
        model, task = self._model, self.task
        history = model.histories.take(task.job.owner, task.fed_ids())
        history.add_forms(model.forms(task))
        self._guesses = ReplyGuesses(history, model.survival, most=model.most, redo=model.redo)
        self._known = len(task.out)
        return self._guesses

    def _tell(self, guesses: ReplyGuesses, ready: Sequence[int]) -> bool:
        """Give `guesses` what it lacks of the reply; return whether to look for forms again."""
        out, before = self.task.out, self._known
        said = self._known = len(out) + len(ready)
        guesses.say([*out[before:], *ready[max(0, before - len(out)) :]])
        return said // FORMS_EVERY != before // FORMS_EVERY

    def draft(self, count: int, newest: mx.array, state: Draws) -> tuple[mx.array, Sequence[Draws]]:
        return mx.array(list(self._guess[:count]), mx.uint32), ()

    def note(self, ended: Pass) -> None:
        costs, cached = self._model.costs, self.task.length
        cost = costs.at(cached)(ended.fed)
        if ended.seconds and ended.waited and not ended.checked:
            cost += costs.excess(ended.fed, ended.seconds, cached)
        elif ended.seconds:
            cost = costs.observe(ended.fed, ended.seconds, cached)
        if self._guesses is not None:
            self._guesses.note_pass(cost, ended.right)

    def undo(self) -> None:
        self.stopped = True

    def end(self) -> float:
        guesses, self._guesses = self._guesses, None
        if guesses is None:
            return 0.0
        self._model.histories.keep(self.task.job.owner, guesses.history)
        return guesses.saved * self._model.costs.seconds(self.task.length)


class DraftModel:
    """Proposes what a draft model draws, with the same random keys, processors and guides.

    The two models therefore draw the same token wherever their probabilities agree, at any
    temperature. `most`: most tokens that are drafted at once; `rule` chooses their number.
    """

    def __init__(self, pair: Pair, rule: DraftRule, most: int):
        self.pair = pair
        self.rule = rule
        self.most = most

    def begin(self, task: Task) -> Proposer | None:
        return DraftProposer(self, task)


class DraftProposer(Proposer):
    """Drafts of one reply, made over its lineage, which holds the KV of both models.

    Where drafting does not pay, only the served model is fed; the draft model is fed the same
    tokens later, many in one pass.
    """

    source: GuessSource = "draft"

    def __init__(self, made_by: DraftModel, task: Task):
        self.task = task
        self._model = made_by
        self._lineage = task.held.lineage
        self._drafts = ReplyDrafts(made_by.rule)
        self._unseen: list[int] = []
        self._before: list[int] = []
        self._stopped = False

    def choose(self, most: int, ready: Sequence[int], again: int) -> int:
        drafts, cached, unseen = self._drafts, self.task.length, len(self._unseen)
        self._before = self._unseen
        if self._stopped or self.task.may_steer(STEERS_WITHIN):
            most = 0
        count = drafts.choose(max(0, min(self._model.most, most)), cached, unseen)
        if not count and unseen >= CATCH_UP:
            drafts.note_catch_up(unseen, cached)
            self.catch_up()
        return count

    def draft(self, count: int, newest: mx.array, state: Draws) -> tuple[mx.array, Sequence[Draws]]:
        pair, lineage = self._model.pair, self._lineage
        pair.set_draft_length(lineage.caches, lineage.length - len(self._unseen))
        shown = mx.concatenate([mx.array(self._unseen, mx.uint32), newest.astype(mx.uint32)])
        self._unseen = []
        state.ask()  # once for both models
        drafted, states = list[mx.array](), [state.trial()]
        for _ in range(count):
            logits = pair.propose(shown[None], lineage.caches)[:, -1, :]
            shown, _, _, after = states[-1].draw(logits)
            drafted.append(shown)
            states.append(after.seen(shown))
        return mx.concatenate(drafted), states[1:]

    def note(self, ended: Pass) -> None:
        self._drafts.note_round(
            ended.checked, ended.right, ended.seconds, self.task.length, waited=ended.waited
        )

    def note_fed(self, tokens: Sequence[int]) -> None:
        self._unseen = [*self._unseen, *tokens]

    def undo(self) -> None:
        self._unseen, self._stopped = self._before, True

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
        self._unseen = self._unseen[: max(0, len(self._unseen) - cut)]
        try:
            self.catch_up()
        except BaseException:  # the KV of both models stays complete
            self._lineage.truncate(self._lineage.length - len(self._unseen))
            raise

    def end(self) -> float:
        return self._drafts.seconds_saved(self.task.length)
