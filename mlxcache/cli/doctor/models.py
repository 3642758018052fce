"""Checks and tables of models: how layers are cached, how many conversations and models fit."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from mlxcache.cache.capacity import (
    Fit,
    choose_bits,
    fit,
    pending_bytes,
    pool_bytes,
    transient_bytes,
)
from mlxcache.cli.doctor import Finding, judge
from mlxcache.cli.doctor.machine import Host, ram_budget
from mlxcache.cli.show import format_size_or_dash
from mlxcache.config import Settings, disk_limit, format_size
from mlxcache.config.models import ModelEntry, model_id
from mlxcache.engine.opening import spec_of
from mlxcache.errors import ModelError
from mlxcache.model.adapters import Kind
from mlxcache.model.examine import Examined, Group, examine
from mlxcache.model.hub import check, here
from mlxcache.model.sampling import describe
from mlxcache.types import ModelInfo

TOKENS = (20_000, 100_000)
"""Lengths of the conversations shown, in tokens: about an agent's first hour and long day."""

LEAST_CONTEXT = 16_000
"""Minimum context in tokens for an agent, whose tools and system prompt take most of it."""

_MOST_SETS = 4
"""Most sets of models that are listed."""

_KINDS: Mapping[Kind, str] = {
    "sliceable": "attention",
    "latent": "latent attention",
    "grouped": "compressed attention",
    "window": "sliding window of {size}",
    "recurrent": "recurrent state",
    "chunked": "attention in chunks of {size}",
    "recent": "sliding window of {size}",
    "ring": "window of {size} that keeps its start",
    "unknown": "{cls}",
}
_REUSED: Mapping[Kind, str] = {
    "sliceable": "to any token",
    "latent": "to any token",
    "window": "to any token",
    "unknown": "unknown, not cached",
}


@dataclass(frozen=True, slots=True)
class Checked:
    """An examined model of the settings; `fit` tells what fits if no other model is loaded."""

    entry: ModelEntry
    found: Examined
    fit: Fit

    def least_bytes(self, budget: int) -> int:
        """Return the bytes beside its weights that the model needs for an agent's shortest context.

        They include what is set aside for forward passes and for copies that wait to be written to
        disk. `budget`: bytes for all models with their weights.
        """
        layout, info = self.found.layout, self.found.info
        left = max(0, budget - info.weights_bytes)
        tokens = min(LEAST_CONTEXT, info.context_length)
        kv = tokens * layout.bytes_per_token + layout.running_bytes + layout.checkpoint_bytes
        return transient_bytes(left) + pending_bytes(left, layout) + kv

    def as_object(self) -> dict[str, Any]:
        info, layout, fit = self.found.info, self.found.layout, self.fit
        return {
            "id": info.id,
            "architecture": info.architecture,
            "backend": info.backend,
            "images": info.has_images,
            "weights_bytes": info.weights_bytes,
            "context_length": info.context_length,
            "layers": [asdict(group) for group in self.found.groups],
            "bytes_per_token": layout.bytes_per_token,
            "checkpoint_bytes": layout.checkpoint_bytes,
            "unknown": list(layout.unknown),
            "ram_bytes": fit.ram,
            "room_bytes": fit.room,
            "disk_bytes": fit.disk,
            "longest_tokens": min(fit.longest, info.context_length),
            "sessions": [asdict(held) for held in fit.held],
            "kv_bits": _possible(self.found.unquantised),
            "draft_model": _possible(self.found.undrafted),
        }

    def print(self, console: Console) -> None:
        layout = self.found.layout
        columns = ["layers", "kind, and how it is reused", "per token"]
        columns += ["per checkpoint"] if layout.opaque else []
        _print(console, columns, (row[: len(columns)] for row in _layers(self.found)))
        if not layout.cacheable:
            return
        columns = ["a session of", "RAM", "fit", "disk", "fit"]
        columns += ["checkpoints"] if layout.opaque else []
        _print(console, columns, (row[: len(columns)] for row in _sessions(self.fit)))
        _print(console, ["", ""], options(self.found))


def _possible(refused: str | None) -> dict[str, Any]:
    return {"possible": refused is None} | ({"why": refused} if refused else {})


# -- checks ------------------------------------------------------------------------------------


def examine_models(settings: Settings, host: Host) -> tuple[list[Finding], tuple[Checked, ...]]:
    """Examine the models that the settings name; return findings and those that could be examined.

    Of several models, the text of each finding begins with its model's label.
    """
    findings, models = [], []
    several = len(settings.entries) > 1
    shared = ram_budget(settings, host, 0) if several else None
    for entry in settings.entries:
        found, model = _examine_model(settings.for_model(entry), host, shared)
        label = f"{entry.label}: " if several else ""
        findings += [replace(one, value=f"{label}{one.value}") for one in found]
        models += [model] if model is not None else []
    if shared is not None and models:
        findings.append(examine_together(models, shared))
    return findings, tuple(models)


def _examine_model(
    settings: Settings, host: Host, shared: int | None
) -> tuple[list[Finding], Checked | None]:
    """Examine one model; a budget that it has `shared` with others includes all weights."""
    entry = settings.entries[0]
    assert entry.model is not None
    spec = replace(spec_of(settings, entry.model), id=None)

    def ram(weights: int) -> int:
        return ram_budget(settings, host, weights) if shared is None else max(0, shared - weights)

    try:
        if (path := here(entry.model)) is not None:
            check(path, entry.model)
        model = examine(spec, choose_bits(settings.kv_bits, ram))
    except ModelError as error:
        return [Finding("model", "fail", str(error))], None
    fits = fit(
        model.layout,
        ram=ram(model.info.weights_bytes),
        disk=disk_limit(settings.disk, settings.cache_dir / "store"),
        tokens=sorted({min(n, model.info.context_length) for n in TOKENS}),
    )
    findings = [
        *examine_fit(model, fits),
        *_examine_adapter(entry),
        *_examine_sampling(model.info, used=not settings.no_generation_config),
    ]
    if path is None:
        findings.append(Finding("files", "ok", "not on this machine yet, downloaded when needed"))
    return findings, Checked(entry, model, fits)


def examine_fit(found: Examined, fit: Fit) -> list[Finding]:
    info = found.info
    by = "" if info.backend == "mlx-lm" else f", run by {info.backend}"
    by += ", takes images" if info.has_images else ""
    value = f"{info.id} ({info.architecture}{by}), {format_size(info.weights_bytes)} of weights"
    if found.layout.unknown:
        names = ", ".join(found.layout.unknown)
        why = f"{value}: not cached, because its cache class {names} is unknown"
        return [Finding("model", "warn", why, "a newer version of mlxcache may support it")]
    findings = [Finding("model", "ok", value)]
    if found.unseen is not None:
        findings.append(Finding("images", "ok", f"not fed to this model: {found.unseen}"))
    if found.heads:
        by = "see --speculate auto" if info.backend == "mlx-lm" else f"{info.backend} runs it"
        use = "draft tokens" if found.layout.heads else f"not used: {by}"
        findings.append(Finding("heads", "ok", f"for multi-token prediction, {use}"))
    longest, own = min(fit.longest, info.context_length), info.context_length
    part = f"{longest:,} of the model's" if longest < own else "all of the model's"
    remedy = "raise --ram, or serve a model with fewer bits or fewer layers"
    findings.append(
        judge(
            "context",
            f"{part} {own:,} tokens fit --ram",
            (longest < min(LEAST_CONTEXT, own), "warn", remedy),
            figures={"longest_tokens": longest, "context_length": own},
        )
    )
    return findings


def _examine_sampling(info: ModelInfo, *, used: bool) -> list[Finding]:
    if not info.sampling:
        return []
    value = f"{describe(info.sampling)}, from the model's generation_config.json"
    value += "" if used else ", not used: --no-generation-config"
    return [Finding("sampling", "ok", value, figures=dict(info.sampling))]


def _examine_adapter(entry: ModelEntry) -> list[Finding]:
    """Check by their names that an adapter was trained on the model to which it is added."""
    if entry.adapter is None or entry.model is None:
        return []
    file = Path(entry.adapter).expanduser() / "adapter_config.json"
    try:
        base = json.loads(file.read_bytes()).get("model")
    except (OSError, ValueError, AttributeError) as error:
        return [Finding("adapter", "fail", f"{file} cannot be read: {error}")]

    def folder_of(model: str) -> str:
        return model_id(model).rpartition("/")[2].lower()

    if not isinstance(base, str) or folder_of(base) == folder_of(entry.model):
        return []
    value = f"{entry.adapter} was made for {base}, and is added to {entry.model}"
    return [Finding("adapter", "warn", value, "give the adapter its own base as `path`")]


def examine_together(models: Sequence[Checked], budget: int) -> Finding:
    """Report which models fit into the budget at once, each with an agent's shortest context."""
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
    """Return all sets of as many models as can fit into the budget at once."""
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


# -- tables ------------------------------------------------------------------------------------


def _layers(found: Examined) -> Iterator[Sequence[str]]:
    for group in found.groups:
        sizes = (group.layers * group.bytes_per_token, group.layers * group.checkpoint_bytes)
        yield f"{group.layers} x", _kind(group), *map(format_size_or_dash, sizes)
    if len(found.groups) > 1:
        sizes = (found.layout.bytes_per_token, found.layout.checkpoint_bytes)
        yield "", "together", *map(format_size_or_dash, sizes)


def _kind(group: Group) -> str:
    """Describe layers and how they are reused: "recurrent state: by checkpoints"."""
    size = f"{group.size:,}" if group.size else ""
    words = (_KINDS[one].format(size=size, cls=group.cls) for one in reversed(group.kinds))
    return f"{' and '.join(words)}: {_REUSED.get(group.kinds[-1], 'by checkpoints')}"


def _sessions(fit: Fit) -> Iterator[Sequence[str]]:
    for held in fit.held:
        disk = (format_size_or_dash(held.disk_bytes), f"{held.fit_disk:,}")
        yield (
            f"{held.tokens:,} tokens",
            *(format_size_or_dash(held.ram_bytes), f"{held.fit_ram:,}"),
            *(disk if fit.disk else ("-", "-")),
            f"{held.ram_checkpoints} / {held.disk_checkpoints}",
        )


def options(found: Examined) -> Iterator[tuple[str, str]]:
    """Yield the flags `--kv-bits` and `--draft-model`, each with whether the model allows it."""
    for flag, refused in (("--kv-bits", found.unquantised), ("--draft-model", found.undrafted)):
        without = flag == "--kv-bits" and found.info.backend == "mlx-vlm"
        possible = "possible, but without images" if without else "possible"
        yield flag, f"not possible: {refused}" if refused else possible


def _print(console: Console, columns: Sequence[str], rows: Iterator[Sequence[str]]) -> None:
    table = Table(
        box=None, pad_edge=False, header_style="bold", show_header=any(columns), expand=False
    )
    for at, heading in enumerate(columns):
        figure = at > 0 and bool(heading) and not heading.startswith("kind")
        table.add_column(heading, justify="right" if figure else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print()
    console.print(table)
