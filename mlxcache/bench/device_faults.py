"""Simulation of a device that fails without an error, as Metal does since MLX 0.32.

For tests in one process, on any machine. Evaluations that are chosen to fail leave wrong numbers in
their results and raise nothing. MLX's error comes once, at a later evaluation or at the next wait.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlxcache.model import device, kv
from mlxcache.model.adapters import Checkpointed, Sliced, adapter_of
from mlxcache.model.arrays import tree_arrays
from mlxcache.model.kv import Caches
from mlxcache.scheduling.decoder import Decoder

ERRORS = (
    "[METAL] Command buffer execution failed: Insufficient Memory "
    "(00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)",
    "[METAL] Command buffer execution failed: Impacting Interactivity "
    "(0000000e:kIOGPUCommandBufferCallbackErrorImpactingInteractivity)",
    "[METAL] Command buffer execution failed: Caused GPU Timeout Error "
    "(00000002:kIOGPUCommandBufferCallbackErrorTimeout)",
)

_eval = mx.eval  # that of the module may be a failing device's


class FailingDevice:
    """Replacement for MLX's evaluation functions in which chosen evaluations fail.

    `evaluations` counts the calls of `eval` and `async_eval` with arrays, without those that raised
    the error of an earlier one, and `failures` those of them that failed. The parameters are:

    - `picks(number)` returns whether the evaluation with that number, from 1 on, fails.
    - `delay` is how many calls of `eval` and `async_eval` after a failed one return before the
      next one raises its error, a RuntimeError. `synchronize` raises it at once.
    - `in_place`: a failed pass leaves wrong numbers only at the new positions of its KV buffers.
      Otherwise whole buffers are wrong, as if MLX had copied them first.
    - `nan`: the wrong numbers are NaN.
    - `dies`: after the first failure every later call of the three raises the error.
    """

    def __init__(
        self,
        picks: Callable[[int], bool],
        *,
        delay: int = 0,
        in_place: bool = True,
        message: str = ERRORS[0],
        nan: bool = False,
        dies: bool = False,
    ):
        self.evaluations = self.failures = 0
        self._picks = picks
        self._delay = delay
        self._in_place = in_place
        self._message = message
        self._nan = nan
        self._dies = dies
        self._parked: int | None = None
        self._fed: list[tuple[Caches, list[int]]] = []
        self._inputs: list[mx.array] = []
        self._async_eval, self._synchronize = mx.async_eval, mx.synchronize

    def watch(self, model: Any) -> WatchedModel:
        """Return a wrapper of `model` whose failed passes damage the KV buffers they write to."""
        return WatchedModel(model, self)

    def note_pass(self, caches: Caches, before: list[int]) -> None:
        """Record a pass over `caches`, whose linear slots had these lengths."""
        self._fed.append((caches, before))

    def note_inputs(self, inputs: mx.array) -> None:
        """Record that the next evaluation also computes `inputs`, the ids that a step feeds."""
        self._inputs.append(inputs)

    def eval(self, *args: Any) -> None:
        self._evaluate(_eval, args)

    def async_eval(self, *args: Any) -> None:
        self._evaluate(self._async_eval, args)

    def synchronize(self, *args: Any) -> None:
        self._synchronize(*args)
        self._raise_parked(now=True)

    def _raise_parked(self, *, now: bool) -> None:
        if self._dies and self.failures:
            raise RuntimeError(self._message)
        if self._parked is None:
            return
        if self._parked and not now:
            self._parked -= 1
            return
        self._parked = None
        raise RuntimeError(self._message)

    def _evaluate(self, evaluate: Callable[..., None], args: Sequence[Any]) -> None:
        results = tree_arrays(list(args))
        if not results:
            return
        self._raise_parked(now=False)
        self.evaluations += 1
        fed, self._fed = self._fed, []
        inputs, self._inputs = self._inputs, []
        picked = self._picks(self.evaluations)
        computed = [a for a in [*inputs, *results] if _is_lazy(a)] if picked else []
        if not computed:  # nothing that can fail is computed
            evaluate(*args)
            return
        self.failures += 1
        _eval(*args)
        self._damage(computed, fed)
        if self._parked is None:
            self._parked = self._delay

    def _damage(self, results: list[mx.array], fed: list[tuple[Caches, list[int]]]) -> None:
        """Overwrite the results of a failed evaluation, and the KV and states of passes in it."""
        buffers = [
            (array, start, slot.offset)
            for caches, before in fed
            for slot, start in zip(_linear(caches), before, strict=True)
            for array in kv.arrays_of(slot)
        ]
        states = [
            slot.state
            for caches, _ in fed
            for slot in kv.flatten(caches)
            if isinstance(adapter_of(slot), Checkpointed)
        ]
        kept = {id(array) for array, *_ in buffers}
        for array in [*results, *tree_arrays(states)]:
            if id(array) not in kept and array.size:
                self._overwrite(array, ..., copied=True)
        for array, start, end in buffers:
            first, last = (start, end) if self._in_place else (0, array.shape[2])
            if first < last:
                part = (..., slice(first, last), slice(None))
                self._overwrite(array, part, copied=not self._in_place)

    def _overwrite(self, array: mx.array, part: Any, *, copied: bool) -> None:
        """Overwrite a part; `copied`: in a new buffer, as when another array shares the old one."""
        wrong = _wrong(array[part], nan=self._nan)
        reader = array[...] if copied else None
        _eval(wrong, reader)
        array[part] = wrong
        _eval(array)


class WatchedModel:
    def __init__(self, model: Any, failing: FailingDevice):
        self._model = model
        self._failing = failing

    def __call__(self, tokens: mx.array, *, cache: Caches, **inputs: Any) -> mx.array:
        before = [slot.offset for slot in _linear(cache)]
        logits: mx.array = self._model(tokens, cache=cache, **inputs)
        self._failing.note_pass(cache, before)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def _is_lazy(array: mx.array) -> bool:
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return "shape=rectangle" in graph.getvalue()


def _linear(caches: Caches) -> list[Any]:
    return [
        slot
        for slot in kv.flatten(caches)
        if isinstance(adapter_of(slot), Sliced) and isinstance(slot.offset, int)
    ]


def _wrong(array: mx.array, *, nan: bool) -> mx.array:
    """Return an array with other numbers; booleans are unchanged, and integers never NaN."""
    if array.dtype == mx.bool_:
        return mx.array(array)
    if mx.issubdtype(array.dtype, mx.integer):
        return mx.where(array == 1, 2, 1).astype(array.dtype)
    return mx.full_like(array, mx.nan) if nan else (0.25 - 0.5 * array).astype(array.dtype)


@contextmanager
def failing(on: FailingDevice) -> Iterator[FailingDevice]:
    """Fail MLX's evaluations as `on` does while the block runs. Only one thread may use MLX."""
    advance = Decoder._advance

    def advanced(decoder: Decoder, inputs: mx.array) -> None:
        on.note_inputs(inputs)
        advance(decoder, inputs)

    with (
        patch.object(Decoder, "_advance", advanced),
        patch.object(mx, "eval", on.eval),
        patch.object(mx, "async_eval", on.async_eval),
        patch.object(mx, "synchronize", on.synchronize),
        patch.object(device, "defers_errors", lambda: True),
    ):
        yield on
