"""Lineages: KV buffers of one conversation each, which grow as it continues. MLX thread only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcache.model import device, kv
from mlxcache.model.arrays import copied, joined, readable, tree_arrays, zeros
from mlxcache.model.kv import Caches, Layout, State
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.model")

AT_ONCE = 4096  # number of positions that are checked for NaN in one evaluation

Span = tuple["Lineage", int, int]
"""A lineage, and a range [start, end) of positions in its buffers."""


class Lineage:
    """KV for positions [base, length) of one token sequence, in buffers of `capacity` positions.

    With `base` 0 the lineage is *whole*: the model can be fed with `caches`, which appends in
    place. With `base` above 0 it is *compact*: only its own range is there, to be sliced from.

    Methods that copy KV evaluate the copies in groups of arrays, of up to `copy_bytes` bytes or of
    one array if it is larger. A copy takes at most the memory of one group more than the buffers
    before it or after it, whichever are larger.

    The buffers of sliding windows slide, unless they have room for `rows` positions: the model may
    then go on from each of these, with `state_at`.

    `passes` counts the writes to the buffers since the last `mark_confirmed`: their results may be
    wrong on a device that reports errors late. `turn_tokens`: how many positions the next turn may
    add.
    """

    def __init__(self, layout: Layout, copy_bytes: int = 0):
        self.layout = layout
        self.copy_bytes = copy_bytes
        self.caches: Caches = layout.make()
        self.slots = kv.flatten(self.caches)
        self.linear = [self.slots[i] for i in layout.linear]
        self.base = 0
        self.length = 0
        self.capacity = 0
        self.rows = 0
        self.passes = 0
        self.turn_tokens = 0
        self._addresses: list[int] | None = None

    @property
    def nbytes(self) -> int:
        return self.capacity * self.layout.bytes_per_token + self.rows * self.layout.window_bytes

    @property
    def state_bytes(self) -> int:
        return kv.nbytes(kv.states(self.slots))

    @property
    def whole(self) -> bool:
        return self.base == 0

    def fill(self, sources: Sequence[Span], capacity: int) -> None:
        """Replace every buffer by copies of `sources`, with `capacity` positions each.

        `sources` are contiguous ranges of lineages, possibly of this one. If MLX fails, the lineage
        is released, unless the only change was to enlarge its buffers.
        """
        try:
            self._refill(sources, capacity)
        except BaseException:
            if self._is_growth(sources):
                self._undo_growth()
            else:
                self.release()
            raise
        if self.rows and not self._is_growth(sources):
            self.rest()

    def _is_growth(self, sources: Sequence[Span]) -> bool:
        return self.length > 0 and list(sources) == [(self, 0, self.length)]

    def _undo_growth(self) -> None:
        """Cut the buffers that were enlarged before others failed; release all if that fails."""
        try:
            for slot in self.linear:
                for j, array in enumerate(kv.arrays_of(slot)):
                    if array.shape[2] > self.capacity:
                        cut = copied(array[..., : self.capacity, :])
                        mx.eval(cut)
                        device.confirm()
                        kv.sliced(slot).put(slot, j, cut)
        except BaseException:
            self.release()
            raise

    def _refill(self, sources: Sequence[Span], capacity: int) -> None:
        base, end = (sources[0][1], sources[-1][2]) if sources else (0, 0)
        padding = capacity - (end - base)
        for group in self._groups(self.capacity + padding):
            # a view held during the next write to its buffer costs a copy: none outlives `_copy`
            made = [self._copy(sources, i, j, padding) for i, j in group]
            mx.eval(made)
            device.confirm()  # before the arrays that they replace are dropped
            for (i, j), out in zip(group, made, strict=True):
                kv.sliced(self.linear[i]).put(self.linear[i], j, out)
            mx.clear_cache()  # freed buffers of this size are not reused
        for slot in self.linear:
            kv.set_offset(slot, end)
        self.base, self.length, self.capacity = base, end, capacity
        if not self.passes:
            self.mark_confirmed()

    def _groups(self, positions: int) -> Iterator[list[tuple[int, int]]]:
        """Yield groups of (slot, array) indices, of at most `copy_bytes` bytes or one array."""
        group: list[tuple[int, int]] = []
        size = 0
        for i, spec in enumerate(self.layout.specs):
            for j, (heads, dim, dtype) in enumerate(spec):
                one = positions * heads * dim * dtype.size
                if group and size + one > self.copy_bytes:
                    yield group
                    group, size = [], 0
                group.append((i, j))
                size += one
        if group:
            yield group

    def _copy(self, sources: Sequence[Span], slot: int, array: int, padding: int) -> mx.array:
        heads, dim, dtype = self.layout.specs[slot][array]
        shape = (1, heads, padding, dim)
        if not sources:
            return mx.zeros(shape, dtype)
        parts = [owner.view(slot, array, start, stop) for owner, start, stop in sources]
        return joined([*parts, zeros(shape, dtype)] if padding else parts)

    def view(self, slot: int, array: int, start: int, stop: int) -> mx.array:
        """Return positions [start, stop) of one array as a lazy slice.

        The caller must drop the slice before the next write to the lineage.
        """
        whole = kv.arrays_of(self.linear[slot])[array]
        return whole[..., start - self.base : stop - self.base, :]

    def grow(self, capacity: int) -> None:
        """Enlarge the buffers to at least `capacity` positions, by a copy."""
        if capacity > self.capacity:
            self.fill([(self, 0, self.length)] if self.length else [], capacity)

    def truncate(self, length: int) -> None:
        """Drop the positions from `length` on. The capacity stays."""
        self._end_at(length)

    def _end_at(self, length: int) -> None:
        self.length = length
        for slot in self.linear:
            kv.set_offset(slot, length)
        kv.cut(self.slots, length)

    def pretend(self, length: int) -> None:
        """Set the number of positions to `length` without feeding them, to measure a pass there."""
        self._end_at(length)
        kv.pretend(self.slots, self.layout.states, length)

    def compact(self, start: int, end: int) -> None:
        self.fill([(self, start, end)], end - start)

    def detach(self, start: int, end: int) -> Lineage:
        """Copy positions [start, end) into a new lineage with buffers of exactly that size."""
        twin = self._empty()
        twin.fill([(self, start, end)], end - start)
        return twin

    def _empty(self) -> Lineage:
        return type(self)(self.layout, self.copy_bytes)

    def note_turn(self, tokens: int) -> None:
        self.turn_tokens = max(tokens, self.turn_tokens * 3 // 4)

    def note_pass(self, writes: int = 1) -> None:
        """Count writes to the buffers. Must be called before the writes."""
        self.passes += writes

    def note_feed(self, ids: Tokens) -> None:
        """Count the writes of a pass that appends `ids`. Must be called before the pass."""
        self.note_pass()

    def mark_confirmed(self) -> None:
        """Record that all writes are confirmed. Call only after `device.confirm` has returned."""
        self.passes = 0
        self._addresses = self._read_addresses() if device.defers_errors() else None

    def survives_failure(self) -> bool:
        """Return whether all positions confirmed last are intact after a device error.

        They are if nothing was written since, or if there was one write and it was made in place.
        MLX copies a buffer that has another reader, and a copy that failed has lost every position;
        several writes may have copied to another buffer and back. If only some buffers were
        enlarged the result is False, because they take more memory than was reserved.
        """
        sizes = {array.shape[2] for array in self._arrays()}
        if not sizes <= {self.capacity}:
            return False
        if not self.passes:
            return True
        if self.passes > 1 or self._addresses is None:
            return False
        try:
            return self._addresses == self._read_addresses()
        except (RuntimeError, ValueError):  # an array that cannot be computed
            return False

    def _arrays(self) -> list[mx.array]:
        return [array for slot in self.linear for array in kv.arrays_of(slot)]

    def _read_addresses(self) -> list[int]:
        arrays = self._arrays()
        views = [readable(array) for array in arrays]
        # at once, as each evaluation waits for the device; without views, nothing must fail
        mx.eval([view for view, array in zip(views, arrays, strict=True) if view is not array])
        return [int(np.asarray(view).ctypes.data) for view in views]

    def advance(self, count: int) -> None:
        self.length += count

    def append(
        self,
        tail: Iterable[Sequence[mx.array]],
        count: int,
        *,
        held: int | None = None,
        wait: bool = True,
    ) -> None:
        """Append `count` positions: for each linear slot its arrays, (1, heads, count, dim) each.

        `tail` may compute the arrays of a slot when it is advanced. Slots are evaluated in groups
        of at most `copy_bytes` bytes, counted for `held` positions, by default `count`; pass more
        if computing an array takes more memory than its result. Without `wait`, the last group is
        evaluated with the first one of the next call. The capacity must suffice.
        """
        end, held = self.length + count, count if held is None else held
        self.note_pass()
        written: list[mx.array] = []
        size = 0
        for slot, spec, new in zip(self.linear, self.layout.specs, tail, strict=True):
            one = 1  # more than `copy_bytes` of 0: each slot is evaluated alone
            if self.copy_bytes:
                one = sum(held * heads * dim * dtype.size for heads, dim, dtype in spec)
            if written and size + one > self.copy_bytes:
                mx.eval(written)
                written, size = [], 0
            arrays = kv.arrays_of(slot)
            for array, part in zip(arrays, new, strict=True):
                array[..., self.length : end, :] = part
            written += arrays
            size += one
        if wait:
            mx.eval(written)
        self._end_at(end)

    def append_span(self, span: Span) -> None:
        """Append a copy of `span`, which begins at position `length`. The capacity must suffice."""
        owner, start, end = span
        sizes = [range(len(spec)) for spec in self.layout.specs]
        self.append(
            [[owner.view(i, j, start, end) for j in arrays] for i, arrays in enumerate(sizes)],
            end - start,
            held=0,
        )

    def capture(self) -> State:
        return kv.copied(kv.states(self.slots))

    def restore(self, state: State | None) -> None:
        """Set the opaque slots to a copy of `state`, from `capture`; None changes nothing."""
        kv.restore(self.slots, state)

    def set_state(self, state: State) -> None:
        """Set the opaque slots to `state`, which comes from disk and is not used elsewhere."""
        kv.take_over(self.slots, state)

    def go_on_to(self, state: State) -> None:
        """Set the opaque slots to a copy of `state`, that of a row of a batch that went on."""
        kv.go_on_to(self.slots, state)

    def settle(self) -> None:
        """Copy the states of the opaque slots, which may be views of larger buffers."""
        if not self.rows:
            kv.settle(self.slots)

    # -- rows of sliding windows -------------------------------------------------------------------

    def lacking_rows(self, end: int) -> int:
        """Return for how many of the positions before `end` the windows have no room yet."""
        default = end if self.length else 0
        begin = min((slot.begin for slot in self._windows), default=default)
        return max(0, end - begin - self.rows)

    @property
    def _windows(self) -> list[Any]:
        return [slot for slot in kv.windows(self.slots) if slot.keys is not None]

    def keep_rows(self, end: int) -> None:
        """Copy the windows to buffers with room for all positions before `end`."""
        lacking = self.lacking_rows(end)
        if not self.length:
            kv.pretend(self.slots, self.layout.states, 0)
        for slot in self._windows:
            slot.make_room(end - slot.begin)
            mx.eval(slot.keys)
            mx.eval(slot.values)  # when the old keys are gone
        device.confirm()
        self.rows += lacking

    def slide(self) -> None:
        """Drop the rows that continuing from the end does not need."""
        self.rows = 0
        kv.settle(self.slots)

    def covers(self, position: int) -> bool:
        """Return whether the windows have the rows before `position`."""
        return self.rows > 0 and all(slot.covers(position, slot.max_size) for slot in self._windows)

    def state_at(self, position: int) -> State:
        """Return the state of the windows after `position` tokens, which they cover, as views.

        The caller must drop it before the next write to the lineage.
        """
        return tuple(slot.state_at(position) for slot in kv.windows(self.slots))

    def rest(self) -> None:
        """Drop the states of the opaque slots, to free their memory while the lineage is idle.

        Until `restore` or `set_state`, the model must not be fed from the end.
        """
        if not self.layout.opaque:
            return
        self.rows = 0
        caches = self.layout.make()
        slots = kv.flatten(caches)
        linear = [slots[i] for i in self.layout.linear]
        for slot, old in zip(linear, self.linear, strict=True):
            kv.set_arrays(slot, kv.arrays_of(old), self.length)
        self.caches, self.slots, self.linear = caches, slots, linear

    def sound(self) -> bool:
        """Evaluate all linear arrays; return False if a failed pass left some uncomputable."""
        try:
            mx.eval(self._arrays())
        except (RuntimeError, ValueError) as error:
            if device.is_device_error(error):
                raise
            log.exception(
                "KV buffers lost: the failed pass left arrays that cannot be computed; the KV of "
                "up to %d tokens has to be computed again",
                self.length,
            )
            return False
        return True

    @property
    def lost(self) -> bool:
        """True if the buffers have been released; the prefix tree may still refer to them."""
        return not self.caches

    def aligned(self) -> bool:
        return all(slot.offset == self.length for slot in [*self.linear, *self._windows])

    def release(self) -> None:
        """Release every buffer now, even while other objects refer to this lineage."""
        self.caches, self.slots, self.linear = [], [], []
        self.capacity = self.rows = 0
        self._addresses = None


NewLineage = Callable[[Layout, int], Lineage]
"""Makes an empty lineage of a layout and `copy_bytes`."""


# -- NaN and infinity, the result of an overflow ---------------------------------------------------


def ends_finite(lineage: Lineage) -> bool:
    """Return whether the newest KV of the last linear slot and the last opaque state are finite.

    A NaN at an earlier position or in an earlier layer has spread to them, unless it is outside of
    every sliding window. The cost does not depend on the length of the lineage.
    """
    at = lineage.length - lineage.base - 1
    arrays = [a[..., at, :] for slot in lineage.linear[-1:] for a in kv.arrays_of(slot)]
    newest = [lineage.slots[i] for i in lineage.layout.opaque_at[-1:]]
    arrays += tree_arrays(kv.states(newest))
    return at < 0 or is_finite(arrays)


def finite_upto(lineage: Lineage) -> int:
    """Return the first position whose linear KV is not finite, or the length."""
    end = lineage.length
    for slot in lineage.linear:
        for array in kv.arrays_of(slot):
            end = min(end, _finite_upto(array, lineage.base, end))
    return end


def _finite_upto(array: mx.array, base: int, end: int) -> int:
    for start in range(base, end, AT_ONCE):
        part = array[..., start - base : min(end, start + AT_ONCE) - base, :]
        sound = mx.all(mx.isfinite(part), axis=(0, 1, 3))
        if not mx.all(sound).item():
            return start + sound.tolist().index(False)  # type: ignore[union-attr]
    return end


def state_is_finite(state: State) -> bool:
    return is_finite(tree_arrays(state))


def is_finite(arrays: Sequence[mx.array]) -> bool:
    return all(mx.all(mx.isfinite(array)).item() for array in arrays)
