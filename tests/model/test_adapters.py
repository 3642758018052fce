"""mlx-lm's cache classes, as the adapters rely on them; fails loudly where they drift."""

from __future__ import annotations

import inspect
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as theirs
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from mlxcache.model.adapters import (
    ADAPTERS,
    Checkpointed,
    Sliced,
    WindowCache,
    adapter_of,
    class_name,
    composed,
    parts_of,
    prepared,
)
from mlxcache.model.arrays import copied_tree

OTHERS = {"_BaseCache", "BatchKVCache", "BatchRotatingKVCache", "TokenBuffer"}
"""Not of a layer and one sequence: `rows` makes those for several of the others."""

MAKERS: dict[type, Any] = {
    KVCache: KVCache,
    ConcatenateKVCache: ConcatenateKVCache,
    QuantizedKVCache: lambda: QuantizedKVCache(group_size=32, bits=8),
    RotatingKVCache: lambda: RotatingKVCache(max_size=8, keep=2),
    ChunkedKVCache: lambda: ChunkedKVCache(8),
    ArraysCache: lambda: ArraysCache(2),
    CacheList: lambda: CacheList(KVCache(), ArraysCache(1)),
}
PROTOCOL: dict[type, tuple[str, set[str]]] = {
    KVCache: ("self", {"keys", "values", "offset"}),
    ConcatenateKVCache: ("self", {"keys", "values", "offset"}),
    QuantizedKVCache: ("self group_size bits", {"keys", "values", "offset", "group_size", "bits"}),
    RotatingKVCache: (
        "self max_size keep",
        {"keys", "values", "offset", "max_size", "keep", "_idx"},
    ),
    ChunkedKVCache: (
        "self chunk_size",
        {"keys", "values", "offset", "chunk_size", "start_position"},
    ),
    ArraysCache: ("self size left_padding", {"cache", "left_padding", "lengths"}),
    CacheList: ("self caches", {"caches"}),
}
"""What each is made with, and all that it holds: the adapters read and write these."""


def noise(tokens: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    made = np.random.default_rng(seed).normal(size=(2, 1, 2, tokens, 32)).astype(np.float32)
    return mx.array(made[0]), mx.array(made[1])


def test_every_class_of_mlx_lm_has_a_place() -> None:
    """A new one in `mlx_lm.models.cache` needs an adapter."""
    classes = {
        name
        for name, kind in vars(theirs).items()
        if inspect.isclass(kind) and kind.__module__ == theirs.__name__ and hasattr(kind, "state")
    }
    ours = {kind.__name__ for kind in MAKERS}
    assert classes == ours | OTHERS
    assert {kind.__name__ for kind in ADAPTERS} == ours - {"ConcatenateKVCache", "CacheList"} | {
        "WindowCache"
    }


@pytest.mark.parametrize("kind", MAKERS, ids=lambda kind: kind.__name__)
def test_a_class_holds_what_it_did(kind: type) -> None:
    arguments, held = PROTOCOL[kind]
    assert list(inspect.signature(kind.__init__).parameters) == arguments.split()  # type: ignore[misc]
    assert set(vars(MAKERS[kind]())) == held
    assert not hasattr(kind, "meta_state")


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        (KVCache, {2: 21}),
        (QuantizedKVCache, {2: 21, 3: 32, 4: 8}),
        (RotatingKVCache, {2: 21, 3: 2, 4: 8, 5: 3}),
        (ChunkedKVCache, {2: 21, 3: 8, 4: 0}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_state_has_its_places(kind: type, numbers: dict[int, int]) -> None:
    """Keys, values, and then numbers: what files of mlx-lm have, and checkpoints."""
    slot = MAKERS[kind]()
    slot.update_and_fetch(*noise(20))
    slot.update_and_fetch(*noise(1))
    state = slot.state
    assert {at: part for at, part in enumerate(state) if isinstance(part, int)} == numbers
    assert len(state) == 2 + len(numbers)


@pytest.mark.parametrize("kind", [KVCache, QuantizedKVCache, WindowCache])
def test_a_sliced_slot_goes_on_from_any_token(kind: type) -> None:
    """Cut at a token, it shows what it would show had it never gone further."""
    slot, other = ((kind(64) if kind is WindowCache else MAKERS[kind]()) for _ in range(2))
    adapter = adapter_of(slot)
    assert isinstance(adapter, Sliced)
    assert not adapter.filled(slot)
    slot.update_and_fetch(*noise(50))
    assert adapter.filled(slot)
    assert len(adapter.arrays(slot)) == len(adapter.places)
    for index, array in enumerate(adapter.arrays(slot)):
        adapter.put(slot, index, array * mx.array(1, array.dtype))
    adapter.end_at(slot, 31)
    other.update_and_fetch(*(x[..., :31, :] for x in noise(50)))
    shown = [c.update_and_fetch(*noise(3, 1)) for c in (slot, other)]
    for a, b in zip(*map(flat, shown), strict=True):
        assert mx.array_equal(a, b)
    plain = adapter.plain(slot)
    assert type(plain).__name__ == adapter.name
    assert plain.offset == 34
    assert {a.shape[2] for a in flat(plain.state[:2])} == {34}


def flat(value: Any) -> list[mx.array]:
    return [value] if isinstance(value, mx.array) else [a for part in value for a in flat(part)]


@pytest.mark.parametrize("kind", [RotatingKVCache, ChunkedKVCache])
@pytest.mark.parametrize("lengths", [(3,), (8,), (5, 1, 1), (20,), (20, 1, 1, 1), (3, 30, 7)])
def test_a_checkpoint_goes_on_as_the_slot_did(kind: type, lengths: tuple[int, ...]) -> None:
    """Whatever was fed before, and in which chunks."""
    slot, other = MAKERS[kind](), MAKERS[kind]()
    adapter = adapter_of(slot)
    assert isinstance(adapter, Checkpointed)
    for seed, n in enumerate(lengths):
        feed(slot, n, seed)
    state = copied_tree(adapter.state(slot))
    assert adapter.position(state) == sum(lengths)
    assert adapter.agrees(state, state)
    assert adapter.adopted(slot.state, state) is not None
    held = sum(a.nbytes for a in flat(state[:2]))
    assert held <= (adapter.most_bytes(slot) or 0)
    adapter.set_state(other, state)
    for n in (1, 1, 4, 1):
        mine, their = (feed(c, n, 99) for c in (other, slot))
        for a, b in zip(mine, their, strict=True):
            assert mx.array_equal(as_set(a), as_set(b))


def feed(slot: Any, n: int, seed: int) -> Any:
    if isinstance(slot, ChunkedKVCache):
        slot.maybe_trim_front()
    return slot.update_and_fetch(*noise(n, seed))


def as_set(array: mx.array) -> mx.array:
    """The positions in a fixed order: attention does not mind it, and a ring has its own."""
    return mx.sort(array, axis=2)


def test_a_state_that_contradicts_itself_is_refused() -> None:
    for kind in (RotatingKVCache, ChunkedKVCache):
        slot = MAKERS[kind]()
        adapter = adapter_of(slot)
        assert isinstance(adapter, Checkpointed)
        feed(slot, 20, 0)
        state = adapter.state(slot)
        for at, wrong in ((2, 3), (4, 99), (3, 99)):
            lying = (*state[:at], wrong, *state[at + 1 :])
            assert not adapter.agrees(lying, state)
        keys, *rest = slot.state
        with pytest.raises(ValueError, match="contradict"):
            adapter.adopted((keys[..., :2, :], *rest), state)


def test_what_a_model_makes_is_prepared_for_use() -> None:
    window = prepared(CacheList(RotatingKVCache(max_size=8), ArraysCache(1)))
    assert [type(part) for part in parts_of(window) or ()] == [WindowCache, ArraysCache]
    assert type(prepared(ConcatenateKVCache())) is KVCache
    ring = RotatingKVCache(max_size=8, keep=2)
    assert prepared(ring) is ring
    assert class_name(WindowCache(8)) == "RotatingKVCache"
    assert parts_of(composed([KVCache()])) is not None
    assert parts_of(KVCache()) is None


def test_a_subclass_is_another_class() -> None:
    """It may do otherwise: nothing is guessed."""

    class Strange(KVCache):
        pass

    assert adapter_of(Strange()) is None
    assert class_name(Strange()) == "Strange"
