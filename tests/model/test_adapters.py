"""mlx-lm's cache classes, as the adapters rely on them; fails loudly where they drift."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    RotatingKVCache,
)
from mlx_lm.models.deepseek_v41 import LayerCache

from mlxcache.model.adapters import (
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
from mlxcache.model.grouped import GroupedCache
from tests.toys.cache_classes import cache_classes

OTHERS = {
    "_BaseCache": "the base of the others",
    "BatchKVCache": "several sequences: `rows` makes it of a KVCache for each",
    "BatchRotatingKVCache": "several sequences: `rows` makes it of a RotatingKVCache for each",
    "QuantizedKVCache": "made for files only: models get a `QuantisedCache`",
    "TokenBuffer": "token ids, of which no layer has a cache",
    "LRUPromptCache": "prompt caches of mlx-lm's own server",
    "CacheEntry": "an entry of LRUPromptCache",
    "CacheOrder": "the order of the entries of LRUPromptCache",
}
"""Classes of mlx-lm that are not the cache of a layer for one sequence, and what they are."""

MAKERS: dict[type, Any] = {
    KVCache: KVCache,
    ConcatenateKVCache: ConcatenateKVCache,
    RotatingKVCache: lambda: RotatingKVCache(max_size=8, keep=2),
    ChunkedKVCache: lambda: ChunkedKVCache(8),
    ArraysCache: lambda: ArraysCache(2),
    CacheList: lambda: CacheList(KVCache(), ArraysCache(1)),
    LayerCache: lambda: LayerCache(8),
}
OPAQUE = {
    RotatingKVCache: MAKERS[RotatingKVCache],
    ChunkedKVCache: MAKERS[ChunkedKVCache],
    WindowCache: lambda: WindowCache(8),
}
PROTOCOL: dict[type, tuple[str, set[str]]] = {
    KVCache: ("self", {"keys", "values", "offset"}),
    ConcatenateKVCache: ("self", {"keys", "values", "offset"}),
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
    LayerCache: (
        "self window_size",
        {"window_size", "offset", "window", "compress_kv", "index_k", "pending_kv", "pending_gate"},
    ),
}
"""What each is made with, and all that it holds: the adapters read and write these."""


def noise(tokens: int, seed: int = 0) -> tuple[mx.array, mx.array]:
    made = np.random.default_rng(seed).normal(size=(2, 1, 2, tokens, 32)).astype(np.float32)
    return mx.array(made[0]), mx.array(made[1])


def layer_of(ratio: int, *, source: bool = True, index: bool = True) -> Any:
    attention = SimpleNamespace(ratio=ratio, is_kv_source=source, is_index_source=index)
    attention.head_dim, attention.indexer = 32, SimpleNamespace(head_dim=16)
    return SimpleNamespace(self_attn=attention)


def test_every_class_of_mlx_lm_has_a_place() -> None:
    """A new one, of `mlx_lm.models.cache` or of one model, needs an adapter or a reason."""
    ours = {(kind.__module__.rpartition(".")[2], kind.__name__) for kind in MAKERS}
    assert cache_classes() == ours | {("cache", name) for name in OTHERS}
    for maker in MAKERS.values():
        cache = prepared(maker(), layer_of(4))
        assert all(adapter_of(part) is not None for part in parts_of(cache) or [cache])


@pytest.mark.parametrize(
    "source",
    [
        "class NewCache:\n    pass\n",
        "class Rows(Base):\n    def update_and_fetch(self, keys, values):\n        pass\n",
        "class Model:\n    def make_cache(self):\n        return [other.Held(8) for _ in range(4)]",
    ],
)
def test_a_new_class_of_a_model_is_found(tmp_path: Path, source: str) -> None:
    (tmp_path / "cache.py").write_text("class KVCache:\n    pass\n")
    (tmp_path / "fresh.py").write_text(source)
    (found,) = cache_classes(tmp_path) - {("cache", "KVCache")}
    assert found[0] == "fresh"


def test_a_class_that_has_changed_is_unknown() -> None:
    """What is written to it must be all that it holds."""
    layer = layer_of(4)
    assert type(prepared(LayerCache(8), layer)) is GroupedCache
    changed = LayerCache(8)
    changed.more = None
    assert prepared(changed, layer) is changed
    assert adapter_of(changed) is None
    assert class_name(changed) == class_name(prepared(LayerCache(8), layer)) == "LayerCache"


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


def test_a_sliced_slot_goes_on_from_any_token() -> None:
    """Cut at a token, it shows what it would show had it never gone further."""
    slot, other = KVCache(), KVCache()
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


@pytest.mark.parametrize("kind", [RotatingKVCache, ChunkedKVCache, WindowCache])
@pytest.mark.parametrize("lengths", [(3,), (8,), (5, 1, 1), (20,), (20, 1, 1, 1), (3, 30, 7)])
def test_a_checkpoint_goes_on_as_the_slot_did(kind: type, lengths: tuple[int, ...]) -> None:
    slot, other = OPAQUE[kind](), OPAQUE[kind]()
    adapter = adapter_of(slot)
    assert isinstance(adapter, Checkpointed)
    for seed, n in enumerate(lengths):
        feed(slot, n, seed)
    state = copied_tree(adapter.state(slot))
    assert adapter.position(state) == sum(lengths)
    assert adapter.agrees(state, state)
    assert adapter.adopted(adapter.plain(slot).state, state) is not None
    held = sum(a.nbytes for a in flat(state[:2]))
    assert held <= (adapter.most_bytes(slot))
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
    for maker in OPAQUE.values():
        slot = maker()
        adapter = adapter_of(slot)
        assert isinstance(adapter, Checkpointed)
        feed(slot, 20, 0)
        state = adapter.state(slot)
        for at, wrong in ((2, 3), (4, 99), (3, 99)):
            lying = (*state[:at], wrong, *state[at + 1 :])
            assert not adapter.agrees(lying, state)
        keys, *rest = adapter.plain(slot).state
        with pytest.raises(ValueError, match="contradict"):
            adapter.adopted((keys[..., :2, :], *rest), state)


def test_what_a_model_makes_is_prepared_for_use() -> None:
    window = prepared(CacheList(RotatingKVCache(max_size=8), ArraysCache(1)))
    assert [type(part) for part in parts_of(window) or ()] == [WindowCache, ArraysCache]
    assert type(prepared(ConcatenateKVCache())) is KVCache
    ring = RotatingKVCache(max_size=8, keep=2)
    assert prepared(ring) is ring
    assert class_name(WindowCache(8)) == "RotatingKVCache"
    assert parts_of(composed(CacheList(), [KVCache()])) is not None
    assert parts_of(KVCache()) is None


def test_a_subclass_is_another_class() -> None:
    class Strange(KVCache):
        pass

    assert adapter_of(Strange()) is None
    assert class_name(Strange()) == "Strange"
