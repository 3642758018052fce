"""Checks and tables of a model: how its layers are cached, and how many conversations fit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mlxcache.cache.capacity import Fit
from mlxcache.cli.doctor.finding import Finding
from mlxcache.config import format_size
from mlxcache.model.examine import Examined, Group, Kind
from mlxcache.model.sampling import describe
from mlxcache.types import ModelInfo

TOKENS = (20_000, 100_000)
"""Lengths of the conversations shown, in tokens: about an agent's first hour and long day."""

LEAST_CONTEXT = 16_000
"""Minimum context in tokens for an agent, whose tools and system prompt take most of it."""

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


def kind(group: Group) -> str:
    """Describe a group of layers in one line: their kind, and up to where their KV can be reused.

    Examples: "attention: to any token", "recurrent state: by checkpoints".
    """
    size = f"{group.size:,}" if group.size else ""
    words = (_KINDS[one].format(size=size, cls=group.cls) for one in reversed(group.kinds))
    return f"{' and '.join(words)}: {_REUSED.get(group.kinds[-1], 'by checkpoints')}"


def examine_fit(found: Examined, fit: Fit) -> list[Finding]:
    """Check that the model can be cached and that `--ram` holds a context for agents.

    `found`: the model. `fit`: its capacity within the budgets of RAM and disk. Warns if the longest
    prompt that fits has fewer than `LEAST_CONTEXT` (16,000) tokens, or fewer than the model's own
    context length if that is shorter.
    """
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
    longest, own = min(fit.longest, info.context_length), info.context_length
    value = f"{longest:,} of the model's {own:,} tokens fit --ram"
    figures = {"longest_tokens": longest, "context_length": own}
    remedy = "raise --ram, or serve a model with fewer bits or fewer layers"
    if longest < min(LEAST_CONTEXT, own):
        findings.append(Finding("context", "warn", value, remedy, figures))
    elif longest < own:
        findings.append(Finding("context", "ok", value, figures=figures))
    else:
        value = f"all of the model's {own:,} tokens fit --ram"
        findings.append(Finding("context", "ok", value, figures=figures))
    return findings


def examine_sampling(info: ModelInfo, *, used: bool) -> list[Finding]:
    """Report the default sampling settings that come with the model, such as a temperature.

    `used` is False if the server's settings tell to ignore them. Returns an empty list if the model
    has none.
    """
    if not info.sampling:
        return []
    value = f"{describe(info.sampling)}, from the model's generation_config.json"
    value += "" if used else ", not used: --no-generation-config"
    return [Finding("sampling", "ok", value, figures=dict(info.sampling))]


def layers(found: Examined) -> Iterator[Sequence[str]]:
    """Yield a table row for each group of layers, then one for the sum if there are several.

    A row holds, as text, the number of layers, their kind (see `kind`), and the bytes that one
    token and one checkpoint take in all these layers.
    """
    for group in found.groups:
        yield (
            f"{group.layers} x",
            kind(group),
            _size(group.layers * group.bytes_per_token),
            _size(group.layers * group.checkpoint_bytes),
        )
    if len(found.groups) > 1:
        layout = found.layout
        yield "", "together", _size(layout.bytes_per_token), _size(layout.checkpoint_bytes)


def sessions(fit: Fit, *, checkpoints: bool) -> Iterator[Sequence[str]]:
    """Yield a table row of texts for each length of conversation in `fit`.

    A row holds the length in tokens, then the size in RAM, how many such conversations fit there,
    and the same for the disk ("-" without a disk tier). With `checkpoints`, a last text has the
    numbers of checkpoints of one conversation in RAM and on disk, as in "3 / 5".
    """
    for held in fit.held:
        row = [f"{held.tokens:,} tokens", *_tier(held.ram_bytes, held.fit_ram)]
        row += _tier(held.disk_bytes, held.fit_disk) if fit.disk else ["-", "-"]
        if checkpoints:
            row.append(f"{held.ram_checkpoints} / {held.disk_checkpoints}")
        yield row


def _tier(nbytes: int, fits: int) -> tuple[str, str]:
    return _size(nbytes), f"{fits:,}"


def _size(nbytes: int) -> str:
    return format_size(nbytes) if nbytes else "-"


def options(found: Examined) -> Iterator[tuple[str, str]]:
    """Yield the flags `--kv-bits` and `--draft-model`, each with a text on its use with the model.

    The text begins with "possible", or is "not possible: " and the reason.
    """
    for flag, refused in (
        ("--kv-bits", found.unquantised),
        ("--draft-model", found.undrafted),
    ):
        without = flag == "--kv-bits" and found.info.backend == "mlx-vlm"
        possible = "possible, but without images" if without else "possible"
        yield flag, f"not possible: {refused}" if refused else possible


def as_object(found: Examined, fit: Fit) -> dict[str, Any]:
    """Return what `doctor --json` has on one model: its description `found` and capacity `fit`.

    Sizes are in bytes.
    """
    info, layout = found.info, found.layout
    return {
        "id": info.id,
        "architecture": info.architecture,
        "backend": info.backend,
        "images": info.has_images,
        "weights_bytes": info.weights_bytes,
        "context_length": info.context_length,
        "layers": [asdict(group) for group in found.groups],
        "bytes_per_token": layout.bytes_per_token,
        "checkpoint_bytes": layout.checkpoint_bytes,
        "unknown": list(layout.unknown),
        "ram_bytes": fit.ram,
        "room_bytes": fit.room,
        "disk_bytes": fit.disk,
        "longest_tokens": min(fit.longest, info.context_length),
        "sessions": [asdict(held) for held in fit.held],
        "kv_bits": _possible(found.unquantised),
        "draft_model": _possible(found.undrafted),
    }


def _possible(refused: str | None) -> dict[str, Any]:
    return {"possible": refused is None} | ({"why": refused} if refused else {})
