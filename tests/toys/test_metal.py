"""The toys have shapes that Metal's kernels take, so that tests on a Mac run these kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
from mlx_lm.models.cache import make_prompt_cache

from tests.conftest import ToyMaker
from tests.rounding import rounding
from tests.toys import metal, tiny
from tests.toys.configs import COMPRESSED, FAMILIES
from tests.toys.toy import FUSED, make_toy

KERNELS = {
    **dict.fromkeys(("qwen3_5", "qwen3_next", "kimi_linear"), "gated_delta"),
    **dict.fromkeys(("mamba2", "nemotron_h", "falcon_h1", "granitemoehybrid"), "ssm"),
    "rwkv7": "wkv7",
}
"""The kernel of each family that mlx-lm has one for."""

NO_ATTENTION = {"mamba", "mamba2", "rwkv7"}
PROMPT = [(at * 37) % 380 + 10 for at in range(70)]
OF_TINY = [3, 4, 5]


def logits(model: Any, prompt: list[int] = PROMPT) -> mx.array:
    """After a prompt and each of three more tokens."""
    cache = make_prompt_cache(model)
    parts = (prompt, [5], [6], [7])
    return mx.concatenate([model(mx.array([ids]), cache=cache)[:, -1] for ids in parts])


def test_recurrent_layers_run_in_their_kernels(toy: ToyMaker) -> None:
    """With the logits of plain MLX; a state that the threads do not cover is not a number."""
    for family, called in KERNELS.items():
        model = mlx_lm.load(str(toy(family)))[0]
        expected = logits(model)
        with metal.kernels() as kernels:
            made = logits(model)
            mx.eval(made)
        assert {name for name, kernel in kernels.items() if kernel.calls} == {called}, family
        assert mx.allclose(made, expected, rtol=0, atol=rounding(expected)).item(), family


def test_a_state_that_the_threads_do_not_cover_is_noticed(toy: ToyMaker) -> None:
    model = mlx_lm.load(str(toy("rwkv7", layers=2, head_dim=16)))[0]
    with metal.kernels():
        assert not mx.isfinite(logits(model)).all()


def test_attention_is_fused_at_these_sizes(tmp_path: Path) -> None:
    """Of a prompt, and of a token. DeepSeek V4.1's real heads, of 512, are too large for it."""
    for family in FAMILIES.keys() - COMPRESSED.keys():
        layers = 4 if family in ("gemma4", "llama4") else 2
        path = make_toy(tmp_path / family, family, layers=layers, **FUSED)
        model = mlx_lm.load(str(path))[0]
        with metal.attention_heads() as calls:
            mx.eval(logits(model))
        assert {call[0] for call in calls} == (set() if family in NO_ATTENTION else {70, 1}), family
        for queries, size, values in calls:
            assert size == values, family
            assert size in (metal.VECTOR_HEADS if queries <= 8 else metal.FULL_HEADS), family


def test_tiny_models_of_other_families_run_in_their_kernels() -> None:
    """Those of which `docs/configuration.md` says what they are."""
    for name in ("bailing_moe_v3", "kimi_k3", "olmo_hybrid", "plamo2"):
        model = tiny.make_tiny(name).eval()
        expected = logits(model, OF_TINY)
        with metal.kernels() as kernels:
            made = logits(model, OF_TINY)
            mx.eval(made)
        assert sum(kernel.calls for kernel in kernels.values()) > 0, name
        assert mx.allclose(made, expected, rtol=0, atol=rounding(expected)).item(), name
