"""The recurrence of linear layers in one pass, recorded so that its state after any token is known.

The inputs of the recurrence are small and are kept; the state after a token is computed from them
and the state before the pass, without reading a weight. MLX thread only.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import ArraysCache

from mlxcache.model import kv
from mlxcache.model.adapters import composed, parts_of
from mlxcache.model.kv import Caches, Layout

log = logging.getLogger("mlxcache.engine")

_ALIKE = 0.05
"""Largest difference of a recomputed state, relative to the state; wrong ones differ by about 1."""

StateAfter = Callable[[int], mx.array]


class Tape:
    """What the linear layers did in one pass over `tokens` tokens, of one sequence."""

    def __init__(self, tokens: int):
        self.tokens = tokens
        self.slots: list[RecordedSlot] = []
        self._states: dict[int, tuple[mx.array, StateAfter]] = {}

    def note_state(self, state: mx.array, after: StateAfter) -> None:
        self._states[id(state)] = state, after  # holding it keeps the id its own

    def origin(self, state: mx.array) -> StateAfter | None:
        return self._states.get(id(state), (state, None))[1]

    def end_at(self, count: int) -> None:
        """Set the slots to their state after the first `count` tokens of the pass, lazily."""
        for slot in self.slots:
            slot.end_at(count)


class RecordedSlot:
    """The cache of a linear layer while a pass is recorded.

    `lengths` makes the layer keep the window of its convolution before each token and at the end,
    in place of one for each row of a batch.
    """

    def __init__(self, slot: ArraysCache, tape: Tape):
        self._slot = slot
        self._tape = tape
        self._after: dict[int, StateAfter] = {}
        self.lengths = mx.arange(tape.tokens + 1)
        tape.slots.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._slot, name)

    def __getitem__(self, index: int) -> mx.array:
        found: mx.array = self._slot[index]
        return found

    def __setitem__(self, index: int, value: mx.array) -> None:
        after = self._tape.origin(value)
        if after is None and value.shape[0] == self._tape.tokens + 1:
            windows, value = value, value[-1:]

            def after(count: int) -> mx.array:
                return windows[count : count + 1]

        if after is not None:
            self._after[index] = after
        self._slot[index] = value

    def make_mask(self, tokens: int) -> None:
        """No token of the row is padding."""

    def advance(self, tokens: int) -> None:
        """The slot itself counts no positions."""

    def end_at(self, count: int) -> None:
        """Raises KeyError for an array whose origin is not known."""
        for index in range(len(self._slot.cache)):
            self._slot[index] = self._after[index](count)


class Recorder:
    """Feeds a model, and records what its linear layers do."""

    def __init__(self, model: nn.Module):
        used = {type(module).__module__ for module in model.modules()}
        loaded = (sys.modules[name] for name in sorted(used))
        self._modules = [module for module in loaded if hasattr(module, "gated_delta_update")]

    def feed(
        self, model: Any, tokens: mx.array, caches: Caches, **inputs: mx.array
    ) -> tuple[mx.array, Tape]:
        """Feed `tokens`, shape (1, n); return the logits, and the pass as recorded."""
        tape = Tape(tokens.shape[1])
        recorded = [_recorded(cache, tape) for cache in caches]
        with _replaced(self._modules, tape):
            logits: mx.array = model(tokens, cache=recorded, **inputs)
        return logits, tape


def _recorded(cache: Any, tape: Tape) -> Any:
    if (parts := parts_of(cache)) is not None:
        return composed(cache, [_recorded(part, tape) for part in parts])
    return RecordedSlot(cache, tape) if type(cache) is ArraysCache else cache


@contextmanager
def _replaced(modules: Sequence[Any], tape: Tape) -> Iterator[None]:
    """Let the layers of `modules` call a function that records, until the pass has been built."""
    before = [(module, module.gated_delta_update) for module in modules]
    try:
        for module, update in before:
            module.gated_delta_update = _recording(update, tape)
        yield
    finally:
        for module, update in before:
            module.gated_delta_update = update


def _recording(update: Callable[..., Any], tape: Tape) -> Callable[..., Any]:
    def recorded(
        q: mx.array, k: mx.array, v: mx.array, a: mx.array, b: mx.array, *rest: Any, **options: Any
    ) -> Any:
        rows = (q, k, v, a, b)  # shape (1, n, ...)

        def after(count: int) -> mx.array:
            state: mx.array = update(*(row[:, :count] for row in rows), *rest, **options)[1]
            return state

        out, state = update(*rows, *rest, **options)
        tape.note_state(state, after)
        return out, state

    return recorded


def recorder_of(model: Any, layout: Layout) -> Recorder | None:
    """Return a recorder if recomputed states of `model` are right, which a few passes check."""
    if not (layout.recurrent and isinstance(model, nn.Module)):
        return None
    recorder = Recorder(model)
    ids = mx.arange(1, 8)[None]
    plain, cut = layout.make(), layout.make()
    try:
        for caches in (plain, cut):
            model(ids[:, :3], cache=caches)
        model(ids[:, 3:5], cache=plain)
        _, tape = recorder.feed(model, ids[:, 3:], cut)
        tape.end_at(2)
        return recorder if _alike(plain, cut) else None
    except (TypeError, ValueError, AttributeError, RuntimeError, IndexError, KeyError) as error:
        log.debug("states of this model's linear layers cannot be recomputed: %r", error)
        return None


def _alike(one: Caches, other: Caches) -> bool:
    pairs = [
        (mine, theirs)
        for slot, twin in zip(kv.flatten(one), kv.flatten(other), strict=True)
        if type(slot) is ArraysCache
        for mine, theirs in zip(slot.cache, twin.cache, strict=True)
    ]
    for mine, theirs in pairs:
        error, size = (mx.abs(x.astype(mx.float32)).max() for x in (mine - theirs, mine))
        if mine.shape != theirs.shape or not (error <= _ALIKE * size).item():
            return False
    return bool(pairs)
