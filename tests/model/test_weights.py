"""Bytes of weights that rows of a batch share."""

from __future__ import annotations

import mlx_lm
import pytest
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

from mlxcache.model.weights import longest_pass, shared_bytes
from tests.conftest import ToyMaker


def bytes_of(module: nn.Module) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))


class Tiny(nn.Module):
    def __init__(self, *, tied: bool, chosen: int | None, quantised: bool = False):
        super().__init__()
        self.embed_tokens = nn.Embedding(100, 64)
        self.dense = nn.Linear(64, 64)
        self.experts = SwitchLinear(64, 64, 8)
        if quantised:
            self.experts = QuantizedSwitchLinear(64, 64, 8)
        if not tied:
            self.lm_head = nn.Linear(64, 100)
        if chosen is not None:
            self.top_k = chosen


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize(("chosen", "share"), [(2, 1 / 16), (8, 1.0), (None, 0.0)])
def test_experts_count_as_far_as_two_tokens_share_them(
    chosen: int | None, share: float, quantised: bool
) -> None:
    model = Tiny(tied=True, chosen=chosen, quantised=quantised)
    experts = bytes_of(model.experts)
    assert shared_bytes(model) == bytes_of(model) - experts + int(share * experts)


def test_an_embedding_counts_where_it_computes_the_logits() -> None:
    tied, untied = (Tiny(tied=each, chosen=8) for each in (True, False))
    assert shared_bytes(tied) == bytes_of(tied)
    assert shared_bytes(untied) == bytes_of(untied) - bytes_of(untied.embed_tokens)


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "deepseek_v3"])
def test_models_of_mlx_lm_have_shared_weights(toy: ToyMaker, family: str) -> None:
    model = mlx_lm.load(str(toy(family)))[0]
    experts = [m for _, m in model.named_modules() if isinstance(m, SwitchLinear)]
    assert bool(experts) == (family != "llama")
    dense = bytes_of(model) - sum(map(bytes_of, experts))
    assert dense / 2 < shared_bytes(model) < dense + sum(map(bytes_of, experts)) / 2


def test_passes_of_quantised_experts_are_as_short_as_mlx_needs() -> None:
    """By the number of experts per token, and safely where that is unknown."""
    assert longest_pass(Tiny(tied=True, chosen=8)) == 0
    assert longest_pass(Tiny(tied=True, chosen=8, quantised=True)) == 4096
    assert longest_pass(Tiny(tied=True, chosen=None, quantised=True)) <= 2048
