"""Decoding: one pipelined step of a single lineage in place, or of a batch of rows.

When a token is handed out, the forward pass that feeds it is already running. The KV therefore
always includes every token that was handed out.

Batches use mlx-lm's batch caches but not its `BatchGenerator`, which copies the KV three times when
a row joins, and drops the token sampled ahead when a row leaves. MLX thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx.nn import Module

from mlxcache.errors import GenerationFailed
from mlxcache.model import device
from mlxcache.model import rows as batches
from mlxcache.model.guidance.guide import Bitmask, Guide
from mlxcache.model.guidance.thinking import Steering
from mlxcache.model.kv import Caches
from mlxcache.model.lineage import Lineage
from mlxcache.model.sampling import Processor, Sampler, masked

WAIT_BYTES = 32 << 20
"""Bytes of KV from which a pass waits for the one before it.

An estimate, not measured on a GPU: copying fewer may cost less than leaving the device idle while
the step's first operations are encoded.
"""


class NonFiniteOutput(GenerationFailed):
    """The model produced NaN or infinity, which its cache may contain then."""

    def __init__(self) -> None:
        super().__init__("The model produced NaN: nothing of this reply is kept.")


@dataclass(slots=True)
class DecoderRow:
    """One sequence in a decoder: its sampler, logits processors and guide.

    `context`: all of its token ids so far, shape (n,), kept only if there are processors. `error`:
    an exception of its sampler, a processor or its guide, or NonFiniteOutput; the reply ends with
    it. `guide` has accepted every token that was handed out and, if `guided`, the pending one too.
    `steering`: a change of the guide that is not applied yet. `shift`: see `positions.shift_of`.
    """

    sampler: Sampler
    processors: Sequence[Processor]
    context: mx.array | None
    error: Exception | None = None
    id: str = "no request"
    guide: Guide | None = None
    guided: bool = False
    steering: Steering | None = None
    shift: int = 0

    def steer(self, steering: Steering) -> None:
        """Schedule a change of the guide, for the first token that is not drawn yet."""
        self.steering = steering

    def apply_steering(self) -> None:
        if self.steering is not None:
            self.guide, self.steering = self.steering(self.guide), None

    def fail(self, error: Exception) -> None:
        self.error = error

    def trial(self) -> DecoderRow:
        """Return a copy of this row for draws behind guessed tokens, which may be wrong.

        An exception in its sampler, a processor or its guide is recorded in the copy only. If the
        guessed tokens are right, the row itself draws again and records its own exceptions.
        """
        return DecoderRow(self.sampler, self.processors, self.context, guide=self.guide)

    def set_context(self, context: mx.array) -> None:
        self.context = context

    def set_draws(self, sampler: Sampler, context: mx.array | None) -> None:
        """Set the sampler and context back, so that a second try draws the same tokens."""
        self.sampler, self.context = sampler, context

    def allowed_after(self, token: int | None) -> Bitmask | None:
        if token is not None and not self.guided:
            self.guided = self.advance(self.guide, token)
        return self.allowed(self.guide)

    def allowed(self, guide: Guide | None) -> Bitmask | None:
        """Return the mask of tokens that `guide` allows next; None allows all."""
        if guide is None or self.error is not None:
            return None
        try:
            return guide.mask()
        except Exception as error:  # noqa: BLE001 - logged as the request fails
            self.error = error
            return None

    def advance(self, guide: Guide | None, token: int) -> bool:
        """Advance `guide` by a drawn token; return False without a guide, or after an error."""
        if guide is None or self.error is not None:
            return False
        try:
            guide.accept(token)
        except Exception as error:  # noqa: BLE001 - logged as the request fails
            self.error = error
            return False
        return True

    def resume(self, sampler: Sampler, context: mx.array | None, guide: Guide | None) -> None:
        """Let the next draw continue from these, which lack the newest, pending token."""
        self.sampler, self.context, self.guide = sampler, context, guide
        self.guided = False

    def note_drawn(self) -> None:
        self.guided = False


@dataclass(frozen=True, slots=True)
class Drawn:
    """A drawn token of `row` with its log-probabilities, shape (vocabulary,)."""

    row: DecoderRow
    token: int
    logprobs: mx.array


class Pending(NamedTuple):
    """A token for each row that was drawn and not handed out yet; the first axis is the rows."""

    tokens: mx.array
    logprobs: mx.array
    finite: mx.array


class Decoder:
    """Steps rows together over `caches`: the caches of a single lineage, or merged batch caches.

    `pending`: None before `start`. `nbytes()` returns the bytes of KV that a step reads and writes
    to.
    """

    def __init__(
        self,
        model: Module,
        rows: list[DecoderRow],
        caches: Caches,
        nbytes: Callable[[], int],
    ):
        self.model = model
        self.rows = rows
        self.caches = caches
        self._nbytes = nbytes
        self.pending: Pending | None = None

    @staticmethod
    def of_lineage(model: Module, row: DecoderRow, lineage: Lineage) -> Decoder:
        return Decoder(model, [row], lineage.caches, lambda: lineage.nbytes)

    def start(self, inputs: Sequence[int]) -> None:
        self._advance(mx.array(list(inputs), mx.int32))

    def peek(self) -> list[list[Drawn]]:
        """Return what the next `step` hands out first, once the pass that drew it has ended."""
        assert self.pending is not None
        return self._drawn(self.pending)

    def step(self) -> list[list[Drawn]]:
        """Return a list for each row, with its pending token; start the pass that feeds these.

        A list is empty if the logits were not finite. A step that failed can be repeated.
        """
        pending = self.pending
        assert pending is not None
        before = [(copy(row.sampler), row.context) for row in self.rows]
        try:
            self._advance(pending.tokens)
            return self._drawn(pending)
        except BaseException:  # a second try must draw the same tokens
            self.pending = pending
            for row, (sampler, context) in zip(self.rows, before, strict=True):
                row.set_draws(sampler, context)
            raise

    def joined(
        self, others: Sequence[Decoder], nbytes: Callable[[], int], *, batched: bool
    ) -> Decoder:
        """Return a decoder with the rows of all, in this order, over a batch with copies of the KV.

        `batched`: this decoder's caches are a batch already. Raises what a failed copy raises.
        """
        every = [self, *others]
        caches = batches.join(self.caches, [one.caches for one in others], batched=batched)
        joint = self._over([row for one in every for row in one.rows], caches, nbytes)
        joint._set_pending(_joined([one.pending for one in every]))
        return joint

    def _over(self, rows: list[DecoderRow], caches: Caches, nbytes: Callable[[], int]) -> Decoder:
        return Decoder(self.model, rows, caches, nbytes)

    def append_row(self, row: int, lineage: Lineage, count: int) -> None:
        """Append the newest `count` positions of a batch row to its lineage, with its state."""
        linear, opaque = batches.row_tail(lineage.layout, self.caches, row, count)
        before = lineage.length
        try:
            lineage.append(linear, count)
            lineage.go_on_to(opaque)
        except BaseException:  # KV and state stay those of one position
            lineage.truncate(before)
            raise

    def alone(self, row: int, lineage: Lineage) -> Decoder:
        """Return a decoder of the row with index `row`, over the caches of its own lineage."""
        own = self.of_lineage(self.model, self.rows[row], lineage)
        own._take(self, slice(row, row + 1))
        return own

    def keep(self, rows: list[int]) -> None:
        """Drop all rows of a batch except those with the given indices."""
        batches.keep_rows(self.caches, rows)
        self._take(self, mx.array(rows))
        self.rows = [self.rows[i] for i in rows]

    def drop(self) -> None:
        """Drop the batch; the decoder must not be used any more."""
        self.caches, self.pending = [], None

    def _take(self, other: Decoder, rows: slice | mx.array) -> None:
        if other.pending is not None:
            self._set_pending(Pending(*(each[rows] for each in other.pending)))

    def _set_pending(self, pending: Pending) -> None:
        """Set the pending tokens; on a GPU, start to evaluate them at once.

        A GPU reports errors late. Without this start the tokens would be evaluated with the next
        pass, and fail with it.
        """
        if device.defers_errors():
            mx.async_eval(*pending)  # type: ignore[no-untyped-call]
        self.pending = pending

    @property
    def places(self) -> dict[str, mx.array]:
        """The model's keyword arguments that correct the positions of the rows' next tokens."""
        shifts = [row.shift for row in self.rows]
        return {"shift": mx.array(shifts)} if any(shifts) else {}

    @property
    def writes(self) -> int:
        """Maximum number of times that the next step writes to one KV buffer."""
        return 1

    @property
    def feeds(self) -> int:
        """Number of tokens of each row that the next step adds to the KV for good."""
        return 1

    def _drawn(self, pending: Pending) -> list[list[Drawn]]:
        values, sound = self._read(pending)
        return [
            [Drawn(row, values[i], pending.logprobs[i])] if sound[i] else []
            for i, row in enumerate(self.rows)
        ]

    def _read(self, pending: Pending) -> tuple[list[int], list[bool]]:
        """Return the tokens, and which are sound: rows with logits that are not finite fail."""
        values, sound = np.asarray(pending.tokens).tolist(), np.asarray(pending.finite).tolist()
        for row, is_sound in zip(self.rows, sound, strict=True):
            if not is_sound:
                row.fail(row.error or NonFiniteOutput())
        return values, sound

    def _advance(self, inputs: mx.array) -> None:
        logits = self.model(inputs[:, None], cache=self.caches, **self.places)[:, -1, :]
        for row in self.rows:
            row.apply_steering()
        if any(row.processors for row in self.rows):
            logits = self._process(inputs, logits)
        begun = any(row.guide is not None for row in self.rows)
        if begun:
            logits = self._restrict(logits)
        logprobs, finite = normalised(logits)
        drawn = self._draw_all(logprobs)
        # without processors a context would grow into a chain of unevaluated arrays
        contexts = [row.context for row in self.rows if row.processors]
        evaluate = mx.async_eval if begun else self._begin
        evaluate(drawn, logprobs, finite, contexts)
        self.pending = Pending(drawn, logprobs, finite)
        for row in self.rows:
            row.note_drawn()

    def _restrict(self, logits: mx.array) -> mx.array:
        """Apply the guides' masks, computed on the CPU while the device computes `logits`."""
        self._begin(logits)
        after: Sequence[int | None] = [None] * len(self.rows)
        if self.pending is not None:
            after, _ = self._read(self.pending)
        masks = [row.allowed_after(token) for row, token in zip(self.rows, after, strict=True)]
        return masked(logits, masks) if any(mask is not None for mask in masks) else logits

    def _begin(self, *arrays: object) -> None:
        """Start to evaluate the arrays of a pass that has been built.

        With much KV, waits until the running pass has ended, on a device where it holds the KV
        buffers: they would be copied.
        """
        if device.holds_inputs() and self._nbytes() >= WAIT_BYTES:
            mx.synchronize()  # unlike `eval`, it waits until the pass has dropped its inputs too
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]

    def _draw_all(self, logprobs: mx.array) -> mx.array:
        """Draw the token of each row, as a lazy array of shape (rows,)."""
        first = self.rows[0].sampler
        if len(self.rows) > 1 and all(row.sampler is first for row in self.rows):
            return first(logprobs)
        return mx.concatenate([self._draw(i, logprobs) for i in range(len(self.rows))])

    def _draw(self, i: int, logprobs: mx.array) -> mx.array:
        """Draw the token of row `i`, shape (1,); on an exception, recorded in the row, token 0."""
        row = self.rows[i]
        try:
            return row.sampler(logprobs[i : i + 1])
        except Exception as error:  # noqa: BLE001 - logged as the request fails
            row.fail(error)
            return mx.zeros(1, mx.uint32)

    def _process(self, inputs: mx.array, logits: mx.array) -> mx.array:
        out = []
        for i, row in enumerate(self.rows):
            line = logits[i : i + 1]
            if row.processors:
                new = inputs[i : i + 1].astype(mx.int32)
                old = row.context
                context = new if old is None else mx.concatenate([old, new])
                row.set_context(context)
                line = processed(row, context, line)
            out.append(line)
        return mx.concatenate(out)


Decode = Callable[[Any, DecoderRow, Lineage], Decoder]
"""Makes the decoder of one row over the caches of its lineage."""


def normalised(logits: mx.array) -> tuple[mx.array, mx.array]:
    """Return the log-probabilities of `logits`, (rows, vocabulary), and which rows are finite."""
    sums = mx.logsumexp(logits, axis=-1, keepdims=True)
    return logits - sums, mx.isfinite(sums[:, 0])


def processed(row: DecoderRow, context: mx.array, logits: mx.array) -> mx.array:
    """Apply the row's processors to `logits`, shape (1, vocabulary), up to one that raises."""
    try:
        for process in row.processors:
            logits = process(context, logits)
    except Exception as error:  # noqa: BLE001 - logged as the request fails
        row.fail(error)
    return logits


def _joined(parts: Sequence[Pending | None]) -> Pending:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        raise ValueError("a decoder that was not started cannot be joined")
    return Pending(*(mx.concatenate(list(each)) for each in zip(*found, strict=True)))
