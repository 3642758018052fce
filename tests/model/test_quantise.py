"""KV in 4 or 8 bits: what it is allowed for, and that nothing depends on how a prompt was fed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from mlxcache.errors import ModelError, SnapshotRefused
from mlxcache.model import device, kv
from mlxcache.model import serialise as wire
from mlxcache.model.adapters import parts_of
from mlxcache.model.lineage import Lineage
from mlxcache.model.mlx_lm_format import PromptCacheFile, agrees, read_prompt_cache
from mlxcache.model.quantised import FEW, QuantisedCache
from mlxcache.types import join_ids, token_ids
from tests.conftest import ToyMaker
from tests.model.test_serialise import save
from tests.rounding import rounding
from tests.scheduling.matrix import ROUNDED
from tests.toys import tiny

IDS = token_ids(np.random.default_rng(5).integers(8, 240, 200, np.int32))
HEAD = 64
"""Size of heads: MLX's GPU kernels take whole groups of 64 numbers of them."""
MORE = token_ids([70, 90, 110, 75, 33])


def fed(model: Any, lineage: Lineage, ids: Any, chunk: int) -> mx.array:
    for at in range(0, len(ids), chunk):
        logits = model(mx.array(ids[at : at + chunk])[None], cache=lineage.caches)
        kv.eval_states(lineage.caches)
    lineage.length += len(ids)
    return logits[0, -1]


def lineage(layout: kv.Layout) -> Lineage:
    made = Lineage(layout)
    made.grow(400)
    return made


def quantised(caches: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Keys and values of each layer as they are read, and the size of a step at each place."""
    found = []
    for cache in quantised_caches(caches):
        numbers, *scales = (part.keys_and_values() for part in cache.parts)
        for packed, (scale, bias) in zip(numbers, scales, strict=True):
            read = mx.dequantize(packed, scale, bias, cache.form.group, cache.form.keys)
            steps = np.repeat(np.abs(np.array(scale)), cache.form.group, -1)
            found.append((np.array(read), steps))
    return found


def quantised_caches(caches: Any) -> list[QuantisedCache]:
    found = []
    for cache in caches:
        if isinstance(cache, QuantisedCache):
            found.append(cache)
        else:
            found += quantised_caches(parts_of(cache) or [])
    return found


def moved(made: Any, expected: Any) -> float:
    """The part of all keys and values that stand on another step; none is further than the next.

    Half a step more than one is allowed, because the step itself follows from what was quantised.
    """
    parts = [
        np.abs(mine - theirs) / step
        for (mine, _), (theirs, step) in zip(quantised(made), quantised(expected), strict=True)
    ]
    steps = np.concatenate([part.ravel() for part in parts])
    assert steps.max() <= 1.5
    return float((steps > 0.5).mean())


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "falcon_h1"])
@pytest.mark.parametrize("bits", [4, 8])
def test_logits_do_not_depend_on_the_chunks(toy: ToyMaker, family: str, bits: int) -> None:
    """And are those of mlx-lm, with caches that were quantised from the start.

    Sums of other chunks round otherwise, by about 1e-6, and with some libraries that is enough for
    a few keys to be quantised to the next step, and for more in the layers behind. Quantising
    changes each key by up to half a step, its mean square is a twelfth of a step's: a part `m` of
    them that differ by a step may change the logits by sqrt(12 m) of what quantising changes. Where
    these are only some ten keys, it matters which: twice that is allowed.
    """
    model = mlx_lm.load(str(toy(family, head_dim=HEAD)))[0]
    layout = kv.survey(model, kv_bits=bits)
    caches = layout.make()
    assert {c.form.sides for c in quantised_caches(caches)} == {(bits, bits)}
    expected = model(mx.array(IDS)[None], cache=caches)[0, -1]
    plain = model(mx.array(IDS)[None], cache=kv.survey(model).make())[0, -1]
    error = float(mx.abs(expected - plain).max())
    for chunk in (16, 64, len(IDS)):
        line = lineage(layout)
        made = fed(model, line, IDS, chunk)
        part = moved(line.caches, caches)
        assert part < 0.1
        tolerance = rounding(expected) + 2 * error * math.sqrt(12 * part)
        assert mx.allclose(made, expected, rtol=0, atol=tolerance).item()


@pytest.mark.parametrize(("family", "bits"), [("llama", 4), ("qwen3_5", 8)])
def test_a_quantised_lineage_rebuilt_from_parts_goes_on_like_the_whole(
    toy: ToyMaker, family: str, bits: int, tmp_path: Path
) -> None:
    model = mlx_lm.load(str(toy(family, head_dim=HEAD)))[0]
    layout = kv.survey(model, kv_bits=bits)
    line = lineage(layout)
    fed(model, line, IDS[:150], 50)
    state = line.capture()
    expected = fed(model, line, IDS[150:], 50)
    assert line.aligned()
    tail = line.detach(120, 150)
    run = wire.copied_run(layout, [(line, 40, 120)], memoryview(bytearray(1 << 20)))
    path = save(tmp_path / "run", run)
    line.truncate(40)
    line.compact(0, 40)
    again = Lineage(layout)
    again.fill([(line, 0, 40)], 300)
    again.append(wire.row_major(wire.load_run(path, layout, mx.cpu), 0, 80), 80)
    again.append_span((tail, 120, 150))
    again.restore(state)
    made = fed(model, again, IDS[150:], 50)
    assert mx.allclose(made, expected, rtol=0, atol=rounding(expected)).item()


def test_bytes_shrink_and_namespaces_differ(toy: ToyMaker) -> None:
    """Heads of 64 float32 are 256 bytes; packed, they take a scale and a bias of 4 beside."""
    model = mlx_lm.load(str(toy("llama", head_dim=HEAD)))[0]
    layouts = [kv.survey(model, kv_bits=bits) for bits in (None, 8, 4)]
    arrays = 4 * 2 * 2  # layers, heads, keys and values
    assert [x.bytes_per_token for x in layouts] == [arrays * n for n in (256, 64 + 8, 32 + 8)]
    assert len({wire.layout_key(x) for x in layouts}) == 3
    assert [x.batchable for x in layouts] == [True] * 3
    assert all(x.cacheable and not x.opaque for x in layouts)


@pytest.mark.parametrize(("size", "group"), [(64, 64), (96, 32), (128, 64), (32, 32)])
def test_the_group_divides_the_heads(toy: ToyMaker, size: int, group: int) -> None:
    model = mlx_lm.load(str(toy("llama", layers=2, head_dim=size)))[0]
    caches = kv.survey(model, kv_bits=8, evaluate=False).make()
    assert [cache.form.group for cache in caches] == [group] * 2


def test_heads_that_no_group_divides_are_refused(toy: ToyMaker) -> None:
    model = mlx_lm.load(str(toy("llama", layers=2, head_dim=48)))[0]
    with pytest.raises(ModelError, match=r"--kv-bits 4.* size 48.*32, 64 or 128"):
        kv.survey(model, kv_bits=4)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("llama4", "ChunkedKVCache"),
        ("longcat_flash", "CacheList"),
        ("deepseek_v32", "CacheList"),
        ("mamba2", "no KV"),
        ("deepseek_v41", "LayerCache"),
    ],
)
def test_what_cannot_be_quantised_is_refused_by_name(name: str, named: str) -> None:
    """Never silently left as it is, and never found out in the middle of a reply."""
    model = tiny.make_tiny(name)
    with pytest.raises(ModelError, match=f"--kv-bits 8: .*{named}"):
        kv.survey(model, kv_bits=8)


def test_a_model_that_is_silently_wrong_on_quantised_kv_is_refused(toy_llama: Path) -> None:
    real = mlx_lm.load(str(toy_llama))[0]

    class Model:
        layers = real.layers

        def __call__(self, tokens: mx.array, cache: list[Any]) -> mx.array:
            logits: mx.array = real(tokens, cache=cache)
            return -logits if isinstance(cache[0], QuantisedCache) else logits

    with pytest.raises(ModelError, match="gives other logits"):
        kv.survey(Model(), kv_bits=8)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ways of a GPU, whose operations this device has too."""
    monkeypatch.setattr(device, "kind", lambda: "gpu")


def few(layout: kv.Layout) -> set[int]:
    """The most queries for which attention multiplies quantised KV."""
    return {cache.form.few for cache in quantised_caches(layout.make())}


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("family", "bits", "most"),
    [("llama", 8, FEW), ("llama", 4, FEW), ("gemma3", 8, FEW), ("gpt_oss", 8, 0)],
)
def test_a_gpu_multiplies_for_few_queries(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch, family: str, bits: int, most: int
) -> None:
    """Logits are those of KV that is read back, which attention with sinks needs."""
    model = mlx_lm.load(str(toy(family, head_dim=HEAD)))[0]
    ways = [kv.survey(model, kv_bits=bits)]
    assert few(ways[0]) == {most}
    monkeypatch.undo()
    ways.append(kv.survey(model, kv_bits=bits))
    assert few(ways[1]) == {0}
    lines = [lineage(layout) for layout in ways]
    for count in (100, 1, FEW, FEW + 1):
        at = lines[0].length
        made, expected = (fed(model, line, IDS[at : at + count], count) for line in lines)
        assert mx.allclose(made, expected, rtol=0, atol=ROUNDED[bits]).item()


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize(
    ("size", "rows", "most"), [(32, 1, 0), (96, 1, 0), (64, 1, FEW), (64, FEW, 0)]
)
def test_a_gpu_that_multiplies_long_kv_wrongly_reads_it_back(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch, size: int, rows: int, most: int
) -> None:
    """It leaves what is beyond a multiple of 64 unwritten in a decode step, or takes no guesses."""
    model = mlx_lm.load(str(toy("llama", layers=2, head_dim=size)))[0]
    real = mx.quantized_matmul

    def wrong(x: mx.array, *packed: Any, **kinds: Any) -> mx.array:
        out = real(x, *packed, **kinds)
        if kinds["transpose"] or x.shape[-2] != rows or (rows == 1 and x.shape[-1] < 1024):
            return out
        whole = out.shape[-1] // 64 * 64 if rows == 1 else 0
        return mx.where(mx.arange(out.shape[-1]) < whole, out, 0.0)

    monkeypatch.setattr(mx, "quantized_matmul", wrong)
    assert few(kv.survey(model, kv_bits=8, evaluate=False)) == {FEW}
    assert few(kv.survey(model, kv_bits=8)) == {most}


@pytest.mark.parametrize("evaluate", [True, False])
def test_latents_in_4_bits_are_refused(toy: ToyMaker, evaluate: bool) -> None:
    model = mlx_lm.load(str(toy("deepseek_v3")))[0]
    with pytest.raises(ModelError, match=r"--kv-bits 4: .* latents \(MLA\).*: use --kv-bits 8\."):
        kv.survey(model, kv_bits=4, evaluate=evaluate)


def test_what_mlx_lm_quantised_is_refused(toy: ToyMaker, tmp_path: Path) -> None:
    """It quantises after the first chunk, so that this was computed on plain KV."""
    model = mlx_lm.load(str(toy("llama", head_dim=HEAD)))[0]
    caches = make_prompt_cache(model)
    model(mx.array(IDS)[None], cache=caches)
    path = tmp_path / "p.safetensors"
    quantised = [cache.to_quantized(group_size=32, bits=8) for cache in caches]
    save_prompt_cache(str(path), quantised, {"model": "toy"})
    with pytest.raises(SnapshotRefused, match="after the first chunk"):
        read_prompt_cache(path, kv.survey(model, kv_bits=8), mx.cpu)


def greedy(model: Any, ids: Any, caches: Any) -> list[int]:
    steps = generate_step(mx.array(ids), model, max_tokens=12, prompt_cache=caches)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_mlx_lm_goes_on_from_our_file_and_we_too(
    toy: ToyMaker, family: str, tmp_path: Path
) -> None:
    """A prompt cache with --kv-bits is of this model's namespace only with the same --kv-bits."""
    model = mlx_lm.load(str(toy(family, head_dim=HEAD)))[0]
    layout = kv.survey(model, kv_bits=8)
    line = lineage(layout)
    fed(model, line, IDS, 64)
    expected = greedy(model, join_ids(IDS, MORE), layout.make())
    path = tmp_path / "p.safetensors"
    path.write_bytes(b"".join(PromptCacheFile(line, "toy", IDS)))
    found = read_prompt_cache(path, layout, mx.cpu)
    assert agrees(model, layout, found, IDS)
    assert found.arrays is not None
    again = lineage(layout)
    again.append(found.arrays, found.length)
    again.restore(found.state)
    assert greedy(model, MORE, again.caches) == expected
    assert greedy(model, MORE, load_prompt_cache(str(path))) == expected
    for other in (4, None):
        with pytest.raises(SnapshotRefused):
            read_prompt_cache(path, kv.survey(model, kv_bits=other), mx.cpu)
