"""What follows from a model's weights: bytes that rows share, and the longest right pass."""

from __future__ import annotations

from typing import Any

from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear

_CHOSEN = ("top_k", "num_experts_per_tok")
"""Names of the attributes in which mlx-lm's layers hold the number of experts per token."""


_MOST_GATHERED = 32_768
"""Rows, one for each token and expert, above which MLX may compute quantised experts wrongly.

Source: https://github.com/ml-explore/mlx/issues/3856
"""

_UNKNOWN_CHOSEN = 32
"""Experts per token that are assumed if their number is unknown; models have at most 22."""


def longest_pass(model: nn.Module) -> int:
    """Return the most tokens of a pass in which quantised experts are right, 0 for no limit."""
    modules = [module for _, module in model.named_modules()]
    if not any(isinstance(module, QuantizedSwitchLinear) for module in modules):
        return 0
    return _MOST_GATHERED // (max(map(_chosen, modules)) or _UNKNOWN_CHOSEN)


def shared_bytes(model: nn.Module) -> int:
    """Estimate the bytes of weights that a step of a batch reads once for all of its rows.

    Without a batch, they would be read for each row. Experts count in part: if each token uses k of
    a layer's n experts and the router spreads tokens evenly, two tokens share k * k / n experts, so
    the bytes of that many count. They do not count if k is unknown. An embedding does not count
    either, because only single rows of it are read, unless it also computes the logits.
    """
    modules = dict(model.named_modules())
    tied = not any(name.endswith("lm_head") for name in modules)
    chosen = max((k for module in modules.values() if (k := _chosen(module))), default=0)
    total = _bytes_of(model)
    for module in modules.values():
        if isinstance(module, SwitchLinear | QuantizedSwitchLinear):
            share = min(1.0, chosen / module.num_experts) ** 2
            total -= int((1 - share) * _bytes_of(module))
        elif isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and not tied:
            total -= _bytes_of(module)
    return total


def _chosen(module: Any) -> int:
    """Return the number of experts that a layer uses per token, or 0 if unknown."""
    found = (getattr(module, name, None) for name in _CHOSEN)
    return next((k for k in found if type(k) is int), 0)


def _bytes_of(module: Any) -> int:
    return sum(array.nbytes for _, array in tree_flatten(module.parameters()))
