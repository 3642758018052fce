"""Two models loaded as one: what fits together, and what is refused before anything is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxcache.errors import ModelError
from mlxcache.model import kv
from mlxcache.model.load import ModelSpec, load
from mlxcache.model.pair import Pair, unfit
from tests.conftest import ToyMaker
from tests.rounding import rounding


def test_a_pair_is_one_model_of_both(toy: ToyMaker) -> None:
    target, draft = toy("llama"), toy("qwen3", layers=2, kv_heads=1, context=4096)
    loaded, alone = (load(ModelSpec(str(target), draft=name)) for name in (str(draft), None))
    other = load(ModelSpec(str(draft)))
    assert isinstance(loaded.model, Pair)
    pair, mine, theirs = (kv.survey(x.model) for x in (loaded, alone, other))
    assert pair.specs == mine.specs + theirs.specs
    assert pair.bytes_per_token == mine.bytes_per_token + theirs.bytes_per_token
    assert (pair.vocab_size, pair.cacheable, pair.opaque) == (512, True, False)
    assert loaded.info.weights_bytes == alone.info.weights_bytes + other.info.weights_bytes
    assert (loaded.info.id, loaded.info.draft) == (alone.info.id, other.info.id)
    assert (loaded.path, loaded.draft) == (target, draft)
    tokens = mx.array([[5, 6, 7, 8]])
    made, expected = loaded.model(tokens, cache=pair.make()), alone.model(tokens)
    assert mx.allclose(made, expected, rtol=0, atol=rounding(expected))


def test_no_more_is_served_than_the_draft_has_positions_for(toy: ToyMaker) -> None:
    names: dict[str, Any] = {
        "model": str(toy("llama")),
        "draft": str(toy("llama", layers=2, context=4096)),
    }
    assert load(ModelSpec(**names)).info.context_length == 4096
    assert load(ModelSpec(**names, context=100)).info.context_length == 100
    with pytest.raises(ModelError, match=r"^--draft-model: --context 5000"):
        load(ModelSpec(**names, context=5000))


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("qwen3_5", r"ArraysCache \(a state of one position\)"),
        ("mamba2", r"ArraysCache \(a state of one position\)"),
        ("llama4", r"ChunkedKVCache \(a state of one position\)"),
    ],
)
def test_layers_that_cannot_be_cut_back_are_refused(toy: ToyMaker, family: str, why: str) -> None:
    for model, draft, part in (
        (family, "llama", "the model"),
        ("llama", family, "the draft model"),
    ):
        with pytest.raises(ModelError, match=f"--draft-model .* {part} has {why}"):
            load(ModelSpec(str(toy(model)), draft=str(toy(draft))))


@pytest.mark.parametrize("family", ["gemma3", "gpt_oss"])
def test_sliding_windows_are_paired(toy: ToyMaker, family: str) -> None:
    """As the model and as the draft model: their KV is kept in full, so it can be cut back."""
    for model, draft in ((family, "llama"), ("llama", family)):
        loaded = load(ModelSpec(str(toy(model)), draft=str(toy(draft))))
        assert isinstance(loaded.model, Pair)
        assert not unfit(loaded.model)


def test_another_tokenizer_is_refused(toy: ToyMaker, tmp_path: Path) -> None:
    target = toy("llama")
    with pytest.raises(ModelError, match=r"another tokenizer: 600 tokens, where .* has 512"):
        load(ModelSpec(str(target), draft=str(toy("llama", vocab_size=600))))
    spoilt = Path(shutil.copytree(target, tmp_path / "spoilt"))
    file = spoilt / "tokenizer.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ModelError, match="the first that differs is 'a'"):
        load(ModelSpec(str(target), draft=str(spoilt)))


def test_a_draft_that_is_not_there_is_told_of_as_such(toy: ToyMaker, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^--draft-model: There is no folder"):
        load(ModelSpec(str(toy("llama")), draft=str(tmp_path / "nothing")))
