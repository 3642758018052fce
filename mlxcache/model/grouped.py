"""Cache of DeepSeek V4.1's layers, with compressed KV as rows that can be sliced at any position.

A layer attends to a sliding window and, in some layers, to compressed KV: one vector for each
closed group of `ratio` tokens. `LayerCache` of mlx-lm holds both in one object, which can neither
be truncated nor restored. `GroupedCache` takes its place and splits it into slots:

- `RecentRows`: the window, the tokens of the open group and the newest vectors, a state that
  stands for one position;
- `GroupRows`: the vectors of the closed groups, or their index keys, a row for each position. Index
  keys are vectors too: by them the layer's indexer selects the groups that a token attends to.

A vector is cut into `ratio` rows. They begin at the position that closes its group, because the
vector depends on the tokens up to there. With a ratio of 4:

    position    0   1   2   3   4   5   6   7   8   9  10  11
    group       0   0   0   0   1   1   1   1   2   2   2   2
    row of      -   -   -   0   0   0   0   1   1   1   1   2

So a part of the newest vector's rows may belong to positions that were not fed yet. Therefore
`RecentRows` has that vector as a whole too. MLX thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from mlxcache.model.arrays import copied

NAME = "LayerCache"  # of the class in mlx-lm
_MODULE = "mlx_lm.models.deepseek_v41"
_HELD = {
    "window_size", "offset", "window", "compress_kv", "index_k", "pending_kv", "pending_gate",
}  # fmt: skip


class GroupRows:
    """Vectors of the closed groups of `ratio` tokens, one of `size` numbers for each group.

    `rows`: shape (1, 1, capacity, width), None before the first vector; a vector takes `ratio` rows
    of it, padding included. `newest`: the newest vector, shape (1, 1, size); None or of shape (1,
    0, size) before the first; None also if `ratio` is 1, where `rows` are enough.
    """

    step = 256

    def __init__(self, ratio: int, size: int):
        self.ratio = ratio
        self.size = size
        self.rows: mx.array | None = None
        self.offset = 0
        self.newest: mx.array | None = None
        self._newest_of = 0  # the number of groups when `newest` was set
        self._tail = False  # `rows` have all of the newest vector
        self._closing = 0  # groups that the running pass closes and has not written yet

    @property
    def state(self) -> tuple[Any, ...]:
        return (self.rows,)

    @property
    def groups(self) -> int:
        return self.offset // self.ratio

    @property
    def _end(self) -> int:  # position after the last row of the newest vector
        return (self.groups + 1) * self.ratio - 1

    def begin(self, count: int) -> None:
        """Add `count` new positions to `offset`, before the model computes their KV.

        Raises ValueError if rows of the last closed group belong to these positions, and its vector
        is missing, because the rows were restored without the checkpoint that has it.
        """
        if self.rows is not None:
            self._reserve(self.offset + count)
            self._write_tail()
        groups = self.groups
        self.offset += count
        self._closing = self.groups - groups

    def vectors(self) -> mx.array | None:
        """Return the vectors of all closed groups, shape (1, groups, size), or None.

        None too in a pass that closes groups, before `add`: mlx-lm appends the new vectors to what
        it gets here, and passes the result to `add`; so it passes the new ones only.
        """
        if self._closing or not self.groups or self.rows is None:
            return None
        if self._tail or self._end <= self.offset:
            return self._read(self.groups)
        assert self.newest is not None  # the buffer ends within its rows
        before = self._read(self.groups - 1)
        return mx.concatenate([before, self.newest], axis=1)

    def _read(self, groups: int) -> mx.array:
        assert self.rows is not None
        first = self.ratio - 1
        view = self.rows[..., first : first + groups * self.ratio, :]
        return view.reshape(1, groups, self.ratio * view.shape[3])[..., : self.size]

    def add(self, vectors: mx.array) -> None:
        if vectors.shape != (1, self._closing, self.size):
            raise ValueError(
                f"{self._closing} vectors of {self.size} numbers were due, the model made "
                f"{vectors.shape}"
            )
        if self.rows is None:
            self.rows = mx.zeros((1, 1, 0, -(-self.size // self.ratio)), vectors.dtype)
            self._reserve(self.offset)
        if self.ratio > 1:
            self.newest = copied(vectors[:, -1:])
            self._newest_of = self.groups
        self._write(vectors, self.groups - self._closing)
        self._closing = 0

    def _write(self, vectors: mx.array, first: int) -> None:
        assert self.rows is not None
        padding = self.ratio * self.rows.shape[3] - self.size
        if padding:
            vectors = mx.pad(vectors, [(0, 0), (0, 0), (0, padding)])
        new = vectors.reshape(1, 1, -1, self.rows.shape[3])
        start = (first + 1) * self.ratio - 1
        end = min(start + new.shape[2], self.rows.shape[2])
        self.rows[..., start:end, :] = new[..., : end - start, :]
        self._tail = end == start + new.shape[2]

    def _write_tail(self) -> None:
        """Write the rows of the newest vector again if the buffer may lack some of them."""
        if self._tail or self._end <= self.offset or not self.groups:
            return
        if self.newest is None or self._newest_of != self.groups:
            raise ValueError(f"no checkpoint of position {self.offset} was restored")
        self._write(self.newest, self.groups - 1)

    def _reserve(self, capacity: int) -> None:
        assert self.rows is not None
        missing = capacity - self.rows.shape[2]
        if missing > 0:
            steps = -(-missing // self.step) * self.step
            pad = mx.zeros((1, 1, steps, self.rows.shape[3]), self.rows.dtype)
            self.rows = mx.concatenate([self.rows, pad], axis=2)

    def put(self, rows: mx.array) -> None:
        self.rows, self._tail = rows, False

    def end_at(self, offset: int) -> None:
        """Set the number of positions to `offset`; later ones will be overwritten."""
        self.offset, self._closing, self._tail = offset, 0, False

    def restore(self, newest: mx.array | None, offset: int) -> None:
        """Set the newest vector, as `newest_vector` returned it at `offset`."""
        self.newest, self._newest_of, self._tail = newest, offset // self.ratio, False

    def newest_vector(self, dtype: mx.Dtype) -> mx.array | None:
        if self.newest is not None or self.ratio == 1:
            return self.newest
        return mx.zeros((1, 0, self.size), dtype if self.rows is None else self.rows.dtype)


class RecentRows:
    """The newest `window_size` rows of a layer, and its tokens of the group that is still open.

    `window`, and the latents `pending_kv` and gates `pending_gate` of the open group, have shape
    (1, n, dim); None in layers that compress nothing. `groups`: slots of the same layer, whose
    newest vectors belong to this slot's state.
    """

    def __init__(self, window_size: int, groups: Sequence[GroupRows] = ()):
        self.window_size = window_size
        self.groups = tuple(groups)
        self.ratio = groups[0].ratio if groups else 0
        self.offset = 0
        self.window: mx.array | None = None
        self.pending_kv: mx.array | None = None
        self.pending_gate: mx.array | None = None

    @property
    def state(self) -> tuple[Any, ...]:
        newest: tuple[Any, ...] = ()
        if self.window is not None:
            newest = tuple(slot.newest_vector(self.window.dtype) for slot in self.groups)
        return (
            self.window, self.pending_kv, self.pending_gate, newest,
            self.offset, self.window_size, self.ratio,
        )  # fmt: skip

    def append(self, kv: mx.array) -> mx.array:
        """Append `kv`, shape (1, n, dim); return the window as it was before, followed by `kv`."""
        rows = kv if self.window is None else mx.concatenate([self.window, kv], axis=1)
        self.window = rows[:, -self.window_size :]
        self.offset += kv.shape[1]
        return rows

    def set_pending(self, kv: mx.array | None, gate: mx.array | None) -> None:
        self.pending_kv, self.pending_gate = kv, gate

    def restore(self, state: Sequence[Any]) -> None:
        self.window, self.pending_kv, self.pending_gate, newest, self.offset = state[:5]
        for slot, vector in zip(self.groups, newest, strict=False):
            slot.restore(vector, self.offset)


class GroupedCache:
    """Cache of one layer in the form in which mlx-lm's DeepSeek V4.1 reads and writes it.

    `groups`: none, or the slot of compressed KV, or that and the slot of index keys.
    """

    name = NAME

    def __init__(self, window_size: int, groups: Sequence[GroupRows] = ()):
        self.recent = RecentRows(window_size, groups)
        self.parts: list[Any] = [self.recent, *groups]

    def update_window(self, kv: mx.array) -> mx.array:
        """Begin a pass: append `kv`, (1, n, dim), and return the window that it attends to."""
        for slot in self.recent.groups:
            slot.begin(kv.shape[1])
        return self.recent.append(kv)

    @property
    def offset(self) -> int:
        return self.recent.offset

    @property
    def window(self) -> mx.array | None:
        return self.recent.window

    @property
    def pending_kv(self) -> mx.array | None:
        return self.recent.pending_kv

    @pending_kv.setter
    def pending_kv(self, rows: mx.array) -> None:
        self.recent.set_pending(rows, self.recent.pending_gate)

    @property
    def pending_gate(self) -> mx.array | None:
        return self.recent.pending_gate

    @pending_gate.setter
    def pending_gate(self, rows: mx.array) -> None:
        self.recent.set_pending(self.recent.pending_kv, rows)

    @property
    def compress_kv(self) -> mx.array | None:
        return self._vectors(0)

    @compress_kv.setter
    def compress_kv(self, new: mx.array) -> None:
        self.recent.groups[0].add(new)

    @property
    def index_k(self) -> mx.array | None:
        return self._vectors(1)

    @index_k.setter
    def index_k(self, new: mx.array) -> None:
        self.recent.groups[1].add(new)

    def _vectors(self, index: int) -> mx.array | None:
        groups = self.recent.groups
        return groups[index].vectors() if index < len(groups) else None


def grouped(cache: Any, layer: Any) -> GroupedCache | None:
    """Return an empty `GroupedCache` in place of `cache`, if that is a known `LayerCache`."""
    kind = type(cache)
    if (kind.__module__, kind.__name__) != (_MODULE, NAME) or set(vars(cache)) != _HELD:
        return None
    attention = layer.self_attn
    sizes: list[int] = []
    if attention.ratio and attention.is_kv_source:
        sizes.append(attention.head_dim)
        if attention.is_index_source:
            sizes.append(attention.indexer.head_dim)
    return GroupedCache(cache.window_size, [GroupRows(attention.ratio, size) for size in sizes])
