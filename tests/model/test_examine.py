"""Examining a model without reading its weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

import mlx.core as mx
import pytest

from mlxcache.cache.capacity import choose_bits
from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.examine import examine
from mlxcache.model.load import ModelSpec, load
from mlxcache.model.pair import make_pair
from tests.memory import rounding_bytes
from tests.toys.toy import make_toy

KINDS: Mapping[str, set[str]] = {
    "llama": {"sliceable"},
    "gemma3": {"window", "sliceable"},
    "qwen3_5": {"recurrent", "sliceable"},
    "mamba2": {"recurrent"},
    "llama4": {"chunked", "sliceable"},
    "deepseek_v3": {"latent"},
    "falcon_h1": {"sliceable", "recurrent"},
    "deepseek_v41": {"grouped", "recent"},
}


@pytest.mark.parametrize("family", [*KINDS, "deepseek_v32", "kimi_linear", "rwkv7"])
def test_what_is_found_without_computing_is_what_a_server_finds(
    family: str, tmp_path: Path
) -> None:
    path = make_toy(tmp_path, family)
    found = examine(ModelSpec(str(path)))
    served = kv.survey(load(ModelSpec(str(path))).model)
    for field in fields(kv.Layout):
        if field.name != "make":
            assert getattr(found.layout, field.name) == getattr(served, field.name), field.name
    assert served.bytes_per_token == sum(g.layers * g.bytes_per_token for g in found.groups)
    assert served.checkpoint_bytes == sum(g.layers * g.checkpoint_bytes for g in found.groups)
    if family in KINDS:
        assert {kind for group in found.groups for kind in group.kinds} == KINDS[family]


def test_weights_are_not_read(tmp_path: Path) -> None:
    """So that a model that is larger than the memory can be examined."""
    path = make_toy(tmp_path, "qwen3_5", hidden=256)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    found = examine(ModelSpec(str(path)))
    assert found.info.weights_bytes > 5_000_000
    assert mx.get_peak_memory() - before < 100_000 + rounding_bytes(4)


def test_a_window_says_how_long_it_is(tmp_path: Path) -> None:
    path = make_toy(tmp_path, "gemma3", window=128)
    sizes = {g.kinds: (g.size, g.layers) for g in examine(ModelSpec(str(path))).groups}
    assert sizes == {("window",): (128, 2), ("sliceable",): (None, 2)}


def test_a_model_whose_weights_do_not_fit_its_config_is_a_sentence(tmp_path: Path) -> None:
    path = make_toy(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 6}))
    with pytest.raises(ModelError, match="cannot be loaded"):
        examine(ModelSpec(str(path)))


@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_of_a_model_that_is_not_here_the_configuration_suffices(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its layout is that of the model with its weights, and nothing else is downloaded."""
    path = make_toy(tmp_path / "whole", family)
    config = json.loads((path / "config.json").read_text()) | {"torch_dtype": "float32"}
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("mlxcache.model.examine.here", lambda *_: None)
    monkeypatch.setattr("mlxcache.model.examine.outline", lambda *_: (bare, 123))
    found = examine(ModelSpec("owner/name"))
    monkeypatch.undo()
    whole = examine(ModelSpec(str(path)))
    assert found.groups == whole.groups
    assert found.layout.states == whole.layout.states
    assert (found.info.id, found.info.weights_bytes) == ("owner/name", 123)
    assert found.info.context_length == whole.info.context_length


def test_without_a_word_on_precision_it_is_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As models on the Hub are, quantised ones too: their activations are bfloat16."""
    file = make_toy(tmp_path, "llama") / "config.json"
    monkeypatch.setattr("mlxcache.model.examine.here", lambda *_: None)
    monkeypatch.setattr("mlxcache.model.examine.outline", lambda *_: (file.parent, 123))
    for stated, dtype in (({}, mx.bfloat16), ({"text_config": {"dtype": "float16"}}, mx.float16)):
        config = {k: v for k, v in json.loads(file.read_text()).items() if "dtype" not in k}
        file.write_text(json.dumps(config | stated))
        assert examine(ModelSpec("owner/name")).layout.specs[0][0][2] == dtype


@pytest.mark.parametrize(
    ("family", "kv_bits", "draft"),
    [
        ("llama", None, None),
        ("gemma3", None, None),
        ("llama4", "ChunkedKVCache", "ChunkedKVCache"),
        ("qwen3_5", None, "ArraysCache"),
        ("mamba2", "no KV", "ArraysCache"),
        ("deepseek_v3", None, None),
    ],
)
def test_what_a_model_cannot_do_is_named(
    family: str, kv_bits: str | None, draft: str | None, tmp_path: Path
) -> None:
    path = make_toy(tmp_path, family, head_dim=64)
    found = examine(ModelSpec(str(path)))
    model = load(ModelSpec(str(path))).model
    assert _raises(lambda: make_pair(model, model)) == (draft is not None)
    assert _raises(lambda: kv.survey(model, kv_bits=8)) == (kv_bits is not None)
    for refused, word in ((found.unquantised, kv_bits), (found.undrafted, draft)):
        assert (refused is None) == (word is None)
        assert word is None or word in str(refused)


def _raises(action: Callable[[], object]) -> bool:
    try:
        action()
    except ModelError:
        return True
    return False


def test_fewer_bits_and_a_draft_are_in_the_figures(tmp_path: Path) -> None:
    path = str(make_toy(tmp_path / "model", head_dim=64))
    draft = str(make_toy(tmp_path / "draft", layers=2, head_dim=64))
    plain = examine(ModelSpec(path)).layout.bytes_per_token
    served = load(ModelSpec(path)).model
    for bits in (4, 8):
        layout = examine(ModelSpec(path), choose_bits(bits, lambda weights: 0)).layout
        assert layout.bytes_per_token == kv.survey(served, kv_bits=bits).bytes_per_token < plain
    both = examine(ModelSpec(path, draft=draft))
    assert both.layout.bytes_per_token == plain * 3 // 2
    assert both.info.weights_bytes > examine(ModelSpec(path)).info.weights_bytes
    latents = str(make_toy(tmp_path / "latents", "deepseek_v3"))
    with pytest.raises(ModelError, match=r"--kv-bits 4: this model keeps latents .* --kv-bits 8"):
        examine(ModelSpec(latents), choose_bits(4, lambda weights: 0))
    recurrent = str(make_toy(tmp_path / "recurrent", "qwen3_5"))
    with pytest.raises(ModelError, match="--draft-model"):
        examine(ModelSpec(path, draft=recurrent))
    with pytest.raises(ModelError, match="leave out --draft-model"):
        examine(ModelSpec(path, draft="owner/absent-name"))
