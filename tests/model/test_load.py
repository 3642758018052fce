"""Loading a model from its folder, and saying what is wrong with it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcache.errors import ModelError
from mlxcache.model.load import ModelSpec, load


@pytest.fixture
def folder(toy_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_llama, tmp_path / "broken"))


def edit(file: Path, **changes: Any) -> None:
    value = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(value | changes))


def test_a_toy_loads_and_runs(toy_llama: Path) -> None:
    loaded = load(ModelSpec(str(toy_llama)))
    logits = loaded.model(mx.array([[1, 2, 3]]))
    assert logits.shape[:2] == (1, 3)
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello")) == "hello"
    info = loaded.info
    assert (info.id, info.architecture) == (toy_llama.name, "llama")
    assert info.context_length == info.max_context_length == 65536
    weights = mx.load(str(toy_llama / "model.safetensors"))
    assert isinstance(weights, dict)
    assert info.weights_bytes == sum(w.nbytes for w in weights.values())
    assert (info.has_thinking, info.has_tools, info.is_demo) == (False, True, False)
    assert loaded.path == toy_llama


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
def test_families_load(toy: Callable[..., Path], family: str) -> None:
    assert load(ModelSpec(str(toy(family)))).info.context_length == 65536


def test_what_was_asked_for_is_served(toy: Callable[..., Path]) -> None:
    spec = ModelSpec(str(toy("llama", thinking=True)), context=1000, id="mine", is_demo=True)
    info = load(spec).info
    assert (info.context_length, info.max_context_length) == (1000, 65536)
    assert (info.id, info.is_demo, info.has_thinking) == ("mine", True, True)


def test_more_context_than_the_model_has_is_refused(toy_llama: Path) -> None:
    """Positions that it was not trained for give nonsense."""
    with pytest.raises(ModelError, match="65536"):
        load(ModelSpec(str(toy_llama), context=65537))


def test_a_template_that_takes_an_effort_is_noted(folder: Path) -> None:
    assert not load(ModelSpec(str(folder))).info.takes_effort
    text = "{{ reasoning_effort }}{{ messages[0].content }}"
    edit(folder / "tokenizer_config.json", chat_template=text)
    assert load(ModelSpec(str(folder))).info.takes_effort


def test_ends_of_turn_come_from_every_file(folder: Path) -> None:
    """generation_config.json before config.json, and the tokenizer's own besides."""
    own = load(ModelSpec(str(folder))).tokenizer.eos_token_id
    edit(folder / "config.json", eos_token_id=7)
    assert load(ModelSpec(str(folder))).tokenizer.eos_token_ids == {own, 7}
    edit(folder / "generation_config.json", eos_token_id=[8, 9], temperature=0.7)
    assert load(ModelSpec(str(folder))).tokenizer.eos_token_ids == {own, 8, 9}


def test_a_bad_end_of_turn_leaves_the_other_files_ones(folder: Path) -> None:
    """mlx-lm takes what generation_config.json says; ids alone count, and config.json's remain."""
    own = load(ModelSpec(str(folder))).tokenizer.eos_token_id
    edit(folder / "config.json", eos_token_id=7)
    for bad in ("</s>", [True, None], {"a": 1}):
        edit(folder / "generation_config.json", eos_token_id=bad)
        assert load(ModelSpec(str(folder))).tokenizer.eos_token_ids == {own, 7}
    edit(folder / "generation_config.json", eos_token_id=["</s>", 9])
    assert load(ModelSpec(str(folder))).tokenizer.eos_token_ids == {own, 9}


def test_a_generation_config_that_is_no_object_is_named(folder: Path) -> None:
    """mlx-lm cannot read it; the file at fault is in the message."""
    for content in (b"[]", b"\xff"):
        (folder / "generation_config.json").write_bytes(content)
        with pytest.raises(ModelError, match=r"generation_config\.json is not a JSON object"):
            load(ModelSpec(str(folder)))
    (folder / "generation_config.json").write_bytes(b"{")  # mlx-lm ignores this one
    assert load(ModelSpec(str(folder))).info.sampling == {}


def test_ends_of_turn_of_a_nested_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config.pop("eos_token_id")
    (folder / "config.json").write_text(json.dumps(config | {"text_config": {"eos_token_id": 11}}))
    loaded = load(ModelSpec(str(folder)))
    assert loaded.tokenizer.eos_token_ids == {loaded.tokenizer.eos_token_id, 11}


CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
SHARDS = {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}


@pytest.mark.parametrize(
    ("file", "content", "sentence"),
    [
        (CONFIG, None, "no config.json"),
        (CONFIG, "{", "config.json cannot be read"),
        (CONFIG, "[]", "config.json is not a JSON object"),
        (CONFIG, {"model_type": None}, "config.json has no model_type"),
        (CONFIG, {"model_type": "olmo"}, "mlx-lm lacks a package"),
        (CONFIG, {"model_type": "no_such_type"}, "config.json.*no_such_type.*mlx-lm 0"),
        (CONFIG, {"num_hidden_layers": 6}, "cannot be loaded.*Missing"),
        (CONFIG, {"model_file": "model.py"}, "--trust-remote-code"),
        (WEIGHTS, None, r"no weights.*mlx_lm\.convert"),
        (WEIGHTS, "half a header", "cannot be loaded"),
        (INDEX, {"weight_map": SHARDS}, "lacks 1 of its weight files, model-00002-of-00002"),
        (INDEX, {"weight_map": [WEIGHTS]}, "index.json has no object `weight_map`"),
        ("tokenizer.json", None, "has no tokenizer"),
        ("tokenizer.json", "{", "tokenizer in .* cannot be loaded"),
    ],
)
def test_what_is_wrong_is_said(
    folder: Path, file: str, content: str | dict[str, Any] | None, sentence: str
) -> None:
    """One sentence, with the folder in it, and no traceback of another library.

    `content`: that of a file, what is changed in its JSON, or None if it and its kind are missing.
    """
    if isinstance(content, dict):
        edit(folder / file, **content)
    elif content is not None:
        (folder / file).write_text(content)
    else:
        for one in folder.glob(f"{Path(file).stem}*"):
            one.unlink()
    with pytest.raises(ModelError, match=f"(?s){sentence}") as caught:
        load(ModelSpec(str(folder)))
    assert str(folder) in str(caught.value)


def make_adapter(folder: Path, **weights: mx.array) -> Path:
    folder.mkdir(exist_ok=True)
    lora = {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    edit(folder / "adapter_config.json", num_layers=1, lora_parameters=lora)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    return folder


def test_an_adapter_changes_what_is_computed(toy_llama: Path, tmp_path: Path) -> None:
    plain = load(ModelSpec(str(toy_llama)))
    name = "model.layers.3.self_attn.q_proj"
    width = plain.model.layers[3].self_attn.q_proj.weight.shape
    adapter = make_adapter(
        tmp_path / "adapter",
        **{f"{name}.lora_a": mx.ones((width[1], 2)), f"{name}.lora_b": mx.ones((2, width[0]))},
    )
    adapted = load(ModelSpec(str(toy_llama), adapter=str(adapter)))
    held = mx.get_active_memory()
    mx.eval(adapted.model.parameters())
    assert mx.get_active_memory() == held
    assert adapted.info.weights_bytes == plain.info.weights_bytes + 4 * 2 * sum(width)
    tokens = mx.array([[1, 2, 3]])
    assert not mx.allclose(adapted.model(tokens), plain.model(tokens)).item()


def test_what_is_wrong_with_an_adapter_is_said(toy_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        load(ModelSpec(str(toy_llama), adapter=str(tmp_path / "none")))
    alien = make_adapter(tmp_path / "alien", **{"other.lora_a": mx.ones((2, 2))})
    with pytest.raises(ModelError, match="does not fit"):
        load(ModelSpec(str(toy_llama), adapter=str(alien)))
