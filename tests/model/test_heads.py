"""Heads for multi-token prediction are found in files of every form, and read as they are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3_5

from mlxcache.errors import ModelError
from mlxcache.model import kv, serialise
from mlxcache.model.fingerprint import fingerprint
from mlxcache.model.heads import Heads, WithHeads, heads_for
from mlxcache.model.load import ModelSpec, load, load_again
from mlxcache.model.weights import Bases, BaseUse
from tests.scheduling.heads import add_heads, apart, head_weights, with_heads
from tests.toys.toy import make_toy


def logits(model: Any) -> mx.array:
    caches = model.make_cache()
    model(mx.arange(10, 40)[None], cache=caches)
    found: mx.array = model.propose(mx.arange(5, 9)[None], caches)
    return found


def lacking_one(weights: dict[str, mx.array], names: tuple[str, ...]) -> dict[str, mx.array]:
    return {n: array - 1 if n.endswith(names) else array for n, array in weights.items()}


OUTER = ("pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight")
ALL = ("norm.weight", *OUTER)  # of the layer too: all end so


@pytest.mark.parametrize("names", [ALL, (*OUTER, ".norm.weight")])
def test_norms_that_are_stored_less_one_are_the_same(
    toy_qwen3_5: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """All of them, as Qwen's own files have them, or those outside of the layer alone."""
    weights = head_weights(toy_qwen3_5)
    named = {("." + n): a for n, a in weights.items()}
    less = {n[1:]: a for n, a in lacking_one(named, names).items()}
    one = with_heads(add_heads(toy_qwen3_5, tmp_path / "one", weights))
    other = with_heads(add_heads(toy_qwen3_5, tmp_path / "other", less))
    assert mx.allclose(logits(one.model), logits(other.model), atol=1e-4)
    assert one.info.weights_bytes == other.info.weights_bytes > load_plain(toy_qwen3_5)


def load_plain(path: Path) -> int:
    return load(ModelSpec(str(path)), lazy=True).info.weights_bytes


def test_norms_that_may_be_either_are_not_guessed(toy_qwen3_5: Path, tmp_path: Path) -> None:
    weights = head_weights(toy_qwen3_5)
    norm = weights["layers.0.input_layernorm.weight"]
    weights["layers.0.input_layernorm.weight"] = mx.where(mx.arange(norm.size) < 1, -0.1, norm)
    assert not isinstance(
        with_heads(add_heads(toy_qwen3_5, tmp_path / "own", weights)).model, Heads
    )
    target = load(ModelSpec(str(toy_qwen3_5)), lazy=True).model
    with pytest.raises(ModelError, match="does not tell"):
        heads_for(target, apart(toy_qwen3_5, tmp_path / "apart", weights))


def test_heads_from_another_folder_are_the_same(toy_qwen3_5: Path, tmp_path: Path) -> None:
    weights = head_weights(toy_qwen3_5)
    folder = apart(toy_qwen3_5, tmp_path / "apart", weights)
    spec = ModelSpec(str(toy_qwen3_5), draft=str(folder))
    loaded = load(spec)
    own = with_heads(add_heads(toy_qwen3_5, tmp_path / "own", weights))
    assert (loaded.info.draft, own.info.draft) == ("apart", None)
    assert mx.allclose(logits(loaded.model), logits(own.model), atol=1e-5)
    again = load_again(loaded, spec, BaseUse(Bases(), "it"))
    assert mx.allclose(logits(again), logits(own.model), atol=1e-5)


def test_quantised_heads_are_read_as_they_are(toy_qwen3_5: Path, tmp_path: Path) -> None:
    """Each with the bits that its own arrays show."""
    target: Any = load(ModelSpec(str(toy_qwen3_5))).model
    heads = Heads(target.language_model.args)
    heads.load_weights(list(head_weights(toy_qwen3_5).items()))
    nn.quantize(heads, 32, 8)
    saved = dict(tree_flatten(heads.parameters()))
    found = with_heads(add_heads(toy_qwen3_5, tmp_path / "own", saved)).model
    assert mx.allclose(logits(found), logits(WithHeads(target, heads)), atol=1e-4)


def test_experts_are_read_in_every_form(toy_qwen3_5: Path, tmp_path: Path) -> None:
    """Stacked as mlx-lm's modules have them, gate and up in one tensor, or each expert alone."""
    config = json.loads((toy_qwen3_5 / "config.json").read_text())
    experts = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32)
    experts |= {"num_experts": 4, "num_experts_per_tok": 2}
    more = {"model_type": "qwen3_5_moe", "text_config": config["text_config"] | experts}
    toy = make_toy(tmp_path / "toy", "qwen3_5", more=more)
    stacked = head_weights(toy)
    at = "layers.0.mlp"
    parts = {f"{at}.switch_mlp.{name}_proj.weight": name for name in ("gate", "up", "down")}
    rest = {name: array for name, array in stacked.items() if name not in parts}
    gate, up, down = (stacked[name] for name in parts)
    fused = {
        f"{at}.experts.gate_up_proj": mx.concatenate([gate, up], axis=-2),
        f"{at}.experts.down_proj": down,
    }
    alone = {
        f"{at}.experts.{i}.{name}_proj.weight": stacked[whole][i]
        for whole, name in parts.items()
        for i in range(4)
    }
    found = [
        logits(with_heads(add_heads(toy, tmp_path / str(n), form)).model)
        for n, form in enumerate((stacked, rest | fused, rest | alone))
    ]
    assert mx.array_equal(found[0], found[1])
    assert mx.array_equal(found[0], found[2])


def test_a_model_has_one_namespace_with_and_without_heads(
    toy_qwen3_5: Path, tmp_path: Path
) -> None:
    """What is on disk stays warm when they are switched on."""
    folder = apart(toy_qwen3_5, tmp_path / "apart", head_weights(toy_qwen3_5))
    loaded = load(ModelSpec(str(toy_qwen3_5), draft=str(folder)))
    layouts = [
        kv.survey(model) for model in (load(ModelSpec(str(toy_qwen3_5))).model, loaded.model)
    ]
    assert [one.heads != "" for one in layouts] == [False, True]
    found = {
        fingerprint(
            toy_qwen3_5,
            adapter=None,
            memo=tmp_path / "memo",
            layout_key=serialise.layout_key(layout),
            kv_format=1,
            draft=draft,
        )
        for layout, draft in zip(layouts, (None, loaded.draft), strict=True)
    }
    assert len(found) == 1


def test_heads_of_another_model_are_refused(
    toy_llama: Path, toy_qwen3_5: Path, tmp_path: Path
) -> None:
    folder = apart(toy_qwen3_5, tmp_path / "apart", head_weights(toy_qwen3_5))
    with pytest.raises(ModelError, match=r"--draft-model: .*Qwen 3\.5"):
        load(ModelSpec(str(toy_llama), draft=str(folder)))
    (folder / "model.safetensors").unlink()
    mx.save_safetensors(str(folder / "model.safetensors"), {"fc.weight": mx.zeros((3, 3))})
    for _ in range(2):
        with pytest.raises(ModelError, match="do not fit"):
            load(ModelSpec(str(toy_qwen3_5), draft=str(folder)))
        (folder / "model.safetensors").write_bytes(b"cut off")


def test_a_model_without_heads_is_loaded_as_ever(toy_qwen3_5: Path) -> None:
    loaded = with_heads(toy_qwen3_5)
    assert isinstance(loaded.model, qwen3_5.Model)
    assert kv.survey(loaded.model).heads == ""
