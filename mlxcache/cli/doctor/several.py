"""Checks of several models on one server: adapters, and which models fit in memory at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from mlxcache.cache.capacity import Fit, pending_bytes, pool_bytes, transient_bytes
from mlxcache.cli.doctor.finding import Finding
from mlxcache.cli.doctor.model import LEAST_CONTEXT
from mlxcache.config import format_size
from mlxcache.config.models import ModelEntry, model_id
from mlxcache.model.examine import Examined

_MOST_SETS = 4
"""Most sets of models that are listed."""


@dataclass(frozen=True, slots=True)
class Checked:
    """An examined model of the settings.

    `entry` is the settings' entry of the model, `found` what its files tell, and `fit` how many
    conversations fit if no other model is loaded.
    """

    entry: ModelEntry
    found: Examined
    fit: Fit

    def least_bytes(self, budget: int) -> int:
        """Return the bytes beside its weights that the model needs for an agent's shortest context.

        They are the KV and state of `LEAST_CONTEXT` tokens, or of the model's own context if it is
        shorter, with one checkpoint, and what is set aside for forward passes and for copies that
        wait to be written to disk. `budget`: bytes for all models with their weights.
        """
        layout, info = self.found.layout, self.found.info
        left = max(0, budget - info.weights_bytes)
        tokens = min(LEAST_CONTEXT, info.context_length)
        kv = tokens * layout.bytes_per_token + layout.running_bytes + layout.checkpoint_bytes
        return transient_bytes(left) + pending_bytes(left, layout) + kv


def examine_adapter(entry: ModelEntry) -> list[Finding]:
    """Check that an adapter was trained on the model to which `entry` adds it, by their names.

    Returns one finding: `warn` if the adapter names another base model, `fail` if its
    adapter_config.json cannot be read. Returns [] if the names are equal, if the adapter names no
    base model, or if `entry` has no adapter.
    """
    if entry.adapter is None or entry.model is None:
        return []
    file = Path(entry.adapter).expanduser() / "adapter_config.json"
    try:
        base = json.loads(file.read_bytes()).get("model")
    except (OSError, ValueError, AttributeError) as error:
        return [Finding("adapter", "fail", f"{file} cannot be read: {error}")]
    if not isinstance(base, str) or _folder_name(base) == _folder_name(entry.model):
        return []
    value = f"{entry.adapter} was made for {base}, and is added to {entry.model}"
    return [Finding("adapter", "warn", value, "give the adapter its own base as `path`")]


def _folder_name(model: str) -> str:
    return model_id(model).rpartition("/")[2].lower()


def examine_together(models: Sequence[Checked], budget: int) -> Finding:
    """Report which models fit into the budget at once, each with an agent's shortest context.

    Warns if none fits alone. `budget`: bytes for all models with their weights. Weights of the same
    base model count once. See `Checked.least_bytes` for the shortest context.
    """
    sets = _largest_sets(models, budget)
    figures = {
        "ram_bytes": budget,
        "weights_bytes": _weights(models),
        "together": [[one.entry.label for one in chosen] for chosen in sets],
    }
    size, ram = format_size(_weights(models)), f"--ram ({format_size(budget)})"
    if not sets:
        remedy = "raise --ram, or serve smaller models"
        return Finding("together", "warn", f"no model fits {ram}", remedy, figures)
    if len(sets[0]) == len(models):
        value = f"all {len(models)} models, {size} of weights, fit {ram} at once"
        return Finding("together", "ok", value, figures=figures)
    named = "; ".join(" and ".join(one.entry.label for one in each) for each in sets[:_MOST_SETS])
    more = f"; and {len(sets) - _MOST_SETS} more" if len(sets) > _MOST_SETS else ""
    many = f"{len(sets[0])} of {len(models)} models fit {ram} at once"
    if len(sets[0]) == 1:
        many = f"one model at a time fits {ram}"
    value = f"{many}: {named}{more}. The others are unloaded meanwhile"
    return Finding("together", "ok", value, figures=figures)


def _largest_sets(models: Sequence[Checked], budget: int) -> list[tuple[Checked, ...]]:
    """Return all sets of as many models as can fit into the budget at once.

    All sets have the same number of models. Returns [] if no model fits alone. `budget`: bytes for
    all models with their weights.
    """
    room = budget - pool_bytes(budget)

    def fits(chosen: Sequence[Checked]) -> bool:
        return _weights(chosen) + sum(one.least_bytes(budget) for one in chosen) <= room

    for size in range(len(models), 0, -1):
        if found := [chosen for chosen in combinations(models, size) if fits(chosen)]:
            return found
    return []


def _weights(models: Sequence[Checked]) -> int:
    """Return the bytes of the models' weights; those of the same base model count once."""
    return sum({one.entry.model: one.found.info.weights_bytes for one in models}.values())
