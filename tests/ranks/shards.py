"""All ranks of a group in one process: each is a thread, and collectives are plain sums there."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from mlxcache.model import kv, serialise
from mlxcache.model.kv import Caches, Layout
from mlxcache.ranks.division import Division, Part, find_division, part_of
from mlxcache.ranks.group import divide, first_layer
from mlxcache.safetensors import Tensor
from mlxcache.store.parts import Mode

WAIT_S = 60.0
"""Most seconds that a rank waits for another."""


class Group:
    """MLX's group of `size` ranks, as rank `rank` has it."""

    def __init__(self, rank: int, size: int):
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


class Collectives:
    """Collective operations among threads, as lazy arrays. Each thread sets `mine.rank` first."""

    def __init__(self, size: int):
        self.mine = threading.local()
        self._barrier = threading.Barrier(size)
        self._given: dict[int, mx.array] = {}
        self._sent: dict[int, Queue[mx.array]] = {rank: Queue() for rank in range(size)}

    def _swap(self, array: mx.array) -> list[mx.array]:
        self._given[self.mine.rank] = array
        self._barrier.wait(WAIT_S)
        found = [self._given[rank] for rank in sorted(self._given)]
        self._barrier.wait(WAIT_S)
        return found

    def all_sum(self, array: mx.array, **_: Any) -> mx.array:
        return mx.stack(self._swap(array)).sum(axis=0).astype(array.dtype)

    def all_gather(self, array: mx.array, **_: Any) -> mx.array:
        return mx.concatenate(self._swap(array), axis=0)

    def send(self, array: mx.array, to: int, **_: Any) -> mx.array:
        self._sent[to].put(array)
        return array

    def recv_like(self, like: mx.array, source: int, **_: Any) -> mx.array:
        return self._sent[self.mine.rank].get(timeout=WAIT_S)

    def recv(self, shape: Sequence[int], dtype: Any, source: int, **_: Any) -> mx.array:
        return self._sent[self.mine.rank].get(timeout=WAIT_S)


@contextmanager
def collectives(size: int) -> Iterator[Collectives]:
    """Replace MLX's collective operations by those among threads."""
    own = Collectives(size)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_sum", "all_gather", "send", "recv", "recv_like"):
            patch.setattr(mx.distributed, name, getattr(own, name))
        yield own


@dataclass(slots=True)
class Fed:
    """A model, or a rank's part of one, that was fed a prompt."""

    layout: Layout
    caches: Caches
    part: Part

    def rows(self, tokens: int) -> list[Tensor]:
        """The tensors of a run of the prompt's `tokens` tokens."""
        made = []
        slots = kv.flatten(self.caches)
        for i, spec in enumerate(self.layout.specs):
            arrays = kv.arrays_of(slots[self.layout.linear[i]])
            for j, (array, (heads, dim, _)) in enumerate(zip(arrays, spec, strict=True)):
                own = mx.contiguous(array[0, :, :tokens].swapaxes(0, 1))
                assert own.shape == (tokens, heads, dim)
                made += serialise.to_tensors([(serialise.run_name(i, j), own)])
        return made

    def state(self) -> list[Tensor]:
        """The tensors of a checkpoint at the end of the prompt."""
        return serialise.state_tensors(kv.copied(kv.states(kv.flatten(self.caches))))


class Shards:
    """A model as a whole, and divided among `size` ranks, all fed `ids`."""

    def __init__(self, model: Path, mode: Mode, size: int, ids: Sequence[int]):
        tokens = mx.array(list(ids))[None]
        whole, config = load_model(model, lazy=True)
        self.whole = _feed(whole, tokens, 0)
        self.ranks = _feed_ranks(model, mode, size, tokens, config)
        kv.eval_states(self.whole.caches)
        for rank in self.ranks:
            kv.eval_states(rank.caches)
        self.division: Division = find_division(
            self.whole.part, [rank.part for rank in self.ranks], mode, config["model_type"]
        )


def _feed(model: Any, tokens: mx.array, first: int) -> Fed:
    """Feed a model lazily; all ranks of a group do so at the same time."""
    layout = kv.survey(model, evaluate=False)
    caches = layout.make()
    model(tokens, cache=caches)
    return Fed(layout, caches, part_of(layout, first))


def _feed_ranks(
    model: Path, mode: Mode, size: int, tokens: mx.array, config: Mapping[str, Any]
) -> list[Fed]:
    found: dict[int, Fed] = {}
    stream = mx.default_stream(mx.default_device())

    def run(own: Collectives, rank: int) -> None:
        own.mine.rank = rank
        with mx.stream(stream):
            part, _ = load_model(model, lazy=True)
            divide(part, config, Group(rank, size), mode)
            found[rank] = _feed(part, tokens, first_layer(part, mode))

    with collectives(size) as own:
        threads = [threading.Thread(target=run, args=(own, rank)) for rank in range(size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [found[rank] for rank in range(size)]


def values(tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor's values, or its bytes if it is no float32."""
    kind = np.float32 if tensor.dtype == "F32" else np.uint8
    return np.frombuffer(tensor.bytes, kind)
