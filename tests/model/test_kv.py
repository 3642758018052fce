"""mlx-lm's cache classes, as this project uses them; fails loudly where they drift."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from mlxcache.model import kv
from mlxcache.model.adapters import WindowCache
from mlxcache.model.arrays import tree_arrays
from mlxcache.model.lineage import Lineage
from tests.rounding import rounding
from tests.toys.toy import make_toy


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    root = tmp_path_factory.mktemp("kv")
    families = ("llama", "gemma3", "qwen3_5")
    return {f: mlx_lm.load(str(make_toy(root / f, f)))[0] for f in families}


@pytest.mark.parametrize("chunks", [[100], [10, 1, 1, 200, 1, 30], [1] * 150, [64, 64, 64, 1, 1]])
def test_a_window_cache_shows_what_a_rotating_one_shows(chunks: list[int]) -> None:
    """Keys compared as sets: a ring's order is not temporal, and attention does not mind."""
    log, ring = WindowCache(64), RotatingKVCache(64)
    at = 0
    for n in chunks:
        new = mx.arange(at, at + n, dtype=mx.float32).reshape(1, 1, n, 1)
        options: tuple[dict[str, Any], ...] = ({}, {"window_size": 64})
        for kwargs in options:
            ours, theirs = log.make_mask(n, **kwargs), ring.make_mask(n, **kwargs)
            if isinstance(theirs, mx.array):
                assert mx.array_equal(ours, theirs)
            else:
                assert ours == theirs
        seen = log.update_and_fetch(new, new)[0]
        expected = ring.update_and_fetch(new, new)[0]
        assert sorted(np.asarray(seen).ravel()) == sorted(np.asarray(expected).ravel())
        at += n
    assert log.offset == ring.offset == at


def test_a_window_becomes_the_ring_that_it_stands_for() -> None:
    log = WindowCache(8)
    x = mx.arange(20, dtype=mx.float32).reshape(1, 1, 20, 1)
    log.update_and_fetch(x, x)
    ring = log.ring()
    assert (ring.offset, ring._idx, ring.keys.shape[2]) == (20, 8, 8)
    assert np.asarray(ring.keys).ravel().tolist() == list(range(12, 20))


def test_composites_are_flattened_in_order() -> None:
    a, b, c = KVCache(), ArraysCache(2), KVCache()
    assert kv.flatten([a, CacheList(b, c)]) == [a, b, c]


def test_layouts(models: dict[str, object]) -> None:
    dense, window, hybrid = (kv.survey(models[f]) for f in ("llama", "gemma3", "qwen3_5"))
    assert dense.batchable
    assert (dense.opaque, dense.recurrent, dense.checkpoint_bytes) == (False, False, 0)
    assert dense.bytes_per_token == 4 * 2 * 2 * 32 * 4
    assert window.opaque
    assert window.batchable
    assert window.rewinds
    assert not window.recurrent
    assert window.checkpoint_bytes == 64 * (dense.bytes_per_token - window.bytes_per_token)
    assert hybrid.opaque
    assert hybrid.recurrent
    assert hybrid.checkpoint_bytes > 0
    assert len(hybrid.linear) < len(hybrid.make())
    assert all(x.cacheable for x in (dense, window, hybrid))


def test_an_unknown_class_is_named_and_not_cached(models: dict[str, object]) -> None:
    class Strange(KVCache):
        pass

    class Model:
        layers = models["llama"].layers  # type: ignore[attr-defined]

        def make_cache(self) -> list[KVCache]:
            return [Strange() for _ in self.layers]

        def __call__(self, tokens: mx.array, cache: list[KVCache]) -> mx.array:
            return models["llama"](tokens, cache=cache)  # type: ignore[operator]

    layout = kv.survey(Model())
    assert layout.unknown == ("Strange",)
    assert not layout.cacheable


def feed(model: object, lineage: Lineage, ids: list[int]) -> mx.array:
    logits = model(mx.array([ids]), cache=lineage.caches)  # type: ignore[operator]
    lineage.length += len(ids)
    kv.eval_states(lineage.caches)
    return logits[0, -1]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_a_lineage_rebuilt_from_parts_goes_on_like_the_whole(
    models: dict[str, object], family: str
) -> None:
    model = models[family]
    layout = kv.survey(model)
    ids = [int(t) for t in np.random.default_rng(3).integers(10, 400, 300)]
    line = Lineage(layout)
    line.grow(512)
    feed(model, line, ids[:200])
    state = line.capture()
    expected = feed(model, line, ids[200:250])
    assert line.aligned()
    tail = line.detach(120, 200)
    line.truncate(200)
    line.compact(40, 120)
    head = Lineage(layout)
    head.grow(128)
    feed(model, head, ids[:40])
    head.compact(0, 40)
    again = Lineage(layout)
    again.fill([(head, 0, 40), (line, 40, 120), (tail, 120, 200)], 300)
    again.restore(state)
    assert (again.whole, again.length, again.capacity) == (True, 200, 300)
    made = feed(model, again, ids[200:250])
    assert mx.allclose(made, expected, rtol=0, atol=rounding(expected)).item()


def test_growing_and_truncating_keep_what_is_there(models: dict[str, object]) -> None:
    layout = kv.survey(models["llama"])
    line = Lineage(layout)
    line.grow(64)
    ids = list(range(10, 60))
    feed(models["llama"], line, ids)
    before = np.asarray(line.view(0, 0, 0, 50))
    line.grow(200)
    line.truncate(30)
    assert line.nbytes == 200 * layout.bytes_per_token
    assert np.array_equal(np.asarray(line.view(0, 0, 0, 30)), before[:, :, :30])
    assert line.aligned()


def test_appending_in_place_copies_nothing(models: dict[str, object]) -> None:
    layout = kv.survey(models["llama"])
    line = Lineage(layout)
    line.grow(200_000)
    feed(models["llama"], line, list(range(10, 60)))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for token in range(5):
        feed(models["llama"], line, [token + 10])
    assert mx.get_peak_memory() - before < line.nbytes / 16


def test_a_checkpoint_survives_what_comes_after(models: dict[str, object]) -> None:
    layout = kv.survey(models["qwen3_5"])
    line = Lineage(layout)
    line.grow(256)
    feed(models["qwen3_5"], line, list(range(10, 60)))
    state = line.capture()
    copies = [np.array(a) for a in tree_arrays(state)]
    feed(models["qwen3_5"], line, list(range(60, 90)))
    line.restore(state)
    line.truncate(50)
    feed(models["qwen3_5"], line, list(range(90, 120)))
    for kept, array in zip(copies, tree_arrays(state), strict=True):
        assert np.array_equal(kept, np.asarray(array))


def test_a_write_copies_a_buffer_that_something_still_reads() -> None:
    buffer = mx.zeros((1, 8, 4096, 64))
    mx.eval(buffer)

    def write() -> int:
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        buffer[..., :1, :] = mx.ones((1, 8, 1, 64))
        mx.eval(buffer)
        return mx.get_peak_memory() - before

    reader = buffer[..., :8, :]
    mx.eval(reader)
    assert buffer.nbytes == 8 << 20
    assert write() >= buffer.nbytes
    del reader
    assert write() < buffer.nbytes / 16
