"""Cache layout of a model: its slots, how each can be reused, and their sizes.

A slot is the cache object of a layer, or of a part of one. It is linear (rows for every position,
token axis -2, so any range of positions can be sliced out) or opaque (a state that stands for
exactly one position, and needs checkpoints); `adapters` decides by class. A model with an unknown
class is served, but nothing of it is cached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.model import device
from mlxcache.model.adapters import Checkpointed, Sliced, adapter_of, class_name, parts_of, prepared
from mlxcache.model.arrays import (
    copied_tree,
    either,
    held_tree,
    spec_tree,
    tree_arrays,
    varies,
)
from mlxcache.model.lockstep import ALONE, Lockstep
from mlxcache.model.quantise import quantised

Caches = list[Any]
"""One cache object per layer, in the form in which a model takes them as `cache`."""

State = tuple[Any, ...]
"""States of the opaque slots at one position: nested tuples of arrays, numbers and None."""


def flatten(caches: Sequence[Any]) -> list[Any]:
    """Return the slots of `caches` in a fixed order, with composite caches split into members."""
    slots: list[Any] = []
    for cache in caches:
        parts = parts_of(cache)
        slots += [cache] if parts is None else flatten(parts)
    return slots


def make_caches(model: Any) -> Caches:
    """Create empty caches for one sequence of `model`.

    They are those of mlx-lm, some of them replaced by `adapters.prepared`: that of a sliding window
    by a `WindowCache`, which keeps every position.
    """
    caches = make_prompt_cache(model)
    layers = list(getattr(model, "layers", ()))
    if len(layers) != len(caches):
        layers = [None] * len(caches)
    return [prepared(*pair) for pair in zip(caches, layers, strict=True)]


def sliced(slot: Any) -> Sliced:
    """Return the adapter of a linear slot. Raises TypeError for any other slot."""
    adapter = adapter_of(slot)
    if not isinstance(adapter, Sliced):
        raise TypeError(f"a {type(slot).__name__} is not sliced")
    return adapter


def first_write(slots: Sequence[Any]) -> int:
    """Return how many tokens empty `slots` must be fed before every linear slot has its arrays.

    It is 1, except for slots that get nothing before a group of several tokens is complete.
    """
    found = ((slot, adapter_of(slot)) for slot in slots)
    return max((a.first_write(slot) for slot, a in found if isinstance(a, Sliced)), default=1)


def arrays_of(slot: Any) -> list[mx.array]:
    """Return the arrays of a linear slot, shape (1, heads, capacity, dim) each."""
    return sliced(slot).arrays(slot)


def set_arrays(slot: Any, arrays: Sequence[mx.array], offset: int) -> None:
    """Set the arrays of a linear slot, and its length to `offset` positions."""
    adapter = sliced(slot)
    for index, array in enumerate(arrays):
        adapter.put(slot, index, array)
    adapter.end_at(slot, offset)


def set_offset(slot: Any, offset: int) -> None:
    """Set the length of a linear slot to `offset` positions; later ones will be overwritten."""
    sliced(slot).end_at(slot, offset)


def opaque_slots(slots: Sequence[Any]) -> list[Any]:
    """Return the opaque slots among `slots`."""
    return [slot for slot in slots if isinstance(adapter_of(slot), Checkpointed)]


def _checkpointed(slots: Sequence[Any]) -> list[tuple[Any, Checkpointed]]:
    """Return the opaque slots among `slots`, each with its adapter."""
    found = ((slot, adapter_of(slot)) for slot in slots)
    return [(slot, adapter) for slot, adapter in found if isinstance(adapter, Checkpointed)]


def _set_states(slots: Sequence[Any], states: State) -> None:
    """Set the states of the opaque slots to evaluated `states`, without a copy.

    The caller must not write to `states` afterwards.
    """
    for (slot, adapter), new in zip(_checkpointed(slots), states, strict=True):
        adapter.set_state(slot, new)


def _needed(slots: Sequence[Any]) -> list[Any]:
    return [adapter.state(slot) for slot, adapter in _checkpointed(slots)]


def state_bytes(slots: Sequence[Any]) -> int:
    """Return the bytes that a copy of the states of all opaque slots would take."""
    return sum(a.nbytes for a in tree_arrays(_needed(slots)))


def capture(slots: Sequence[Any]) -> State:
    """Copy the states of the opaque slots into buffers of their own, and evaluate the copies."""
    state = tuple(copied_tree(held) for held in _needed(slots))
    mx.eval(tree_arrays(state))
    return state


def restore(slots: Sequence[Any], state: State | None) -> None:
    """Copy `state`, a result of `capture`, into the opaque slots.

    With None the slots stay as they are, empty in new caches.
    """
    if state is None:
        return
    fresh = tuple(copied_tree(saved) for saved in state)
    # evaluated now: a lazy copy keeps alive the buffer that its original is a view of
    mx.eval(tree_arrays(fresh))
    _set_states(slots, fresh)


def hold(slots: Sequence[Any]) -> State:
    """Return references to the states of the opaque slots, without a copy.

    While the model is fed, they stay valid only if `Layout.rewinds`.
    """
    return tuple(held_tree(state) for state in _needed(slots))


def put_back(slots: Sequence[Any], state: State) -> None:
    """Set the opaque slots to `state`, a result of `hold`, without a copy."""
    _set_states(slots, state)


def are_sound(states: State) -> bool:
    """Evaluate `states` of opaque slots, and return whether that succeeded.

    Returns False if a failed pass left arrays that cannot be computed. If the device fails instead,
    its error is raised.
    """
    try:
        mx.eval(tree_arrays(states))
    except (RuntimeError, ValueError) as error:
        if device.is_device_error(error):
            raise
        return False
    return True


def pretend(slots: Sequence[Any], likes: State, position: int) -> None:
    """Set the opaque slots to made-up states at `position`, to measure a pass from there.

    Their shapes are right, their values arbitrary. `likes`: `Layout.states`. A slot whose state has
    the same size at every position stays as it is.
    """
    for (slot, adapter), like in zip(_checkpointed(slots), likes, strict=True):
        made = adapter.blank(like, position)
        if made is not None:
            adapter.set_state(slot, made)


def settle(slots: Sequence[Any]) -> None:
    """Copy the states of the opaque slots into buffers of their own.

    A model may leave views in the slots that keep the input of a whole chunk in memory.
    """
    _set_states(slots, capture(slots))


def eval_states(caches: Sequence[Any], *, wait: bool = True) -> None:
    """Evaluate all arrays of `caches`.

    With `wait` False, start the evaluation and return at once.
    """
    arrays = tree_arrays([slot.state for slot in flatten(caches)])
    if wait:
        mx.eval(arrays)
    else:
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Layout:
    """Cache layout of one model.

    `make`: returns empty caches for one sequence. `vocab_size`: number of logits.
    `bytes_per_token`: KV bytes of one position in all linear slots. `checkpoint_bytes`: maximum
    bytes of the states of all opaque slots at one position. `running_bytes`: maximum bytes that
    the opaque slots hold while the model is fed. `linear`: indices, in the order of `flatten`,
    of the linear slots that the model fills. `specs`: for each of those, (heads, dim, dtype) of
    its arrays. `windows`: for each of those, its sliding window in tokens, or None.
    `checkpointed`: adapters of the opaque slots. `batchable`: several sequences can be fed as a
    batch. `states`: the form of a checkpoint, as nested tuples like those that `kv.capture`
    returns, with an ArraySpec in place of each array. `unknown`: names of cache classes without
    an adapter; such a model is not cached. `foreign`: names of cache classes that mlx-lm cannot
    read from a prompt cache file. `stateful`: another rank has opaque slots, so that
    checkpoints are needed. `lockstep`: the object that is told every operation on KV of this
    layout, so that other ranks repeat it.
    """

    make: Callable[[], Caches]
    vocab_size: int
    bytes_per_token: int
    checkpoint_bytes: int
    running_bytes: int
    linear: tuple[int, ...]
    specs: tuple[tuple[tuple[int, int, Any], ...], ...]
    checkpointed: tuple[Checkpointed, ...]
    batchable: bool
    windows: tuple[int | None, ...]
    states: State
    unknown: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    stateful: bool = False
    lockstep: Lockstep = ALONE

    @property
    def cacheable(self) -> bool:
        """True if KV of the model can be reused, which takes an adapter for every cache class."""
        return not self.unknown

    @property
    def opaque(self) -> bool:
        """True if this or another rank has opaque slots, whose reuse takes checkpoints."""
        return bool(self.checkpointed) or self.stateful

    @property
    def rewinds(self) -> bool:
        """True if the newest positions can be taken back, on this rank and without telling others.

        To do so, opaque slots are set to what `hold` returned before these positions were fed.
        """
        if self.lockstep.divided:
            return False
        return self.cacheable and all(adapter.rewinds for adapter in self.checkpointed)

    @property
    def window(self) -> int | None:
        """Size of the smallest sliding window in tokens, or None if there is none."""
        return min((w for w in self.windows if w is not None), default=None)

    @property
    def longest_window(self) -> int:
        """Size of the largest sliding window in tokens, or 0 if there is none."""
        return max((w for w in self.windows if w is not None), default=0)

    @property
    def window_bytes(self) -> int:
        """Bytes of one position in the linear slots with a sliding window."""
        pairs = zip(self.specs, self.windows, strict=True)
        return sum(h * d * t.size for spec, window in pairs if window for h, d, t in spec)

    @property
    def widest(self) -> int:
        """Bytes of one position in the largest array of the linear slots; 0 if they have none."""
        return max((h * d * t.size for spec in self.specs for h, d, t in spec), default=0)

    def row_bytes(self, length: int) -> int:
        """Return the bytes of one sequence in a batch that is padded to `length` positions.

        That is the KV of `length` positions in each layer (at most the window's in a layer with a
        sliding window) and the states of all opaque slots.
        """
        total = self.checkpoint_bytes
        for spec, window in zip(self.specs, self.windows, strict=True):
            held = length if window is None else min(length, window)
            total += held * sum(h * d * t.size for h, d, t in spec)
        return total


def most_bytes(slot: Any, adapter: Checkpointed) -> int:
    """Return an upper bound of the bytes of an opaque slot's state, for any length of text."""
    most = adapter.most_bytes(slot)
    return state_bytes([slot]) if most is None else most


def running_bytes(slot: Any, adapter: Checkpointed) -> int:
    """Return an upper bound of the bytes that an opaque slot holds while the model is fed.

    It may be more than the state that a checkpoint copies, for which see `most_bytes`.
    """
    most = adapter.running_bytes(slot)
    return most_bytes(slot, adapter) if most is None else most


def _row_specs(arrays: Sequence[mx.array]) -> tuple[tuple[int, int, Any], ...]:
    return tuple((a.shape[1], a.shape[3], a.dtype) for a in arrays)


def survey(model: Any, *, kv_bits: int | None = None, evaluate: bool = True) -> Layout:
    """Determine the cache layout of a model by feeding it a few tokens.

    `kv_bits`: bits of quantised KV, None for plain KV. Without `evaluate` nothing is computed and
    no lazy weight is read, because shapes suffice. Raises ModelError if KV cannot be quantised, and
    any error of the model itself.
    """
    make: Callable[[], Caches] = partial(make_caches, model)
    if kv_bits is not None:
        make = quantised(model, make, kv_bits, compare=evaluate)
    caches = make()
    slots = flatten(caches)
    adapters = [adapter_of(slot) for slot in slots]
    logits, early = _feed(model, caches, 2, evaluate)
    _, late = _feed(model, caches, max(6, first_write(slots)), evaluate)
    linear = [
        (i, slot, adapter)
        for i, (slot, adapter) in enumerate(zip(slots, adapters, strict=True))
        if isinstance(adapter, Sliced) and adapter.filled(slot)
    ]
    specs = tuple(_row_specs(adapter.arrays(slot)) for _, slot, adapter in linear)
    opaque = _checkpointed(slots)
    states = either(early, late)
    return Layout(
        make=make,
        vocab_size=logits.shape[-1],
        bytes_per_token=sum(h * d * t.size for spec in specs for h, d, t in spec),
        checkpoint_bytes=sum(most_bytes(*pair) for pair in opaque),
        running_bytes=sum(running_bytes(*pair) for pair in opaque),
        linear=tuple(i for i, _, _ in linear),
        specs=specs,
        checkpointed=tuple(adapter for _, adapter in opaque),
        batchable=not varies(states) and all(a is not None and a.batchable for a in adapters),
        windows=tuple(adapter.window(slot) for _, slot, adapter in linear),
        states=states,
        unknown=tuple(sorted({class_name(s) for s in slots if adapter_of(s) is None})),
        foreign=tuple(sorted({a.name for a in adapters if a is not None and not a.portable})),
    )


def _feed(model: Any, caches: Caches, tokens: int, evaluate: bool) -> tuple[mx.array, State]:
    """Feed `model` a prompt of `tokens` tokens with id 0, and return the logits and specs.

    With `evaluate`, its caches are evaluated afterwards. The specs are the opaque slots' states,
    with an ArraySpec for each array.
    """
    logits = model(mx.zeros((1, tokens), mx.int32), cache=caches)
    if evaluate:
        eval_states(caches)
    opaque = _checkpointed(flatten(caches))
    return logits, tuple(spec_tree(a.state(slot), a.growing) for slot, a in opaque)
