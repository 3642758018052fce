"""Cache layout of a model: its slots, how each can be reused, and their sizes.

A slot is the cache object of a layer, or of a part of one, linear or opaque: see `adapters`. A
model with a class that is unknown there is served, but nothing of it is cached. MLX thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from mlxcache.model import device
from mlxcache.model.adapters import (
    Checkpointed,
    Sliced,
    adapter_of,
    class_name,
    parts_of,
    prepared,
    row_bytes,
)
from mlxcache.model.arrays import (
    copied_tree,
    either,
    held_tree,
    spec_tree,
    tree_arrays,
    varies,
)
from mlxcache.model.quantised import QuantisedCache, quantised

Caches = list[Any]
"""One cache object per layer, in the form in which a model takes them as `cache`."""

State = tuple[Any, ...]
"""States of the opaque slots at one position: nested tuples of arrays, numbers and None."""


def flatten(caches: Sequence[Any]) -> list[Any]:
    """Return the slots of `caches` in a fixed order, members of composite caches included."""
    slots: list[Any] = []
    for cache in caches:
        parts = parts_of(cache)
        slots += [cache] if parts is None else flatten(parts)
    return slots


def _unportable(caches: Sequence[Any]) -> set[str]:
    """Return the names of quantised caches that mlx-lm has no class for."""
    found = set()
    for cache in caches:
        if type(cache) is QuantisedCache:
            found |= {cache.name} if not cache.portable else set()
        else:
            found |= _unportable(parts_of(cache) or [])
    return found


def make_caches(model: Any) -> Caches:
    """Create empty caches for one sequence of `model`, some replaced by `adapters.prepared`."""
    caches = make_prompt_cache(model)
    layers = list(getattr(model, "layers", ()))
    if len(layers) != len(caches):
        layers = [None] * len(caches)
    return [prepared(*pair) for pair in zip(caches, layers, strict=True)]


def sliced(slot: Any) -> Sliced:
    adapter = adapter_of(slot)
    if not isinstance(adapter, Sliced):
        raise TypeError(f"a {type(slot).__name__} is not sliced")
    return adapter


def first_write(slots: Sequence[Any]) -> int:
    """Return how many tokens empty `slots` must be fed before every linear slot has its arrays."""
    found = ((slot, adapter_of(slot)) for slot in slots)
    return max((a.first_write(slot) for slot, a in found if isinstance(a, Sliced)), default=1)


def arrays_of(slot: Any) -> list[mx.array]:
    return sliced(slot).arrays(slot)


def set_arrays(slot: Any, arrays: Sequence[mx.array], offset: int) -> None:
    adapter = sliced(slot)
    for index, array in enumerate(arrays):
        adapter.put(slot, index, array)
    adapter.end_at(slot, offset)


def set_offset(slot: Any, offset: int) -> None:
    sliced(slot).end_at(slot, offset)


def _checkpointed(slots: Sequence[Any]) -> list[tuple[Any, Checkpointed]]:
    found = ((slot, adapter_of(slot)) for slot in slots)
    return [(slot, adapter) for slot, adapter in found if isinstance(adapter, Checkpointed)]


def _needed(slots: Sequence[Any]) -> list[Any]:
    return [adapter.state(slot) for slot, adapter in _checkpointed(slots)]


def nbytes(state: State) -> int:
    return sum(array.nbytes for array in tree_arrays(state))


def copied(state: State) -> State:
    """Copy `state` into buffers of its own, and evaluate the copies."""
    fresh = tuple(copied_tree(saved) for saved in state)
    # evaluated now: a lazy copy keeps alive the buffer that its original is a view of
    mx.eval(tree_arrays(fresh))
    return fresh


def restore(slots: Sequence[Any], state: State | None) -> None:
    """Copy `state` into the opaque slots; None leaves them as they are."""
    if state is not None:
        take_over(slots, copied(state))


def take_over(slots: Sequence[Any], state: State) -> None:
    """Evaluate `state` and set the opaque slots to it; nobody may write to it afterwards."""
    mx.eval(tree_arrays(state))
    for (slot, adapter), new in zip(_checkpointed(slots), state, strict=True):
        adapter.set_state(slot, new)


def states(slots: Sequence[Any]) -> State:
    """Return references to the states of the opaque slots, without a copy."""
    return tuple(map(held_tree, _needed(slots)))


def hold(slots: Sequence[Any]) -> State:
    """Return what `put_back` needs to return to this position, without a copy.

    While the model is fed, it stays valid only if `Layout.rewinds`.
    """
    return tuple(adapter.hold(slot) for slot, adapter in _checkpointed(slots))


def put_back(slots: Sequence[Any], held: State) -> None:
    for (slot, adapter), one in zip(_checkpointed(slots), held, strict=True):
        adapter.put_back(slot, one)


def windows(slots: Sequence[Any]) -> list[Any]:
    """Return the opaque slots whose newest positions can be dropped."""
    return [slot for slot, adapter in _checkpointed(slots) if adapter.cuts]


def cut(slots: Sequence[Any], length: int) -> None:
    """Drop the positions from `length` on of the `windows`."""
    for slot in windows(slots):
        slot.offset = min(slot.offset, length)


def are_sound(states: State) -> bool:
    """Evaluate `states`; return False if a failed pass left some uncomputable."""
    try:
        mx.eval(tree_arrays(states))
    except (RuntimeError, ValueError) as error:
        if device.is_device_error(error):
            raise
        return False
    return True


def pretend(slots: Sequence[Any], likes: State, position: int) -> None:
    """Set the opaque slots to made-up states at `position`, to measure a pass from there."""
    for (slot, adapter), like in zip(_checkpointed(slots), likes, strict=True):
        made = adapter.blank(like, position)
        if made is not None:
            adapter.set_state(slot, made)


def go_on_to(slots: Sequence[Any], state: State) -> None:
    """Set the opaque slots to a copy of `state`, a later one of the same tokens."""
    for (slot, adapter), new in zip(_checkpointed(slots), state, strict=True):
        adapter.go_on_to(slot, new)
    mx.eval(tree_arrays([slot.state for slot, _ in _checkpointed(slots)]))


def settle(slots: Sequence[Any]) -> None:
    """Copy the states of the opaque slots into buffers of their own.

    A model may leave views in the slots that keep the input of a whole chunk in memory.
    """
    found = _checkpointed(slots)
    for slot, adapter in found:
        adapter.settle(slot)
    mx.eval(tree_arrays([slot.state for slot, _ in found]))


def eval_states(caches: Sequence[Any], *, wait: bool = True) -> None:
    """Evaluate all arrays of `caches`; with `wait` False, only start to."""
    arrays = tree_arrays([slot.state for slot in flatten(caches)])
    if wait:
        mx.eval(arrays)
    else:
        mx.async_eval(arrays)  # type: ignore[no-untyped-call]


Spec = tuple[tuple[int, int, Any], ...]
"""(heads, dim, dtype) of each array of a linear slot."""


def _width(spec: Spec) -> int:
    return sum(heads * dim * dtype.size for heads, dim, dtype in spec)


@dataclass(frozen=True, slots=True)
class Layout:
    """Cache layout of one model.

    `make`: returns empty caches for one sequence. `vocab_size`: number of logits.
    `bytes_per_token`: of all linear slots. `checkpoint_bytes`: most bytes of the states of all
    opaque slots, `running_bytes` what they hold while the model is fed. `window_bytes`: of one
    position in all sliding windows. `linear`: indices, in the order of `flatten`, of the linear
    slots that the model fills, and `specs` the arrays of each;
    `opaque_at`: indices of the opaque slots, and `checkpointed` the adapter of each. `states`: the
    form of a checkpoint, with an ArraySpec for each array. `unknown`:
    cache classes without an adapter; such a model is not cached. `foreign`: classes that mlx-lm
    cannot read from a file.
    `divided`: that of one rank's part of the model; `stateful`: another rank has opaque slots.
    `heads`: identifies the model's heads, "" if there are none. The last linear slot and the last
    opaque one are theirs then. Files need not have them, and zeros stand for what they lack.
    """

    make: Callable[[], Caches]
    vocab_size: int
    bytes_per_token: int
    checkpoint_bytes: int
    running_bytes: int
    window_bytes: int
    linear: tuple[int, ...]
    specs: tuple[Spec, ...]
    opaque_at: tuple[int, ...]
    checkpointed: tuple[Checkpointed, ...]
    batchable: bool
    states: State
    unknown: tuple[str, ...]
    foreign: tuple[str, ...] = ()
    stateful: bool = False
    divided: bool = False
    heads: str = ""

    @property
    def bare(self) -> Layout:
        """What files of this model must have: its layout without heads."""
        if not self.heads:
            return self
        return replace(
            self,
            make=lambda: self.make()[:-2],
            linear=self.linear[:-1],
            specs=self.specs[:-1],
            opaque_at=self.opaque_at[:-1],
            checkpointed=self.checkpointed[:-1],
            states=self.states[:-1],
            heads="",
        )

    @property
    def cacheable(self) -> bool:
        return not self.unknown

    @property
    def opaque(self) -> bool:
        return bool(self.checkpointed) or self.stateful

    @property
    def rewinds(self) -> bool:
        """True if the newest positions can be taken back."""
        return (
            self.cacheable
            and not self.divided
            and all(adapter.rewinds for adapter in self.checkpointed)
        )

    @property
    def recurrent(self) -> bool:
        """True if a state cannot drop its newest positions."""
        return self.stateful or not all(adapter.cuts for adapter in self.checkpointed)

    @property
    def keeps_rows(self) -> bool:
        """True if a lineage may keep the rows of sliding windows, to go on from any position."""
        return bool(self.checkpointed) and not (self.recurrent or self.divided)

    @property
    def widest(self) -> int:
        """Bytes of one position in the largest array of the linear slots, or 0."""
        return max((h * d * t.size for spec in self.specs for h, d, t in spec), default=0)

    def row_bytes(self, length: int) -> int:
        """Return the bytes of one sequence in a batch that is padded to `length` positions."""
        return self.checkpoint_bytes + length * self.bytes_per_token


def survey(model: Any, *, kv_bits: int | None = None, evaluate: bool = True) -> Layout:
    """Determine the cache layout of a model by feeding it a few tokens.

    Without `evaluate` nothing is computed and no lazy weight is read. Raises ModelError if KV
    cannot be quantised to `kv_bits`, and any error of the model itself.
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
    specs = tuple(
        tuple((a.shape[1], a.shape[3], a.dtype) for a in adapter.arrays(slot))
        for _, slot, adapter in linear
    )
    opaque = _checkpointed(slots)
    states = either(early, late)
    return Layout(
        make=make,
        vocab_size=logits.shape[-1],
        bytes_per_token=sum(map(_width, specs)),
        checkpoint_bytes=sum(adapter.most_bytes(slot) for slot, adapter in opaque),
        running_bytes=sum(adapter.running_bytes(slot) for slot, adapter in opaque),
        window_bytes=sum(row_bytes(slot) for slot in windows(slots)),
        linear=tuple(i for i, _, _ in linear),
        specs=specs,
        opaque_at=tuple(i for i, a in enumerate(adapters) if isinstance(a, Checkpointed)),
        checkpointed=tuple(adapter for _, adapter in opaque),
        batchable=all(a is not None and a.batchable for a in adapters)
        and not any(varies(s) for (_, a), s in zip(opaque, states, strict=True) if not a.growing),
        states=states,
        unknown=tuple(sorted({class_name(s) for s in slots if adapter_of(s) is None})),
        foreign=tuple(
            sorted(
                {a.name for a in adapters if a is not None and not a.portable} | _unportable(caches)
            )
        ),
        heads=getattr(model, "heads_tag", ""),
    )


def _feed(model: Any, caches: Caches, tokens: int, evaluate: bool) -> tuple[mx.array, State]:
    logits = model(mx.zeros((1, tokens), mx.int32), cache=caches)
    if evaluate:
        eval_states(caches)
    opaque = _checkpointed(flatten(caches))
    return logits, tuple(spec_tree(a.state(slot), a.growing) for slot, a in opaque)
