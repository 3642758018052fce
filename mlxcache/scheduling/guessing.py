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
from mlxcache.scheduling.decoder import Decoder, Drawn, Row, launch
from mlxcache.scheduling.drafting import Draws
from mlxcache.types import Tokens


@dataclass(frozen=True, slots=True)
class Settled:
    """Result of a pass that checked a guess.

    `checked`: number of guessed tokens. `right`: how many of them, from the first on, the model
    drew too. `fed`: number of all tokens of the pass. `seconds`: from the time when the tokens of
    the pass before were known until those of this pass were; 0 if that is not known.
    """

    checked: int
    right: int
    fed: int
    seconds: float


@dataclass(slots=True)
class _Flight:
    """A pass in progress that checks a guess, with its draw at each position.

    `newest`: the token that was pending, shape (1,). `again`: tokens before it that are fed again,
    because they were taken back with a wrong guess. `guess`: the tokens after it, of which the
    first `len(after) - 1` are checked. `tokens`: the n tokens drawn after `newest` and after each
    checked token, shape (n,). `logprobs`: for each draw, log-probabilities of all tokens, shape
    (1, vocabulary). `finite`: whether the logits of each draw are finite, shape (n,). `after`: the
    state of sampler, context and guide after each draw.
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

    `clock` returns seconds. `plain`: number of tokens, and seconds, of the newest pass that has
    ended, as a pair; None if that pass checked a guess, or if the seconds are not known because the
    model did other work. `waited`: that pass was launched only when the tokens before it were
    known, after a guess, so its time includes that of the launch.
    """

    def __init__(
        self,
        model: object,
        row: Row,
        lineage: Lineage,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(model, [row], lineage.caches)
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
        """Return a decoder that continues `decoder`, which has one row, over `lineage`."""
        own = cls(decoder.model, decoder.rows[0], lineage)
        own._take(decoder, slice(0, 1))
        return own

    # -- between two steps -------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        """True while a pass runs that checks a guess."""
        return self._flight is not None

    @property
    def ready(self) -> list[int]:
        """Ids of the tokens that the next step hands out, if the newest pass checked a guess.

        Empty before `settle`, and after a pass without a guess.
        """
        if not self._settled or self.pending is None:
            return []
        return [*(drawn.token for drawn in self._accepted), *np.asarray(self.pending).tolist()]

    @property
    def feeds(self) -> int:
        """Number of tokens that the next step adds to the KV for good, without guessed ones."""
        return 1 + len(self._again)

    @property
    def proposed(self) -> int:
        """Number of guessed tokens that the next pass checks."""
        return len(self._guess)

    @property
    def running(self) -> int:
        """Number of tokens of the newest pass, guessed ones included."""
        return self._running

    def settle(self) -> Settled | None:
        """Wait for a pass that checks a guess; return its result, or None if none is running.

        Takes the wrong tokens of the guess back from the lineage. If there are any and the lineage
        has opaque slots, all tokens of the pass are taken back, and the next step feeds the right
        ones again. The next step hands out the right tokens and one more. Raises what evaluating
        the pass raises; `undo` can be called then.
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
        """Take the wrong tokens of a pass back from the lineage.

        `right`: number of guessed tokens, from the first on, that were right. If some were wrong
        and the lineage has opaque slots, all tokens of the pass are taken back, and the next step
        feeds the right ones again.
        """
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
        """Set the tokens to check in the next pass, after the pending one.

        The caches must have room for them and for the tokens that are fed again.
        """
        self._guess = guess

    def undo(self) -> bool:
        """Take back the newest pass, if it checks a guess; return whether to go on without it.

        Call after an exception in `settle` or `step`. After True, the same tokens can be fed
        without the guess: by `refeed` if the pass was running, otherwise by another `step`; the
        caller must check first that the KV is intact. Returns False if the pass checks no guess, or
        if a recurrent state from before the pass is lost. The guess is dropped in any case.
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
        """Feed the tokens of a pass that `undo` took back, without its guess.

        Does nothing if `undo` took no running pass back.
        """
        failed, self._failed = self._failed, None
        if failed is None:
            return
        self._lineage.note_pass()
        self._set_running(self._launch(failed.newest, failed.again, (), wait=True))
        self._running = 1 + len(failed.again)
        self._lineage.advance(self._running)

    def interrupt(self) -> None:
        """Note that the model does other work before the next step.

        The time from the last step to the next one is then not measured as that of a pass.
        """
        self._known_at = None

    def rewind(self, ids: Tokens) -> None:
        """Set the lineage to the tokens `ids`: the prompt and the tokens handed out.

        A lineage that is shorter, because nothing was fed since `resumed`, is left as it is.
        `ids`: as the model is fed them, shape (n,). Drops the pass in progress and the pending
        token. Blocks if a recurrent state must be computed again.
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

    def step(self, *, wait: bool = False) -> list[list[Drawn]]:
        """Return the tokens that are known and the pending one; start a pass that feeds the latter.

        The pass also checks the tokens set by `propose`, if any. The result has one list, because
        the decoder has one row. That list ends before the pending token if its logits are not
        finite. `wait`: see `launch`.
        """
        accepted, guess, again = self._accepted, self._guess, self._again
        ended = self._running
        if guess or again:
            drawn = self._step_over(again, guess, wait=wait)
        else:
            (drawn,) = super().step(wait=wait)
        self._accepted, self._guess, self._again = [], (), []
        if not self._settled:
            now = self._clock()
            self.plain = None if self._known_at is None else (ended, now - self._known_at)
            self.waited, self._known_at = self._waits_running, now
        self._waits_running = self._settled
        self._running = 1 + len(again) + len(guess)
        self._settled = False
        return [[*accepted, *drawn]]

    def _step_over(self, again: Sequence[int], guess: Sequence[int], *, wait: bool) -> list[Drawn]:
        """Start a pass over `again`, the pending token and `guess`; return the token in a list.

        `again`: tokens before the pending one that were taken back with a wrong guess. The list is
        empty if the logits of the pending token are not finite.
        """
        newest, logprobs, finite = self.pending, self.logprobs, self.finite
        assert newest is not None
        assert logprobs is not None
        assert finite is not None
        (row,) = self.rows
        row.apply_steering()
        flight = self._launch(newest, again, guess, wait=wait)
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

    def _launch(
        self, newest: mx.array, again: Sequence[int], guess: Sequence[int], *, wait: bool
    ) -> _Flight:
        """Start a pass over `again`, `newest` and `guess`; draw after `newest` and guessed tokens.

        `newest`: shape (1,). There is no draw after a guessed token that the guide does not allow,
        nor after later ones. A draw after a guessed token is of no use if that token is wrong, so
        an error in it does not end the reply: the draws end before it. `wait`: see `launch`.
        """
        (row,), lineage = self.rows, self._lineage
        if lineage.layout.opaque and guess:
            self._points.append((lineage.length, kv.hold(lineage.slots)))
        before_it, behind_it = (mx.array(list(ids), mx.int32) for ids in (again, guess))
        fed = mx.concatenate([before_it, newest.astype(mx.int32), behind_it])
        logits = self.model(fed[None], cache=self.caches, **self.places)[:, len(again) :, :]
        if row.guide is not None:  # the device computes them while the masks are computed
            launch(logits, wait=wait)
            wait = False
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
        launch(flight.tokens, drawn, flight.finite, contexts, wait=wait)
        if lineage.layout.opaque:
            kv.eval_states(self.caches, wait=False)
        return flight


def _allows(mask: Bitmask | None, token: int) -> bool:
    """Return whether a guide's mask allows a token; None allows all."""
    if mask is None:
        return True
    return token // 32 < mask.size and bool(mask[token // 32] >> (token % 32) & 1)
