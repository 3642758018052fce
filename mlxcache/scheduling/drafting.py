"""Speculative decoding of one lineage: a draft model proposes tokens, the model verifies them.

The model's own draw decides at each position, so the reply is the same as without a draft model,
also with a seed. The draft draws with the same random key and processors, so the two draw the same
token wherever their probabilities agree, at any temperature.

As in `Decoder`, the pass that feeds a token runs when the token is handed out. That pass includes
drafted tokens, so the caches are ahead of the lineage until `settle` counts the accepted ones. MLX
thread only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import cast

import mlx.core as mx
import numpy as np

from mlxcache.model.guidance.guide import Bitmask, Guide
from mlxcache.model.kv import Caches, eval_states
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

log = logging.getLogger("mlxcache.engine")


@dataclass(slots=True)
class Draws:
    """State of sampler, context and guide before the next draw.

    Each state has its own copy of the sampler, which every draw changes, and of the guide, which
    every token changes. `row`: records exceptions of these. `context`: all token ids so far,
    shape (n,); None without processors. `mask`: tokens that `guide` allows next; None if it allows
    all or was not asked yet.
    """

    row: Row
    sampler: Sampler
    context: mx.array | None
    guide: Guide | None = None
    mask: Bitmask | None = None

    def draw(self, logits: mx.array) -> tuple[mx.array, mx.array, mx.array, Draws]:
        """Draw a token from `logits`, shape (1, vocabulary).

        Returns the token, shape (1,), its log-probabilities, whether they are finite, shape (1,),
        and the state after the draw. An exception in the sampler or a processor fails the row.
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
        except Exception as error:
            log.exception("%s: reply ended: its sampler failed", self.row.id)
            self.row.fail(error)
            token = mx.zeros(1, mx.uint32)
        return token, logprobs, finite, Draws(self.row, sampler, self.context, self.guide)

    def seen(self, token: mx.array, *, drawn: bool = True) -> Draws:
        """Return the state with `token`, shape (1,), appended to the context.

        `drawn`: the token is part of the reply, so a guide advances by it. With a guide, this waits
        until the token is evaluated.
        """
        context, guide = self.context, self.guide
        if context is not None:
            context = mx.concatenate([context, token.astype(mx.int32)])
        if guide is not None and drawn:
            guide = guide.copy()
            self.row.advance(guide, int(cast(int, token.item())))
        return Draws(self.row, self.sampler, context, guide)


@dataclass(slots=True)
class _Flight:
    """One pass of the model in progress, with its draw at each position.

    `tokens`, `logprobs`: the drawn tokens and their log-probabilities. `finite`: whether the logits
    of each position are finite. `after`: the state of sampler, context and guide after each draw.
    `drafted`: the proposed tokens that were fed.
    """

    tokens: mx.array
    logprobs: Sequence[mx.array]
    finite: mx.array
    after: Sequence[Draws]
    drafted: mx.array


class DraftingDecoder(Decoder):
    """Decoder of one row that runs a model and its draft model over a lineage's caches."""

    model: Pair

    def __init__(self, model: Pair, row: Row, caches: Caches):
        super().__init__(model, [row], caches)
        self._drafts = 0
        context = row.context if row.processors else None
        self._draws = Draws(row, row.sampler, context, row.guide)
        self._flight: _Flight | None = None
        self._ready: list[Drawn] = []
        self._unseen: list[int] = []  # drawn, and not fed to the draft yet

    def start(self, inputs: Sequence[int]) -> None:
        """Feed the newest token, which is not in the KV yet, and start drawing the next one.

        `inputs`: the id of that token.
        """
        (newest,) = inputs
        self._launch(newest, 0, drawn=False)

    def settle(self) -> int:
        """Wait for the pass in progress; return how many drafted tokens were accepted.

        The caller must then truncate the caches to that many positions beyond the newest token
        handed out. The next `step` hands out the accepted tokens and one more. Raises
        NonFiniteOutput if one of these tokens was drawn from logits that are not finite.
        """
        if self._flight is None:
            return 0
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
        return right

    def propose(self, drafts: int) -> None:
        """Set the number of tokens to draft for the next pass to `drafts`.

        The caches must have room for them.
        """
        self._drafts = drafts

    @property
    def ready(self) -> int:
        """Number of tokens that the next `step` hands out."""
        return len(self._ready)

    @property
    def writes(self) -> int:
        """Maximum number of times that the next step writes to one KV buffer.

        The draft model is fed token by token, so this is the number of tokens to draft, at least 1.
        """
        return max(1, self._drafts)

    def step(self) -> list[list[Drawn]]:
        """Return the tokens that are ready; start a pass over the last of them and new drafts.

        The result has one list, because the decoder has one row.
        """
        ready, self._ready = self._ready, []
        self._launch(ready[-1].token, self._drafts)
        return [ready]

    def _launch(self, newest: int, drafts: int, *, drawn: bool = True) -> None:
        """Draft `drafts` tokens, then feed `newest` and the drafted tokens in one pass.

        The model draws at each position. `drawn`: `newest` is part of the reply, not of the prompt.
        """
        fed = mx.array([newest], mx.uint32)
        states = [self._draws.seen(fed, drawn=drawn)]
        if self._unseen:
            self.model.rewind_draft(self.caches, len(self._unseen))
        shown = mx.array([*self._unseen, newest], mx.uint32)
        drafted = []
        for _ in range(drafts):
            logits = self.model.propose(shown[None], self.caches)[:, -1, :]
            shown, _, _, state = states[-1].draw(logits)
            drafted.append(shown)
            states.append(state.seen(shown))
        if not drafted:
            self.model.propose(shown[None], self.caches)
            eval_states(self.caches, wait=False)
        logits = self.model.verify(mx.concatenate([fed, *drafted])[None], self.caches)
        if self._draws.guide is not None:  # the device computes them while the masks are computed
            mx.async_eval(logits)  # type: ignore[no-untyped-call]
        tokens, logprobs, finite, after = zip(
            *(state.draw(logits[:, i, :]) for i, state in enumerate(states)), strict=True
        )
        guesses = mx.concatenate(drafted) if drafted else mx.array([], mx.uint32)
        sound = mx.concatenate(list(finite))
        self._flight = _Flight(mx.concatenate(list(tokens)), logprobs, sound, after, guesses)
        contexts = [state.context for state in after if state.context is not None]
        mx.async_eval(self._flight.tokens, logprobs, sound, guesses, contexts)  # type: ignore[no-untyped-call]
