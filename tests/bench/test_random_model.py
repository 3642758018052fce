"""Models of random weights."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import generate, load
from mlx_lm.models.qwen3 import Model, ModelArgs

from mlxcache.bench.random_model import config_of, make_random
from mlxcache.bench.shapes import SIZES, Weights
from mlxcache.model.load import ModelSpec
from mlxcache.model.load import load as load_here

HELLO = [{"role": "user", "content": "Hello there, 1234"}]


@pytest.mark.parametrize(("weights", "bits"), [("bfloat16", None), ("4bit", 4)])
def test_it_loads_here_and_in_mlx_lm_and_speaks(
    tmp_path: Path, weights: Weights, bits: int | None
) -> None:
    """In its own dtype; a reply does not end, and encodes to the tokens that were generated."""
    folder = make_random(tmp_path, "tiny", weights)
    assert (
        json.loads((folder / "config.json").read_text()).get("quantization", {}).get("bits") == bits
    )
    model, tokenizer = load(str(folder))[:2]
    dtypes = {value.dtype for _, value in tree_flatten(model.parameters())}
    assert dtypes == ({mx.bfloat16} if bits is None else {mx.bfloat16, mx.uint32})
    prompt = tokenizer.apply_chat_template(HELLO, add_generation_prompt=True)
    text = generate(model, tokenizer, prompt, max_tokens=24)
    assert len(tokenizer.encode(text, add_special_tokens=False)) == 24
    loaded = load_here(ModelSpec(str(folder)))
    assert loaded.info.context_length == 131072
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == loaded.info.weights_bytes


def test_a_reply_depends_on_the_whole_prompt(tmp_path: Path) -> None:
    folder = make_random(tmp_path, "tiny")
    model, tokenizer = load(str(folder))[:2]
    words = list(range(100, 160))
    replies = {generate(model, tokenizer, [first, *words], max_tokens=16) for first in (7, 8, 9)}
    assert len(replies) > 1


def test_sizes_are_those_of_the_real_models() -> None:
    """Parameters in billions, as their model cards count them."""
    counted = {}
    for name, shape in SIZES.items():
        model = Model(ModelArgs.from_dict(config_of(shape, eos=0)))
        counted[name] = sum(one.size for _, one in tree_flatten(model.parameters())) / 1e9
    assert counted["0.6b"] == pytest.approx(0.596, abs=0.005)
    assert counted["1.7b"] == pytest.approx(1.72, abs=0.01)
    assert counted["4b"] == pytest.approx(4.02, abs=0.02)
    assert counted["8b"] == pytest.approx(8.19, abs=0.02)
