"""Models, samplers and parsers that raise when told to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from copy import copy
from typing import Any

import mlx.core as mx

from mlxcache.scheduling.task import Task
from mlxcache.types import Piece
from tests.scheduled import Bench, PlainParser


class Fault(Exception):
    """Raised on purpose."""


class FaultyModel:
    """A model that raises in its third layer, when the first two have written to their caches.

    `when` is asked before each pass, with its tokens, shape (rows, n). `passes` counts them.
    `error` is what it raises. `poison` is asked too: the rows for which that layer is to compute no
    numbers; and `late`: whether it is to raise only when it is evaluated.
    """

    def __init__(self, model: Any):
        self._model = model
        self._armed = False
        self.passes = 0
        self.error: Exception = Fault("half way")
        self.when: Callable[[mx.array], bool] = lambda tokens: False
        self.poison: Callable[[mx.array], list[int]] = lambda tokens: []
        self._poisoned: list[int] = []
        self.late: Callable[[mx.array], bool] = lambda tokens: False
        self._late = False
        layers = getattr(model, "language_model", model).model.layers
        layers[2] = _FaultyLayer(layers[2], self)

    def __call__(self, tokens: mx.array, **kwargs: Any) -> mx.array:
        self.passes += 1
        self._armed = self.when(tokens)
        self._poisoned = self.poison(tokens)
        self._late = self.late(tokens)
        return self._model(tokens, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def check(self) -> None:
        """Raise if this pass is to."""
        if self._armed:
            raise copy(self.error)  # one that is raised again keeps the frames of all times

    def spoil(self, hidden: mx.array) -> mx.array:
        """What the layer computes in this pass, shape (rows, n, size)."""
        if self._late:
            return hidden + uncomputable().astype(hidden.dtype)
        if not self._poisoned:
            return hidden
        return hidden.at[mx.array(self._poisoned)].multiply(mx.array(float("nan"), hidden.dtype))


class _FaultyLayer:
    def __init__(self, layer: Any, owner: FaultyModel):
        self._layer = layer
        self._owner = owner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._owner.check()
        return self._owner.spoil(self._layer(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def faulty(bench: Bench) -> FaultyModel:
    """Put a model that can raise in the place of `bench`'s own."""
    bench.model = FaultyModel(bench.model)
    bench.use(bench.kv)
    return bench.model


class FaultyParser(PlainParser):
    """A parser that raises at its `at`-th token, or at the end."""

    def __init__(self, at: int | None):
        self.at = at
        self.fed = 0

    def feed(self, token: int) -> list[Piece]:
        self.fed += 1
        if self.fed == self.at:
            raise Fault("unreadable")
        return super().feed(token)

    def finish(self, reason: Any) -> list[Piece]:
        if self.at is None:
            raise Fault("no end")
        return []


def raise_at(task: Task, count: int) -> None:
    """Let the task's sampler raise when it is called for the `count`-th time from now."""
    assert task.output is not None
    row = task.output.row
    inner, calls = row.sampler, iter(range(1, 1 << 30))

    def sampler(logprobs: mx.array) -> mx.array:
        if next(calls) == count:
            raise Fault("no choice")
        return inner(logprobs)

    row.sampler = sampler


def uncomputable() -> mx.array:
    """A scalar 0 that raises RuntimeError whenever it is evaluated."""
    made: list[mx.array] = []

    def work() -> None:
        # a stream belongs to the thread that made it, and is gone with it
        made.append(mx.add(mx.zeros(()), 0.0, stream=mx.new_stream(mx.cpu)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return made[0]
