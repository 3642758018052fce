"""Decoding of one lineage that checks guesses: several tokens in one pass of the model.

The model's own draw decides at each position, with the sampler, processors and guide as they are
there, so the reply is the same as without guesses, also with a seed. Without a guess a step is that
of `Decoder`. With one, a step launches a pass over the pending token, which the pass before may
still be drawing, and the guess. Until `settle` the caches then hold the guessed tokens too, which
the lineage does not count. MLX thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import mlx.core as mx
import numpy as np

from mlxcache.model import kv
from mlxcache.model.guidance.guide import Bitmask
from mlxcache.model.kv import State
from mlxcache.model.lineage import Lineage
from mlxcache.scheduling.decoder import Decoder, Drawn, Row
from mlxcache.scheduling.drafting import Draws
from mlxcache.types import Tokens


@dataclass(frozen=True, slots=True)
class Settled:
    """Result of a pass over `fed` tokens, which checked a guess of `checked` tokens."""

    checked: int
    right: int
    fed: int
    seconds: float


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
    guess: Sequence[int]
    tokens: mx.array
    logprobs: Sequence[mx.array]
    finite: mx.array
    after: Sequence[Draws]


class GuessingDecoder(Decoder):
    """Decoder of one row over the caches of `lineage`, which checks the guesses it is given.

    `plain`: number of tokens, and seconds, of the newest pass that has ended; None if that pass
    checked a guess, or if the model did other work meanwhile. `waited`: that pass was launched only
    when the tokens before it were known, so its time includes that of the launch.
    """

    def __init__(
        self,
        model: object,
        row: Row,
        lineage: Lineage,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(model, [row], lineage.caches, lambda: lineage.nbytes)
        self._lineage = lineage
        self._clock = clock
        self._flight: _Flight | None = None
        self._guess: Sequence[int] = ()
        self._again: list[int] = []
        self._accepted: list[Drawn] = []
        self._settled = False
        self._known_at: float | None = None
        self._points: list[tuple[int, State]] = []
        self._running = 1
        self._failed: _Flight | None = None
        self.plain: tuple[int, float] | None = None
        self.waited = False
        self._waits_running = False

    @classmethod
    def resumed(cls, decoder: Decoder, lineage: Lineage) -> GuessingDecoder:
        own = cls(decoder.model, decoder.rows[0], lineage)
        own._take(decoder, slice(0, 1))
        return own

    # -- between two steps -------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    @property
    def ready(self) -> list[int]:
        """Ids of the tokens that the next step hands out, if the newest pass checked a guess."""
        if not self._settled or self.pending is None:
            return []
        return [*(drawn.token for drawn in self._accepted), *np.asarray(self.pending).tolist()]

    @property
    def feeds(self) -> int:
        return 1 + len(self._again)

    @property
    def proposed(self) -> int:
        return len(self._guess)

    @property
    def running(self) -> int:
        """Number of tokens of the newest pass, guessed ones included."""
        return self._running

    def settle(self) -> Settled | None:
        """Wait for a pass that checks a guess; return its result, or None if none is running.

        Takes the wrong tokens back from the lineage. The next step hands out the right ones and one
        more. Raises what evaluating the pass raises; `undo` can be called then.
        """
        flight = self._flight
        if flight is None:
            self._points.clear()
            return None
        tokens, finite = np.asarray(flight.tokens).tolist(), np.asarray(flight.finite).tolist()
        self._flight, now = None, self._clock()
        (row,) = self.rows
        checked, right = len(flight.after) - 1, 0
        # a change of the guide applies from the token after the first one on
        most = 0 if row.steering is not None else checked
        while right < most and finite[right] and tokens[right] == flight.guess[right]:
            right += 1
        row.count_drafts(len(flight.guess), right)
        self._take_back(flight, right)
        after = flight.after[right]
        row.resume(after.sampler, after.context, after.guide)
        self._accepted = [Drawn(row, tokens[i], flight.logprobs[i][0]) for i in range(right)]
        chosen = slice(right, right + 1)
        self._set_pending(flight.tokens[chosen], flight.logprobs[right], flight.finite[chosen])
        self._settled = True
        seconds = now - self._known_at if self._known_at is not None else 0.0
        self._known_at, self.plain = now, None
        fed = len(flight.again) + 1 + len(flight.guess)
        return Settled(len(flight.guess), right, fed, seconds)

    def _take_back(self, flight: _Flight, right: int) -> None:
        """Take the wrong tokens of a pass back from the lineage."""
        lineage = self._lineage
        if not lineage.layout.opaque or right == len(flight.guess):
            lineage.truncate(lineage.length + right)
            self._points = self._points[-1:]
            return
        start, state = self._points[-1]
        newest = np.asarray(flight.newest).tolist()
        self._again = [*flight.again, *newest, *flight.guess[:right]]
        lineage.truncate(start)
        kv.put_back(lineage.slots, state)
        self._points = [(start, state)]

    def propose(self, guess: Sequence[int]) -> None:
        self._guess = guess

    def undo(self) -> bool:
        """Take back the newest pass, if it checks a guess; return whether to go on without it.

        Call after an exception in `settle` or `step`. Then `refeed` a pass that was running, or
        repeat the `step`, if the KV is intact. False also if a recurrent state from before the pass
        is lost. The guess is dropped in any case.
        """
        flight, self._flight = self._flight, None
        guess, self._guess = self._guess if flight is None else flight.guess, ()
        self._known_at = self.plain = None
        if not guess:
            return False
        lineage = self._lineage
        lineage.truncate(lineage.length - (1 + len(flight.again) if flight is not None else 0))
        if flight is not None:
            self._failed = flight
        if not (lineage.layout.opaque and self._points):
            return True
        start, state = self._points[-1]
        if start == lineage.length:
            kv.put_back(lineage.slots, state)
        return kv.are_sound(state)

    def refeed(self) -> None:
        """Feed the tokens of a running pass that `undo` took back, without its guess."""
        failed, self._failed = self._failed, None
        if failed is None:
            return
        self._lineage.note_pass()
        self._set_running(self._launch(failed.newest, failed.again, ()))
        self._running = 1 + len(failed.again)
        self._lineage.advance(self._running)

    def interrupt(self) -> None:
        """Note that the model does other work before the next step, whose time is not measured."""
        self._known_at = None

    def rewind(self, ids: Tokens) -> None:
        """Set the lineage to `ids`, fed before: the prompt and the tokens handed out.

        A lineage that is shorter, because nothing was fed since `resumed`, is left as it is. Blocks
        if a recurrent state must be computed again.
        """
        lineage, flight = self._lineage, self._flight
        points, self._points, self._flight, self.pending = self._points, [], None, None
        exact = flight is None and lineage.length == len(ids)
        shorter = not points and lineage.length < len(ids)  # nothing was fed since `resumed`
        if exact or shorter or not lineage.layout.opaque:
            lineage.truncate(min(lineage.length, len(ids)))
            return
        start, state = [point for point in points if point[0] <= len(ids)][-1]
        lineage.truncate(start)
        kv.put_back(lineage.slots, state)
        if start == len(ids):
            return
        lineage.note_pass()
        try:
            self.model(mx.array(ids[start:])[None], cache=self.caches, **self.places)
            kv.eval_states(self.caches)
        except BaseException:  # what was computed up to there is kept
            lineage.truncate(start)
            kv.put_back(lineage.slots, state)
            raise
        lineage.advance(len(ids) - start)

    # -- a step ------------------------------------------------------------------------------------

    def step(self) -> list[list[Drawn]]:
        """Return the known tokens and the pending one; start a pass that feeds the latter."""
        accepted, guess, again = self._accepted, self._guess, self._again
        ended = self._running
        if guess or again:
            drawn = self._step_over(again, guess)
        else:
            (drawn,) = super().step()
        self._accepted, self._guess, self._again = [], (), []
        if not self._settled:
            now = self._clock()
            self.plain = None if self._known_at is None else (ended, now - self._known_at)
            self.waited, self._known_at = self._waits_running, now
        self._waits_running = self._settled
        self._running = 1 + len(again) + len(guess)
        self._settled = False
        return [[*accepted, *drawn]]

    def _step_over(self, again: Sequence[int], guess: Sequence[int]) -> list[Drawn]:
        """Start a pass over `again`, the pending token and `guess`; return that token."""
        newest, logprobs, finite = self.pending, self.logprobs, self.finite
        assert newest is not None
        assert logprobs is not None
        assert finite is not None
        (row,) = self.rows
        row.apply_steering()
        flight = self._launch(newest, again, guess)
        (ready,) = self._drawn(newest, logprobs, finite)
        self._set_running(flight)
        return ready

    def _set_running(self, flight: _Flight) -> None:
        """Set the pass in progress; if it checks no guess, its draw becomes the pending token."""
        if flight.guess:
            self._flight, self.pending = flight, None
            return
        (row,), after = self.rows, flight.after[0]
        row.resume(after.sampler, after.context, after.guide)
        self.pending, self.finite = flight.tokens, flight.finite
        self.logprobs = flight.logprobs[0]

    def _launch(self, newest: mx.array, again: Sequence[int], guess: Sequence[int]) -> _Flight:
        """Start a pass over `again`, `newest` and `guess`; draw after `newest` and guessed tokens.

        There is no draw after a guessed token that the guide does not allow, nor after later ones.
        A draw after a guessed token is of no use if that token is wrong, so an error in it does not
        end the reply: the draws end before it.
        """
        (row,), lineage = self.rows, self._lineage
        if lineage.layout.opaque and guess:
            self._points.append((lineage.length, kv.hold(lineage.slots)))
        before_it, behind_it = (mx.array(list(ids), mx.int32) for ids in (again, guess))
        fed = mx.concatenate([before_it, newest.astype(mx.int32), behind_it])
        logits = self.model(fed[None], cache=self.caches, **self.places)[:, len(again) :, :]
        if row.guide is not None:  # the device computes them while the masks are computed
            self._begin(logits)
        context = row.context if row.processors else None
        state = Draws(row, row.sampler, context, row.guide).seen(newest, drawn=not row.guided)
        tokens, drawn, sound, after = [], [], [], []
        for i in range(1 + len(guess)):
            before = state
            token, line, is_sound, state = before.draw(logits[:, i, :])
            if i > 0 and before.row.error is not None:
                break
            tokens.append(token)
            drawn.append(line)
            sound.append(is_sound)
            after.append(state)
            if i == len(guess) or not _allows(before.mask, guess[i]) or row.error is not None:
                break
            trial = replace(state, row=row.trial() if i == 0 else state.row)
            state = trial.seen(mx.array([guess[i]], mx.uint32))
        flight = _Flight(
            newest, again, guess, mx.concatenate(tokens), drawn, mx.concatenate(sound), after
        )
        contexts = [one.context for one in after if one.context is not None]
        evaluate = self._begin if row.guide is None else mx.async_eval
        evaluate(flight.tokens, drawn, flight.finite, contexts)
        if lineage.layout.opaque:
            kv.eval_states(self.caches, wait=False)
        return flight


def _allows(mask: Bitmask | None, token: int) -> bool:
    if mask is None:
        return True
    return token // 32 < mask.size and bool(mask[token // 32] >> (token % 32) & 1)
