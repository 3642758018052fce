"""Division of the memory of `--ram`: a model's budget and bytes set aside; charges for weights.

MLX thread only.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Set
from dataclasses import dataclass
from math import ceil
from typing import NoReturn

from mlxcache.cache.capacity import (
    MOST_PENDING,
    choose_bits,
    pending_bytes,
    pool_bytes,
    transient_bytes,
    with_pool,
)
from mlxcache.cache.ram import RamTier
from mlxcache.cache.shared_ram import POOL, SharedRam
from mlxcache.config import (
    Settings,
    explain_auto,
    format_size,
    machine_bytes,
    memory_for,
    ram_limit,
    wired_size,
)
from mlxcache.errors import BadRequest, Busy, ModelError
from mlxcache.model import device
from mlxcache.model.examine import ChooseBits
from mlxcache.model.kv import Layout
from mlxcache.model.lineage import Lineage, NewLineage
from mlxcache.model.load import Loaded
from mlxcache.model.weights import Bases, BaseUse
from mlxcache.scheduling import cost
from mlxcache.tree.budget import Budget


class WeightsAccount:
    """Charges for the weights of several models; an array that several models use counts once.

    The kind `weights:NAME` is for arrays that only the model NAME uses, `weights:BASE (shared)` for
    those of the base model BASE that several models use.
    """

    def __init__(self, charge: Callable[[str, int], None]):
        self.bases = Bases()
        self._charge = charge
        self._granted: dict[BaseUse, int] = {}
        self._charged: Counter[str] = Counter()

    def grant(self, use: BaseUse, nbytes: int) -> None:
        """Charge the weights of a model, before or after they are read."""
        self._granted[use] = nbytes
        self.settle()

    def remove(self, use: BaseUse) -> None:
        use.release()
        self._granted.pop(use, None)
        self.settle()

    def settle(self) -> None:
        due = Counter({f"weights:{name}": n for name, n in self.bases.charges().items()})
        for use, nbytes in self._granted.items():
            due[f"weights:{use.name}"] += max(0, nbytes - use.held_bytes)
        changes = {kind: due[kind] - self._charged[kind] for kind in due.keys() | self._charged}
        for kind, change in sorted(changes.items(), key=lambda item: item[1]):
            if change:
                self._charge(kind, change)
        self._charged = due

    # -- sizes -------------------------------------------------------------------------------------

    def freed_by(self, uses: Set[BaseUse]) -> int:
        """Return the bytes of weights that unloading the models of `uses` would free."""
        own = sum(max(0, self._granted.get(use, 0) - use.held_bytes) for use in uses)
        return own + self.bases.freed_by(uses)


def union_bytes(weights: list[tuple[BaseUse, int]]) -> int:
    """Return the bytes of the weights of several models that are loaded at once."""
    parts = {part: n for use, _ in weights for part, n in use.needed.items()}
    own = sum(max(0, nbytes - sum(use.needed.values())) for use, nbytes in weights)
    return own + sum(parts.values())


log = logging.getLogger("mlxcache.engine")

MIN_CONTEXT = 512
"""Fewest tokens for which the budget must have memory; with fewer an agent cannot work."""

IMAGES_PART = 8
"""Images have at most this part of the budget: an eighth."""

_MOST_MEGABYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Shared:
    """The shared budget of several models, at the time when one of them is loaded.

    MLX's pool and the weights of this model are charged to it already. `outside`: bytes that this
    model's cache can never have: its own weights, and all that models with `keep = "always"` take.
    """

    ram: SharedRam
    outside: int


@dataclass(frozen=True, slots=True)
class Bound:
    """Limit of the budget of a model, and the setting that it follows from, as in `--ram 8GB`.

    `least(size)`: the least value of that setting, in bytes, that allows a budget of `size` bytes.
    """

    limit: int
    setting: str
    least: Callable[[int], int]


def _bound(settings: Settings, weights: int, shared: Shared | None, others: int | None) -> Bound:
    if shared is None:
        limit = whole = read_ram_limit(settings, weights)
        if others is not None and others < limit:
            log.warning("RAM budget limited to %s by another rank's memory", format_size(others))
            limit = whole = others
        bound = Bound(limit, f"--ram {settings.ram}", lambda size: size)
    else:
        outside, whole = shared.outside, shared.ram.budget.limit
        limit = max(0, shared.ram.limit - outside)
        bound = Bound(limit, f"--ram {settings.ram}", lambda size: with_pool(size + outside))
    entry = settings.entries[0]
    share = entry.share_of(whole)
    if share is None or share - weights >= limit:
        return bound
    setting = f"ram = {entry.ram} of the model {entry.label}"
    return Bound(max(0, share - weights), setting, lambda size: size + weights)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Division of the memory of a model before its first request, in bytes.

    `machine`: memory available to weights and cache together. `transient` is set aside for forward
    passes, `pending` for copies waiting to be written to disk; both are reserved in `budget`.
    `refuse(what)` raises ModelError, or BadRequest for a model with a shared budget: `setting`, the
    predicate `what`, such as "is too small", and the least value that would do.
    """

    budget: Budget
    cost: cost.Cost
    machine: int
    transient: int
    pending: int
    setting: str
    refuse: Callable[[str], NoReturn]


def plan_memory(
    loaded: Loaded,
    layout: Layout,
    settings: Settings,
    shared: Shared | None = None,
    others: int | None = None,
    *,
    lineage: NewLineage = Lineage,
) -> MemoryPlan:
    """Measure the costs of a model, and return its budget with bytes reserved in it.

    `others`: the smallest of the other ranks' budgets in bytes, for a divided model. Raises
    ModelError, or BadRequest with `shared`, if the limit of the budget is too small for those
    bytes, and Busy if other models use the memory at present. MLX thread only.
    """
    whole = memory_for(machine_bytes(), device.working_set_bytes())
    bound = _bound(settings, loaded.info.weights_bytes, shared, others)
    limit = bound.limit
    if shared is None:
        wire(settings, loaded.info.weights_bytes + limit)
        device.prepare(pool_bytes(limit))
    else:
        shared.ram.make_room(limit // 8)  # for the passes that are measured
    kind, most = device.kind(), settings.prefill_chunk
    measured = cost.measure(loaded.model, layout, limit // 8, kind=kind, most=most, lineage=lineage)
    drafts = loaded.draft is not None or bool(layout.heads)
    checked = settings.num_draft_tokens if drafts else 0
    if settings.speculate != "off" and layout.rewinds:
        checked = max(checked, settings.speculate_tokens)
    if checked:  # a pass computes the logits of each of these tokens too
        measured = measured.for_drafts(checked)

    def refuse(what: str) -> NoReturn:
        least = _least_budget(loaded, layout, measured, settings, pooled=shared is None)
        text = f"{bound.setting} {what}: set at least {ceil(bound.least(least) / 10**6)}MB"
        raise ModelError(text) if shared is None else BadRequest(text, param="model")

    kinds = _divide(limit, loaded, layout, measured, settings)
    if shared is None:
        budget = Budget(limit)
    else:
        kinds["pool"] = 0
        budget = Budget(limit, shared.ram.budget)
        shared.ram.make_room(sum(kinds.values()))
    if not all(budget.reserve(kind, size) for kind, size in kinds.items()):
        budget.release_all()
        if shared is not None and sum(kinds.values()) <= limit:
            raise Busy("Other models use the memory that this one needs: try again.")
        refuse("is too small to run this model")
    transient, pending = kinds["transient"], kinds["pending"]
    return MemoryPlan(budget, measured, whole, transient, pending, bound.setting, refuse)


def bits_of(settings: Settings) -> ChooseBits:
    return choose_bits(settings.kv_bits, lambda weights: _ram_limit(settings, weights))


def _ram_limit(settings: Settings, weights: int) -> int:
    return ram_limit(
        settings.ram,
        machine_bytes=machine_bytes(),
        working_set_bytes=device.working_set_bytes(),
        weights_bytes=weights,
    )


def read_ram_limit(settings: Settings, weights: int) -> int:
    limit, working_set = _ram_limit(settings, weights), device.working_set_bytes()
    if settings.ram == "auto":
        whole = memory_for(machine_bytes(), working_set)
        why = explain_auto(whole, weights, metal=working_set is not None)
        log.info("--ram auto is %s: %s", format_size(limit), why)
    return limit


def wire(settings: Settings, needed: int) -> None:
    machine, setting = machine_bytes(), settings.wire
    wanted = wired_size(setting, machine_bytes=machine, needed_bytes=needed)
    wired = device.wire(wanted)
    if wired < wanted and setting != "auto":
        log.warning("--wire %s limited to %s: no more can be wired", setting, format_size(wired))
    why = f"--wire {setting}"
    if device.working_set_bytes() is None:
        why = "only Metal can wire memory"
    elif setting == "auto":
        why += " wires only above two thirds of the memory"
    log.info(
        "memory: %s of %s for weights and cache, %s left to the system; %s wired: %s",
        *map(format_size, (needed, machine, max(0, machine - needed), wired)),
        why,
    )


def open_shared_memory(
    settings: Settings, free_idle: Callable[[int], bool], ceiling: Callable[[RamTier], int]
) -> SharedRam:
    """Return the memory that several models share, with MLX's pool set aside. MLX thread only."""
    limit = read_ram_limit(settings, 0)
    budget = Budget(limit)
    budget.charge(POOL, pool_bytes(limit))
    wire(settings, limit)
    device.prepare(pool_bytes(limit))
    return SharedRam(budget, free_idle, ceiling)


def fewest_reserved(limit: int) -> int:
    """Return the least bytes that are set aside for a model with a budget of `limit` bytes."""
    return transient_bytes(limit) + min(limit // 16, MOST_PENDING) if limit > 0 else 0


def _divide(
    limit: int, loaded: Loaded, layout: Layout, measured: cost.Cost, settings: Settings
) -> dict[str, int]:
    context = loaded.info.context_length
    return {
        "pool": pool_bytes(limit),
        "transient": _transient(limit, layout, measured, context, settings.concurrency),
        "pending": pending_bytes(limit, layout) if settings.disk != "off" else 0,
    }


def _least_budget(
    loaded: Loaded, layout: Layout, measured: cost.Cost, settings: Settings, *, pooled: bool
) -> int:
    """Return the smallest budget with memory for a context of 512 tokens, in bytes."""
    tokens = min(loaded.info.context_length, MIN_CONTEXT)

    def is_enough(megabytes: int) -> bool:
        limit = megabytes * 10**6
        kinds = _divide(limit, loaded, layout, measured, settings)
        if not pooled:
            kinds["pool"] = 0
        images = limit // IMAGES_PART if loaded.vision is not None else 0
        free = limit - sum(kinds.values()) - images
        return has_room(tokens, layout, measured, free=free, transient=kinds["transient"])

    least = bisect_left(range(_MOST_MEGABYTES), True, key=is_enough)
    return ceil(least * cost.SAFETY) * 10**6  # with more memory, passes are measured more exactly


def has_room(
    tokens: int, layout: Layout, measured: cost.Cost, *, free: int, transient: int
) -> bool:
    """Return whether a prompt's KV fits into `free` bytes, its passes into `transient`."""
    states = layout.running_bytes + layout.checkpoint_bytes
    needed = (tokens + 64) * layout.bytes_per_token + states
    return needed <= free and measured.transient(cost.FEWEST, tokens) <= transient


def _transient(
    limit: int, layout: Layout, measured: cost.Cost, context: int, concurrency: int
) -> int:
    rows = concurrency + 1 if concurrency > 1 else concurrency
    longest = min(context, limit // max(1, layout.bytes_per_token))
    least = max(
        measured.transient(cost.FEWEST, longest),
        measured.transient(1, longest // rows, rows),
    )
    return transient_bytes(limit, least)
