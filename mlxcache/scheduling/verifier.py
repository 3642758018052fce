"""Decoding of one lineage that checks proposed tokens: several tokens in one pass of the model.

The model's own draw decides at each position, with the sampler, processors and guide as they are
there, so the reply is the same as without proposals, also with a seed. Without one a step is that
of `Decoder`. With one, a step launches a pass over the pending token, which the pass before may
still be drawing, and the guess. Until `settle` the caches then hold the guessed tokens too, which
the lineage does not count. MLX thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcache.model import kv
from mlxcache.model.guidance.thinking import allows
from mlxcache.model.kv import State
from mlxcache.model.lineage import Lineage
from mlxcache.model.recurrence import Recorder, Tape
from mlxcache.scheduling.decoder import Decoder, DecoderRow, Drawn, Pending
from mlxcache.scheduling.proposer import Draws, Pass, Proposals
from mlxcache.types import Tokens


@dataclass(slots=True)
class _Flight:
    """A pass in progress that checks a guess, with its n draws.

    `newest`: the token that was pending, shape (1,). `again`: tokens before it that are fed again,
    because they were taken back with a wrong guess. `guess`: the tokens after it, of which the
    first n - 1 are checked. `tokens`: shape (n,). `logprobs`: of shape (1, vocabulary) each.
    `finite`: shape (n,). `after`: the state after each draw.
    """

    newest: mx.array
    again: Sequence[int]
    guess: mx.array
    tokens: mx.array
    logprobs: Sequence[mx.array]
    finite: mx.array
    after: Sequence[Draws]


class Cut:
    """Takes wrong tokens back from a lineage whose layers can all be cut at any token."""

    def __init__(self, lineage: Lineage):
        self.lineage = lineage

    def mark(self) -> None:
        """Prepare for a pass whose guess may be wrong."""

    def feed(self, model: Any, tokens: mx.array, **inputs: mx.array) -> mx.array:
        """Feed `tokens`, shape (1, n), of which some may be wrong; return the logits."""
        logits: mx.array = model(tokens, cache=self.lineage.caches, **inputs)
        return logits

    def forget(self) -> None:
        """Drop what earlier passes needed: none of them will be taken back."""

    def keep(self, right: int, fed: Sequence[int], checked: int) -> list[int]:
        """Keep `fed` and `right` of `checked` guessed tokens; return those to feed again."""
        self.lineage.truncate(self.lineage.length + right)
        return []

    def undo(self) -> bool:
        """Undo the newest pass, whose tokens the lineage does not count; False if that fails."""
        return True

    def rewind(self, ids: Tokens, feed: Callable[[Tokens], None], *, running: bool) -> None:
        """Set the lineage to `ids`, fed before. `running`: a pass with a guess is in progress."""
        self.lineage.truncate(min(self.lineage.length, len(ids)))


class PutBack(Cut):
    """Puts the state of recurrent layers back, after which the right tokens are fed again."""

    def __init__(self, lineage: Lineage):
        super().__init__(lineage)
        self._points: list[tuple[int, State]] = []

    def mark(self) -> None:
        self._points.append((self.lineage.length, kv.hold(self.lineage.slots)))

    def forget(self) -> None:
        self._points.clear()

    def keep(self, right: int, fed: Sequence[int], checked: int) -> list[int]:
        self._points = self._points[-1:]
        if right == checked:
            return super().keep(right, fed, checked)
        self._return_to(*self._points[-1])
        return list(fed)

    def undo(self) -> bool:
        if not self._points:
            return True
        start, state = self._points[-1]
        if start == self.lineage.length:
            kv.put_back(self.lineage.slots, state)
        return kv.are_sound(state)

    def rewind(self, ids: Tokens, feed: Callable[[Tokens], None], *, running: bool) -> None:
        lineage, points = self.lineage, self._points
        self._points = []
        exact = not running and lineage.length == len(ids)
        if exact or (not points and lineage.length < len(ids)):  # nothing was fed since `resumed`
            return
        start, state = [point for point in points if point[0] <= len(ids)][-1]
        self._return_to(start, state)
        if start == len(ids):
            return
        lineage.note_pass()
        try:
            feed(ids[start:])
            kv.eval_states(lineage.caches)
        except BaseException:  # what was computed up to there is kept
            self._return_to(start, state)
            raise
        lineage.advance(len(ids) - start)

    def _return_to(self, start: int, state: State) -> None:
        self.lineage.truncate(start)
        kv.put_back(self.lineage.slots, state)


class Recompute(PutBack):
    """Recomputes the state of recurrent layers after the last right token: nothing is fed again."""

    def __init__(self, lineage: Lineage, recorder: Recorder):
        super().__init__(lineage)
        self._recorder = recorder
        self._tape: Tape | None = None

    def feed(self, model: Any, tokens: mx.array, **inputs: mx.array) -> mx.array:
        logits, self._tape = self._recorder.feed(model, tokens, self.lineage.caches, **inputs)
        return logits

    def forget(self) -> None:
        super().forget()
        self._tape = None

    def keep(self, right: int, fed: Sequence[int], checked: int) -> list[int]:
        self._points, tape = self._points[-1:], self._tape
        assert tape is not None
        if right < checked:
            tape.end_at(len(fed))
        self._tape = None
        return Cut.keep(self, right, fed, checked)


def _undo_of(lineage: Lineage, recorder: Recorder | None) -> Cut:
    if not lineage.layout.recurrent:
        return Cut(lineage)
    return PutBack(lineage) if recorder is None else Recompute(lineage, recorder)


class Verifier(Decoder):
    """Decoder of one row over the caches of `lineage`, which checks `proposals`.

    `recorder`: lets the states of recurrent layers be recomputed, where that is possible.
    """

    def __init__(
        self,
        model: object,
        row: DecoderRow,
        lineage: Lineage,
        proposals: Proposals,
        *,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(model, [row], lineage.caches, lambda: lineage.nbytes)
        self.proposals = proposals
        self.proposed = 0
        self._lineage = lineage
        self._clock = clock
        self._undo = _undo_of(lineage, recorder)
        self._flight: _Flight | None = None
        self._failed: _Flight | None = None
        self._again: list[int] = []
        self._accepted: list[Drawn] = []
        self._settled = False
        self._ended: list[Pass] = []
        self._running, self._waits = 1, False
        self._known_at: float | None = None

    @classmethod
    def resumed(
        cls,
        decoder: Decoder,
        lineage: Lineage,
        proposals: Proposals,
        recorder: Recorder | None = None,
    ) -> Verifier:
        own = cls(decoder.model, decoder.rows[0], lineage, proposals, recorder=recorder)
        own._take(decoder, slice(0, 1))
        return own

    def start(self, inputs: Sequence[int]) -> None:
        super().start(inputs)
        self.proposals.note_fed(inputs)

    # -- between two steps -------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    @property
    def ready(self) -> list[int]:
        """Ids of the tokens that the next step hands out, if the newest pass checked a guess."""
        if not self._settled or self.pending is None:
            return []
        newest = np.asarray(self.pending.tokens).tolist()
        return [*(drawn.token for drawn in self._accepted), *newest]

    @property
    def feeds(self) -> int:
        return 1 + len(self._again)

    @property
    def writes(self) -> int:
        """A draft model writes to its buffers token by token."""
        return max(1, self.proposed)

    def settle(self) -> list[Pass]:
        """Wait for a pass that checks a guess; return the passes that ended since the last call.

        Takes the wrong tokens back from the lineage. The next step hands out the right ones and one
        more. Raises what evaluating the pass raises; `undo` can be called then.
        """
        flight = self._flight
        if flight is None:
            self._undo.forget()
        else:
            self._settle(flight)
        ended, self._ended = self._ended, []
        return ended

    def _settle(self, flight: _Flight) -> None:
        tokens, finite = np.asarray(flight.tokens).tolist(), np.asarray(flight.finite).tolist()
        guess = np.asarray(flight.guess).tolist()
        self._flight = None
        (row,) = self.rows
        right = 0
        # a change of the guide applies from the token after the first one on
        most = 0 if row.steering is not None else len(flight.after) - 1
        while right < most and finite[right] and tokens[right] == guess[right]:
            right += 1
        fed = [*flight.again, *np.asarray(flight.newest).tolist(), *guess[:right]]
        self._again = self._undo.keep(right, fed, len(guess))
        self.proposals.note_fed(guess[:right])
        after = flight.after[right]
        row.resume(after.sampler, after.context, after.guide)
        self._accepted = [Drawn(row, tokens[i], flight.logprobs[i][0]) for i in range(right)]
        chosen = slice(right, right + 1)
        self._set_pending(
            Pending(flight.tokens[chosen], flight.logprobs[right], flight.finite[chosen])
        )
        self._settled = True
        self._note_end(len(guess), right)

    def _note_end(self, checked: int = 0, right: int = 0) -> None:
        now = self._clock()
        seconds = None if self._known_at is None else now - self._known_at
        self._ended.append(Pass(self._running, seconds, self._waits, checked, right))
        self._known_at = now

    def propose(self, count: int) -> None:
        self.proposed = count

    def undo(self) -> bool:
        """Take back the newest pass, if it checks a guess; return whether to go on without it.

        Call after an exception in `settle` or `step`. Then `refeed` a pass that was running, or
        repeat the `step`, if the KV is intact. False also if a recurrent state from before the pass
        is lost. The guess is dropped in any case.
        """
        flight, self._flight = self._flight, None
        checks, self.proposed = flight is not None or self.proposed > 0, 0
        self._known_at = None
        if not checks:
            return False
        self.proposals.undo()
        lineage = self._lineage
        lineage.truncate(lineage.length - (1 + len(flight.again) if flight is not None else 0))
        self._failed = flight
        return self._undo.undo()

    def refeed(self) -> None:
        """Feed the tokens of a running pass that `undo` took back, without its guess."""
        failed, self._failed = self._failed, None
        if failed is None:
            return
        self._lineage.note_pass()
        self._set_running(self._launch(failed.newest, failed.again, 0))
        self._running = 1 + len(failed.again)
        self.proposals.note_fed(np.asarray(failed.newest).tolist())
        self._lineage.advance(self._running)

    def interrupt(self) -> None:
        """Note that the model does other work before the next step, whose time is not measured."""
        self._known_at = None

    def rewind(self, ids: Tokens) -> None:
        """Set the lineage to `ids`, fed before: the prompt and the tokens handed out.

        A lineage that is shorter, because nothing was fed since `resumed`, is left as it is. Blocks
        if a recurrent state must be computed again.
        """
        before, running = self._lineage.length, self.in_flight
        self._flight = self.pending = None
        self._undo.rewind(ids, self._feed, running=running)
        self.proposals.rewind(max(0, before - self._lineage.length))

    def _feed(self, ids: Tokens) -> None:
        self.model(mx.array(ids)[None], cache=self.caches, **self.places)

    # -- a step ------------------------------------------------------------------------------------

    def step(self) -> list[list[Drawn]]:
        """Return the known tokens and the pending one; start a pass that feeds the latter."""
        accepted, count, again = self._accepted, self.proposed, self._again
        if count or again:
            drawn = self._step_over(again, count)
        else:
            (drawn,) = super().step()
        self.proposals.note_fed([one.token for one in drawn])
        if not self._settled:
            self._note_end()
        self._waits, self._running = self._settled, 1 + len(again) + count
        self._accepted, self.proposed, self._again, self._settled = [], 0, [], False
        return [[*accepted, *drawn]]

    def _step_over(self, again: Sequence[int], count: int) -> list[Drawn]:
        """Start a pass over `again`, the pending token and a guess; return that token."""
        pending = self.pending
        assert pending is not None
        (row,) = self.rows
        row.apply_steering()
        flight = self._launch(pending.tokens, again, count)
        (ready,) = self._drawn(pending)
        self._set_running(flight)
        return ready

    def _set_running(self, flight: _Flight) -> None:
        if flight.guess.size:
            self._flight, self.pending = flight, None
            return
        (row,), after = self.rows, flight.after[0]
        row.resume(after.sampler, after.context, after.guide)
        self.pending = Pending(flight.tokens, flight.logprobs[0], flight.finite)

    def _launch(self, newest: mx.array, again: Sequence[int], count: int) -> _Flight:
        (row,), lineage = self.rows, self._lineage
        context = row.context if row.processors else None
        state = Draws(row, row.sampler, context, row.guide).seen(newest, drawn=not row.guided)
        guess = mx.zeros(0, mx.int32)
        states: Sequence[Draws] = ()
        if count:
            self._undo.mark()
            guess, states = self.proposals.draft(count, newest, state)
        fed = [mx.array(list(again), mx.int32), newest.astype(mx.int32), guess.astype(mx.int32)]
        shown = mx.concatenate(fed)[None]
        if count:
            logits = self._undo.feed(self.model, shown, **self.places)
        else:
            logits = self.model(shown, cache=self.caches, **self.places)
        if row.guide is not None:  # the device computes them while the masks are computed
            self._begin(logits)
        draws = list(self._draw_each(logits[:, len(again) :, :], guess, [state, *states]))
        tokens, logprobs, finite, after = (list(each) for each in zip(*draws, strict=True))
        flight = _Flight(
            newest, again, guess, mx.concatenate(tokens), logprobs, mx.concatenate(finite), after
        )
        contexts = [one.context for one in after if one.context is not None]
        evaluate = self._begin if row.guide is None else mx.async_eval
        evaluate(flight.tokens, guess, logprobs, flight.finite, contexts)
        if lineage.layout.recurrent:
            kv.eval_states(self.caches, wait=False)
        return flight

    def _draw_each(
        self, logits: mx.array, guess: mx.array, states: list[Draws]
    ) -> Iterator[tuple[mx.array, mx.array, mx.array, Draws]]:
        """Draw after the newest token and after each guessed one; see `Draws.draw`.

        There is no draw after a guessed token that the guide does not allow, nor after later ones.
        A draw after a guessed token is of no use if that token is wrong, so an error in it does not
        end the reply: the draws end before it.
        """
        (row,), made = self.rows, len(states) > 1
        ids = [] if made else np.asarray(guess).tolist()
        for i in range(1 + guess.size):
            drawn = states[i].draw(logits[:, i, :])
            if i > 0 and states[i].row.error is not None:
                return
            yield drawn
            if i == guess.size or row.error is not None:
                return
            if not made:
                mask = states[i].mask
                if mask is not None and not allows(mask, ids[i]):
                    return
                after = drawn[-1] if i else drawn[-1].trial()
                states.append(after.seen(guess[i : i + 1]))
