"""mlx-lm's own tools go on from our files, and we from theirs; what is not theirs is refused."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import (
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
)

from mlxcache.errors import SnapshotRefused, Unsupported
from mlxcache.model import kv
from mlxcache.model.arrays import tree_arrays
from mlxcache.model.lineage import Lineage
from mlxcache.model.mlx_lm_format import PromptCacheFile, agrees, prompt_ids, read_prompt_cache
from mlxcache.types import Tokens, join_ids, token_ids
from tests.conftest import ToyMaker
from tests.kinds import CACHE_KINDS

PORTABLE = [family for family in CACHE_KINDS if family != "deepseek_v41"]

TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "
TOKENS = 12
MORE: Tokens = token_ids([70, 90, 110, 75, 33])


def random_ids(count: int) -> Tokens:
    return token_ids(np.random.default_rng(count).integers(8, 240, count, np.int32))


def greedy(model: Any, ids: Tokens, caches: Any = None) -> list[int]:
    steps = generate_step(mx.array(ids), model, max_tokens=TOKENS, prompt_cache=caches)
    return [int(token) for token, _ in steps]


def lineage_of(model: Any, ids: Tokens) -> Lineage:
    """A lineage that holds `ids`, with room for more, as a server has it."""
    lineage = Lineage(kv.survey(model))
    lineage.grow(len(ids) + 300)
    for at in range(0, len(ids), 50):
        chunk = ids[at : at + 50]
        model(mx.array(chunk[None]), cache=lineage.caches)
        kv.eval_states(lineage.caches)
        lineage.length += len(chunk)
    return lineage


def written(path: Path, model: Any, ids: Tokens, name: str = "toy") -> Path:
    file = PromptCacheFile(lineage_of(model, ids), name, ids)
    with path.open("wb") as out:
        for part in file:
            out.write(part)
    assert path.stat().st_size == file.nbytes
    return path


def cache_prompt(toy: Path, path: Path, text: str) -> Path:
    command = [sys.executable, "-m", "mlx_lm", "cache_prompt", "--model", str(toy)]
    command += ["--prompt", text, "--prompt-cache-file", str(path)]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return path


@pytest.mark.parametrize("length", [1, 40, 200])
@pytest.mark.parametrize("family", PORTABLE)
def test_mlx_lm_goes_on_from_our_file(
    toy: ToyMaker, family: str, length: int, tmp_path: Path
) -> None:
    model = mlx_lm.load(str(toy(family)))[0]
    ids = random_ids(length)
    path = written(tmp_path / "p.safetensors", model, ids)
    caches, metadata = load_prompt_cache(str(path), return_metadata=True)
    assert [type(c) for c in caches] == [type(c) for c in make_prompt_cache(model)]
    assert metadata["model"] == "toy"
    assert json.loads(metadata["tokenizer_config"]) == {}
    assert greedy(model, MORE, caches) == greedy(model, join_ids(ids, MORE))


def test_a_class_that_mlx_lm_cannot_read_has_no_file(toy: ToyMaker, tmp_path: Path) -> None:
    """mlx-lm writes such a file, and does not find the class when it reads it."""
    model = mlx_lm.load(str(toy("deepseek_v41")))[0]
    caches = make_prompt_cache(model)
    mx.eval(model(mx.array(random_ids(20)[None]), cache=caches))
    path = tmp_path / "p.safetensors"
    save_prompt_cache(str(path), caches)
    with pytest.raises(KeyError, match="LayerCache"):
        load_prompt_cache(str(path))
    with pytest.raises(Unsupported, match="with a LayerCache, which this model has"):
        read_prompt_cache(path, kv.survey(model), mx.cpu)
    with pytest.raises(Unsupported, match="export a snapshot"):
        written(tmp_path / "q.safetensors", model, random_ids(20))


def test_a_file_holds_slices_and_no_room_for_more(toy_llama: Path, tmp_path: Path) -> None:
    model = mlx_lm.load(str(toy_llama))[0]
    path = written(tmp_path / "p.safetensors", model, random_ids(100))
    kv_bytes = 100 * kv.survey(model).bytes_per_token
    assert kv_bytes < path.stat().st_size < kv_bytes + 5000


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_the_command_goes_on_from_our_file(toy: ToyMaker, family: str, tmp_path: Path) -> None:
    folder = toy(family)
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    head = token_ids(tokenizer.encode(TEXT * 3))
    rest = "What does the fox do?"
    path = written(tmp_path / "p.safetensors", model, head, str(folder))
    command = [sys.executable, "-m", "mlx_lm", "generate", "--prompt-cache-file", str(path)]
    command += ["--prompt", rest, "--ignore-chat-template", "--max-tokens", str(TOKENS)]
    done = subprocess.run(
        [*command, "--temp", "0", "--verbose", "False"],
        check=True, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    ids = join_ids(head, token_ids(tokenizer.encode(rest)))
    # its streaming detokenizer drops a leading space
    assert done.stdout == tokenizer.decode(greedy(model, ids)).removeprefix(" ") + "\n"


@pytest.mark.parametrize("family", PORTABLE)
def test_our_file_comes_back_to_us(toy: ToyMaker, family: str, tmp_path: Path) -> None:
    model = mlx_lm.load(str(toy(family)))[0]
    layout = kv.survey(model)
    ids = random_ids(60)
    path = written(tmp_path / "p.safetensors", model, ids)
    found = read_prompt_cache(path, layout, mx.cpu)
    assert found.length == 60 or not layout.linear
    assert found.ids is not None
    assert np.array_equal(found.ids, ids)
    assert agrees(model, layout, found, ids) == bool(layout.linear)
    assert go_on(model, found) == greedy(model, join_ids(ids, MORE))


def go_on(model: Any, found: Any) -> list[int]:
    lineage = Lineage(kv.survey(model))
    lineage.grow(found.length + 300)
    lineage.append(found.arrays, found.length)
    lineage.restore(found.state)
    return greedy(model, MORE, lineage.caches)


@pytest.mark.parametrize("family", ["llama", "llama4", "deepseek_v3", "qwen3_5", "gemma3"])
def test_we_go_on_from_the_commands_file(toy: ToyMaker, family: str, tmp_path: Path) -> None:
    folder = toy(family)
    model, tokenizer = mlx_lm.load(str(folder))[:2]
    text = TEXT * 3 if family != "gemma3" else TEXT[:20]
    path = cache_prompt(folder, tmp_path / "p.safetensors", text)
    ids = token_ids(prompt_ids(tokenizer, text))
    layout = kv.survey(model)
    found = read_prompt_cache(path, layout, mx.cpu)
    assert (found.length, found.model, found.ids) == (len(ids), str(folder), None)
    first_is_attention = layout.linear[:1] == (0,)
    assert agrees(model, layout, found, ids) == first_is_attention
    assert go_on(model, found) == greedy(model, join_ids(ids, MORE))


def test_a_window_that_wrapped_goes_on(toy_gemma3: Path, tmp_path: Path) -> None:
    model = mlx_lm.load(str(toy_gemma3))[0]
    ids = random_ids(165)
    path = written(tmp_path / "p.safetensors", model, ids)
    found = read_prompt_cache(path, kv.survey(model), mx.cpu)
    assert found.length == 165
    assert agrees(model, kv.survey(model), found, ids)
    assert go_on(model, found) == greedy(model, join_ids(ids, MORE))


def test_other_weights_or_tokens_are_noticed(toy: ToyMaker, tmp_path: Path) -> None:
    model, other = (mlx_lm.load(str(toy("llama", seed=seed)))[0] for seed in (0, 7))
    layout = kv.survey(model)
    ids = random_ids(2000)
    caches = make_prompt_cache(model)
    model(mx.array(ids[None]), cache=caches)
    path = tmp_path / "p.safetensors"
    save_prompt_cache(str(path), caches, {"model": "toy"})
    found = read_prompt_cache(path, layout, mx.cpu)
    assert agrees(model, layout, found, ids)
    assert not agrees(other, layout, found, ids)
    assert not agrees(model, layout, found, ids[:-1])
    own = read_prompt_cache(written(tmp_path / "own", model, ids), layout, mx.cpu)
    assert agrees(model, layout, own, ids)
    assert not agrees(other, layout, own, ids)
    for at in (0, 70, 1500, 1999):
        wrong = np.array(ids)
        wrong[at] += 1
        assert not agrees(model, layout, found, token_ids(wrong))


@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16])
def test_rounding_is_no_disagreement(toy_llama: Path, dtype: mx.Dtype, tmp_path: Path) -> None:
    """Fed in other chunks, a half-precision model rounds otherwise."""
    model = mlx_lm.load(str(toy_llama))[0]
    model.set_dtype(dtype)
    ids = random_ids(300)
    path = written(tmp_path / "p.safetensors", model, ids)
    layout = kv.survey(model)
    found = read_prompt_cache(path, layout, mx.cpu)
    assert found.arrays is not None
    assert found.arrays[0][0].dtype == dtype
    assert agrees(model, layout, found, ids)


@pytest.mark.parametrize("option", ["--kv-bits", "--max-kv-size"])
def test_options_that_make_other_caches_are_named(
    toy_llama: Path, option: str, tmp_path: Path
) -> None:
    model = mlx_lm.load(str(toy_llama))[0]
    caches: list[Any] = [RotatingKVCache(64, keep=4) for _ in make_prompt_cache(model)]
    if option == "--kv-bits":
        caches = [QuantizedKVCache(group_size=32) for _ in caches]
    model(mx.array(random_ids(30)[None]), cache=caches)
    path = tmp_path / "p.safetensors"
    save_prompt_cache(str(path), caches, {"model": "toy"})
    with pytest.raises(SnapshotRefused, match=f"made with {option}"):
        read_prompt_cache(path, kv.survey(model), mx.cpu)


def test_lengths_that_contradict_each_other_are_refused(toy_llama: Path, tmp_path: Path) -> None:
    model = mlx_lm.load(str(toy_llama))[0]
    layout = kv.survey(model)
    path = tmp_path / "p.safetensors"
    for offsets in ([30, 30, 30, 29], [300] * 4, [-1] * 4):
        caches = make_prompt_cache(model)
        model(mx.array(random_ids(30)[None]), cache=caches)
        for cache, offset in zip(caches, offsets, strict=True):
            cache.offset = offset
        save_prompt_cache(str(path), caches, {"model": "toy"})
        with pytest.raises(SnapshotRefused):
            read_prompt_cache(path, layout, mx.cpu)
    written(path, model, random_ids(30))
    read: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    arrays, metadata = read
    metadata["0.mlxcache_ids"] = base64.b64encode(bytes(4 * 29)).decode()
    mx.save_safetensors(str(path), arrays, metadata)
    with pytest.raises(SnapshotRefused, match="same number of positions"):
        read_prompt_cache(path, layout, mx.cpu)
    arrays["0.2"] = mx.zeros(1 << 20, mx.int32)
    mx.save_safetensors(str(path), arrays, metadata)
    with pytest.raises(SnapshotRefused, match="version"):
        read_prompt_cache(path, layout, mx.cpu)


def test_other_models_are_refused(toy: ToyMaker, tmp_path: Path) -> None:
    ids = random_ids(30)
    others: dict[str, Callable[[], Path]] = {
        "family": lambda: toy("qwen3_5"),
        "layers": lambda: toy("llama", layers=6),
        "fewer": lambda: toy("llama", layers=2),
        "heads": lambda: toy("llama", kv_heads=4),
        "width": lambda: toy("llama", head_dim=16),
    }
    layout = kv.survey(mlx_lm.load(str(toy("llama")))[0])
    for name, other in others.items():
        model = mlx_lm.load(str(other()))[0]
        path = written(tmp_path / f"{name}.safetensors", model, ids)
        with pytest.raises(SnapshotRefused):
            read_prompt_cache(path, layout, mx.cpu)


@pytest.fixture(scope="module")
def sample(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, Any]:
    """A file with every kind of slot that has numbers, and its layout."""
    model = mlx_lm.load(str(toy("llama4")))[0]
    path = tmp_path_factory.mktemp("sample") / "p.safetensors"
    return written(path, model, random_ids(100)).read_bytes(), kv.survey(model)


def outcome(path: Path, content: bytes, layout: Any) -> None:
    """It is refused, or it is read to arrays of the model's shapes and one length."""
    path.write_bytes(content)
    try:
        found = read_prompt_cache(path, layout, mx.cpu)
    except SnapshotRefused:
        return
    assert found.arrays is not None
    for slot, spec in zip(found.arrays, layout.specs, strict=True):
        assert [(a.shape, a.dtype) for a in slot] == [
            ((1, heads, found.length, dim), dtype) for heads, dim, dtype in spec
        ]
    mx.eval(found.arrays, tree_arrays(found.state))


FUZZ = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@FUZZ
@given(data=st.data())
def test_other_headers(tmp_path: Path, sample: tuple[bytes, Any], data: st.DataObject) -> None:
    content, layout = sample
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    target = header if data.draw(st.booleans()) else header["__metadata__"]
    key = data.draw(st.sampled_from(sorted(target)))
    if data.draw(st.booleans()):
        del target[key]
    elif target is header and key != "__metadata__":
        field = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        small = st.lists(st.integers(0, 300), max_size=4)
        target[key][field] = data.draw(small | st.sampled_from(["F32", "I32", "U8", "BF16"]))
    else:
        target[key] = data.draw(st.text(max_size=9) | st.sampled_from(["KVCache", "1.0", "none"]))
    text = json.dumps(header).encode()
    outcome(tmp_path / "f", len(text).to_bytes(8, "little") + text + content[8 + size :], layout)


@FUZZ
@given(at=st.integers(0), byte=st.integers(0, 255), small=st.booleans())
def test_other_bytes(
    tmp_path: Path, sample: tuple[bytes, Any], at: int, byte: int, small: bool
) -> None:
    content, layout = sample
    header = 8 + int.from_bytes(content[:8], "little")
    changed = bytearray(content)
    changed[at % (header if small else len(content))] = byte
    outcome(tmp_path / "f", bytes(changed), layout)


@FUZZ
@given(content=st.binary(max_size=200))
def test_any_bytes(tmp_path: Path, sample: tuple[bytes, Any], content: bytes) -> None:
    (tmp_path / "f").write_bytes(content)
    with pytest.raises(SnapshotRefused):
        read_prompt_cache(tmp_path / "f", sample[1], mx.cpu)


def test_lengths_that_are_not_its_own(tmp_path: Path, sample: tuple[bytes, Any]) -> None:
    content, layout = sample
    for length in (0, 1, 7, 8, 9, 100, len(content) // 2, len(content) - 1):
        (tmp_path / "f").write_bytes(content[:length])
        with pytest.raises(SnapshotRefused):
            read_prompt_cache(tmp_path / "f", layout, mx.cpu)
