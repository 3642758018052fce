"""Guesses for the replies of one model: from its conversations, at its measured costs. MLX thread.

Guesses are made from the text of the same conversation alone, which is kept by owner between turns.
Conversations share only numbers: the cost of passes, and counts of how long guesses stayed right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlxcache.guess.history import Histories
from mlxcache.guess.reply import ReplyGuesses
from mlxcache.guess.rule import LONGEST, PassCosts, Survival
from mlxcache.scheduling.guessing import GuessingDecoder, Settled
from mlxcache.scheduling.task import Task
from mlxcache.types import Tokens

STEERS_WITHIN = 3 * (LONGEST + 1)
"""Tokens before a possible change of a reply's guide, from which on nothing is guessed.

A guide changes where thinking reaches its budget. The change must apply to the same token as
without guesses.
"""

FORMS_EVERY = 64
"""Tokens of a reply between two looks for forms of tool results that were made meanwhile."""


@dataclass(slots=True)
class _Guessed:
    guesses: ReplyGuesses
    known: int = 0
    stopped: bool = False

    def tell(self, out: Sequence[int], ready: Sequence[int]) -> bool:
        """Give `guesses` what it lacks of `out`, handed out, and `ready`, drawn next."""
        before, said = self.known, len(out) + len(ready)
        self.guesses.say([*out[before:], *ready[max(0, before - len(out)) :]])
        self.known = said
        return said // FORMS_EVERY != before // FORMS_EVERY


class Speculation:
    """Owner of the guesses of all replies of one model.

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
        self._redo = redo
        self._forms = forms
        self._histories = Histories()
        self._survival = Survival()
        self._running: dict[Task, _Guessed] = {}

    def propose(self, task: Task, decoder: GuessingDecoder, most: int) -> list[int]:
        """Return the tokens, at most `most`, to check in the task's next pass.

        Nothing is guessed where that is not expected to save time, nor before the reply's first
        token, which would wait until the conversation's tokens are indexed.
        """
        if not task.out:
            return []
        running: _Guessed = self._running.get(task) or self._begin(task)
        ready = decoder.ready
        if running.tell(task.out, ready):
            running.guesses.history.add_forms(self._forms(task))
        output = task.output
        assert output is not None
        if most < 1 or running.stopped or output.may_steer(STEERS_WITHIN):
            return []
        cost = self.costs.at(task.length + len(ready))
        again = decoder.feeds - 1
        return running.guesses.propose(cost, most, ahead=not ready, fed=again)

    def set_costs(self, costs: PassCosts) -> None:
        self.costs = costs

    def stop(self, task: Task) -> None:
        running: _Guessed | None = self._running.get(task)
        if running is not None:
            running.stopped = True

    def _begin(self, task: Task) -> _Guessed:
        history = self._histories.take(task.job.owner, task.fed_ids())
        history.add_forms(self._forms(task))
        guesses = ReplyGuesses(history, self._survival, most=self.most, redo=self._redo)
        made = _Guessed(guesses, known=len(task.out))
        self._running[task] = made
        return made

    def note(self, task: Task, settled: Settled, *, alone: bool) -> None:
        """Use the result of a pass that checked a guess; if `alone`, its time corrects costs."""
        running = self._running.get(task)
        if running is None:
            return
        cached = task.length
        cost = self.costs.at(cached)(settled.fed)
        if alone and settled.seconds > 0:
            cost = self.costs.observe(settled.fed, settled.seconds, cached)
        running.guesses.note_pass(cost, settled.checked, settled.right)

    def note_plain(self, task: Task, decoder: GuessingDecoder, *, alone: bool) -> None:
        """Use the time of the newest pass of `decoder`, without a guess, for later guesses."""
        running, late = self._running.get(task), 0.0
        if alone and decoder.plain is not None and decoder.plain[1] > 0:
            if decoder.waited:
                late = self.costs.excess(*decoder.plain, task.length)
            else:
                self.costs.observe(*decoder.plain, task.length)
        if running is not None:
            cost = self.costs.at(task.length)(decoder.running)
            running.guesses.note_pass(cost + late, 0, 0)

    def end(self, task: Task) -> float:
        """End the guesses of a task, and keep its tokens; return the seconds saved."""
        running = self._running.pop(task, None)
        if running is None:
            return 0.0
        self._histories.keep(task.job.owner, running.guesses.history)
        return running.guesses.gains.saved * self.costs.seconds(task.length)
