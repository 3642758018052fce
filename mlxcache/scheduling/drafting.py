"""Speculative decoding of one lineage: a draft model proposes tokens, the model verifies them.

The served model's own draw decides at each position, so the reply is the same as without a draft
model, also with a seed. The draft model draws with the same random key and processors, so the two
draw the same token wherever their probabilities agree, at any temperature.

As in `Decoder`, the pass that feeds a token runs when the token is handed out. That pass includes
drafted tokens, so the caches are ahead of the lineage until `settle` counts the accepted ones.
Where drafting does not pay, a step drafts nothing, and costs what it costs without a draft model.
MLX thread only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from mlxcache.model.guidance.guide import Bitmask, Guide
from mlxcache.model.kv import eval_states
from mlxcache.model.lineage import Lineage
from mlxcache.model.pair import Pair
from mlxcache.model.sampling import masked
from mlxcache.scheduling.decoder import (
    Decoder,
    Drawn,
    NonFiniteOutput,
    Row,
    Sampler,
    normalised,
    processed,
)

CATCH_UP = 256
"""Tokens of a pass that feeds the draft model what it has not seen."""


@dataclass(slots=True)
class Draws:
    """State of sampler, context and guide before the next draw.

    Each state has its own copy of the sampler, which every draw changes, and of the guide, which
    every token changes. `context`: all token ids so far, shape (n,); None without processors.
    `mask`: tokens that `guide` allows next; None if it allows all or was not asked yet.
    """

    row: Row
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
        if self.guide is not None:
            self.mask = self.row.allowed(self.guide) if self.mask is None else self.mask
            logits = logits if self.mask is None else masked(logits, [self.mask])
        logprobs, finite = normalised(logits)
        try:
            token = sampler(logprobs)
        except Exception as error:  # noqa: BLE001 - logged as the request fails
            self.row.fail(error)
            token = mx.zeros(1, mx.uint32)
        return token, logprobs, finite, Draws(self.row, sampler, self.context, self.guide)

    def seen(self, token: mx.array, *, drawn: bool = True) -> Draws:
        """Return the state with `token`, shape (1,), appended to the context."""
        context, guide = self.context, self.guide
        if context is not None:
            context = mx.concatenate([context, token.astype(mx.int32)])
        if guide is not None and drawn:
            guide = guide.copy()
            self.row.advance(guide, int(cast(int, token.item())))
        return Draws(self.row, self.sampler, context, guide)


@dataclass(slots=True)
class _Flight:
    """One pass of the model in progress, with the n draws at its positions.

    `tokens`: shape (n,). `logprobs`: of shape (1, vocabulary) each. `finite`: shape (n,). `after`:
    the state after each draw. `drafted`: the proposed tokens that were fed, shape (n - 1,).
    """

    tokens: mx.array
    logprobs: Sequence[mx.array]
    finite: mx.array
    after: Sequence[Draws]
    drafted: mx.array


class DraftingDecoder(Decoder):
    """Decoder of one row that runs a model and its draft model over a lineage's caches.

    Without drafts a step is that of `Decoder`, and feeds the served model only; the draft model is
    fed the same tokens later, many in one pass. `last`: number of tokens drafted for the newest
    pass that has ended, and its seconds; None if the model did other work meanwhile. `waited`: that
    pass was launched only when the tokens before it were known.
    """

    def __init__(
        self,
        model: Pair,
        row: Row,
        lineage: Lineage,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ):
        super().__init__(model.verify, [row], lineage.caches, lambda: lineage.nbytes)
        self.last: tuple[int, float] | None = None
        self.waited = False
        self._waits_running = False
        self._pair = model
        self._lineage = lineage
        self._clock = clock
        self._drafts = 0
        self._draws: Draws | None = None
        self._flight: _Flight | None = None
        self._ready: list[Drawn] = []
        self._unseen: list[int] = []
        self._known_at: float | None = None

    def start(self, inputs: Sequence[int]) -> None:
        super().start(inputs)
        self._pair.propose(mx.array([list(inputs)], mx.uint32), self.caches)
        eval_states(self.caches, wait=False)

    # -- between two steps -------------------------------------------------------------------------

    @property
    def in_flight(self) -> bool:
        return self._flight is not None

    @property
    def unseen(self) -> int:
        """Number of tokens in the lineage that the draft model has not been fed."""
        return len(self._unseen)

    @property
    def ready(self) -> int:
        """Number of tokens that the next `step` hands out."""
        return len(self._ready) if self.pending is None else 1

    @property
    def writes(self) -> int:
        """The draft model is fed token by token: the number of tokens to draft, at least 1."""
        return max(1, self._drafts)

    def settle(self) -> tuple[int, int]:
        """Wait for a pass that verifies drafts; return the numbers of drafted and accepted tokens.

        The caller must then truncate the lineage to the tokens handed out and the accepted ones.
        The next `step` hands out the accepted tokens and one more.
        """
        if self._flight is None:
            return 0, 0
        flight, self._flight = self._flight, None
        tokens, drafted = np.asarray(flight.tokens).tolist(), np.asarray(flight.drafted).tolist()
        right = 0
        while right < len(drafted) and tokens[right] == drafted[right]:
            right += 1
        if not all(np.asarray(flight.finite).tolist()[: right + 1]):
            raise NonFiniteOutput
        (row,) = self.rows
        row.count_drafts(len(drafted), right)
        draws = flight.after[right]
        guide = row.steered(draws.guide, tokens[:right])
        if guide is not draws.guide:
            draws = Draws(row, draws.sampler, draws.context, guide)
        self._draws = draws
        self._unseen = drafted[-1:] if right == len(drafted) else []
        self._ready = [Drawn(row, tokens[i], flight.logprobs[i][0]) for i in range(right + 1)]
        self._note_time(len(drafted))
        return len(drafted), right

    def propose(self, drafts: int) -> None:
        self._drafts = drafts

    def catch_up(self) -> None:
        """Feed the draft model the tokens in the lineage that it has not seen. Does not block."""
        unseen, self._unseen = self._unseen, []
        if not unseen:
            return
        self._lineage.note_pass()
        self._pair.set_draft_length(self.caches, self._lineage.length - len(unseen))
        for start in range(0, len(unseen), CATCH_UP):
            piece = unseen[start : start + CATCH_UP]
            self._pair.propose(mx.array([piece], mx.uint32), self.caches)
        eval_states(self.caches, wait=False)

    def rewind(self, length: int) -> None:
        """Cut the lineage to `length` positions: the prompt and the tokens handed out."""
        if self.pending is None:  # a round: what the draft model lacks is beyond `length`
            self._unseen = []
        self._flight, self._ready, self.pending = None, [], None
        self._lineage.truncate(length)
        try:
            self.catch_up()
        except BaseException:
            self._lineage.truncate(max(0, length - len(self._unseen)))
            raise

    def interrupt(self) -> None:
        """Note that the model does other work before the next step, whose time is not measured."""
        self._known_at = None

    def _note_time(self, drafted: int) -> None:
        now = self._clock()
        self.last = None if self._known_at is None else (drafted, now - self._known_at)
        self.waited, self._known_at = self._waits_running, now

    # -- a step ------------------------------------------------------------------------------------

    def step(self) -> list[list[Drawn]]:
        """Return the tokens that `ready` counts; start a pass over the last of them and drafts."""
        if self.pending is not None and not (self._drafts and self._take_pending()):
            (drawn,) = super().step()
            self._unseen += [one.token for one in drawn]
            self._note_time(0)
            self._waits_running = False
            return [drawn]
        ready, self._ready, self._waits_running = self._ready, [], True
        newest = ready[-1].token
        if self._drafts:
            self._launch(newest, self._drafts)
        else:
            self._feed_plain(newest)
        return [ready]

    def _take_pending(self) -> bool:
        """Make the pending token the only ready one; False if its logits are not finite."""
        assert self.pending is not None
        assert self.logprobs is not None
        (row,) = self.rows
        if not bool(np.asarray(self.finite).all()):
            return False
        (token,) = np.asarray(self.pending).tolist()
        self._ready = [Drawn(row, token, self.logprobs[0])]
        row.apply_steering()
        context = row.context if row.processors else None
        self._draws = Draws(row, row.sampler, context, row.guide)
        self.pending = None
        self._known_at = self._clock() if self._known_at is not None else None
        return True

    def _feed_plain(self, newest: int) -> None:
        draws, (row,) = self._draws, self.rows
        assert draws is not None
        row.resume(draws.sampler, draws.context, draws.guide)
        self.pending, self.finite = mx.array([newest], mx.uint32), mx.array([True])
        try:
            self._advance(mx.array([newest], mx.int32))
        except BaseException:  # it was not handed out, and this step cannot be made again
            self.pending = None
            raise
        self._unseen.append(newest)

    def _launch(self, newest: int, drafts: int) -> None:
        """Draft `drafts` tokens, then feed `newest` and them in one pass, with a draw at each."""
        draws, (row,), pair = self._draws, self.rows, self._pair
        assert draws is not None
        fed = mx.array([newest], mx.uint32)
        states = [draws.seen(fed, drawn=not row.guided)]
        if self._unseen:
            pair.set_draft_length(self.caches, self._lineage.length - len(self._unseen))
        shown = mx.array([*self._unseen, newest], mx.uint32)
        drafted = []
        for _ in range(drafts):
            logits = pair.propose(shown[None], self.caches)[:, -1, :]
            shown, _, _, state = states[-1].draw(logits)
            drafted.append(shown)
            states.append(state.seen(shown))
        logits = pair.verify(mx.concatenate([fed, *drafted])[None], self.caches, **self.places)
        if draws.guide is not None:  # the device computes them while the masks are computed
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        tokens, logprobs, finite, after = zip(
            *(state.draw(logits[:, i, :]) for i, state in enumerate(states)), strict=True
        )
        guesses, sound = mx.concatenate(drafted), mx.concatenate(list(finite))
        self._flight = _Flight(mx.concatenate(list(tokens)), logprobs, sound, after, guesses)
        contexts = [state.context for state in after if state.context is not None]
        mx.async_eval(self._flight.tokens, logprobs, sound, guesses, contexts)  # type: ignore[no-untyped-call]
        self._unseen = []
        row.note_drawn()
