"""What is opened for a model before it is served: store, remote, images, memory pressure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxcache.cache.pressure import Pressure
from mlxcache.cache.shared_ram import SharedRam
from mlxcache.config import Settings, disk_limit
from mlxcache.config.memory import MemoryPressure, read_footprint, read_pressure
from mlxcache.engine.model_files import namespace_of
from mlxcache.errors import StoreError
from mlxcache.mlx_thread import MlxThread
from mlxcache.model.kv import Layout
from mlxcache.model.load import Loaded
from mlxcache.ranks.rank_zero import RankZero
from mlxcache.residency.memory import IMAGES_PART, MemoryPlan
from mlxcache.scheduling import images
from mlxcache.store.store import Store

if TYPE_CHECKING:
    from mlxcache.remote.objects import Objects
    from mlxcache.remote.tier import RemoteTier

log = logging.getLogger("mlxcache.engine")


def open_store(
    loaded: Loaded, layout: Layout, settings: Settings, ranks: RankZero | None = None
) -> tuple[Store | None, str | None]:
    """Open the store of this model's namespace; return it and None.

    If that fails, returns None and the reason as text. `ranks`: the group that the model is divided
    among, or None. Logs a warning if the store cannot be opened, or only for reading. Blocks.
    """
    folder = settings.cache_dir / "store"
    try:
        whole = layout if ranks is None or ranks.whole is None else ranks.whole
        namespace = namespace_of(loaded.path, loaded.info.backend, whole, settings, loaded.draft)
        if ranks is not None:
            store: Store = ranks.open_store(
                folder, namespace, settings.disk, needs_checkpoints=layout.opaque
            )
        else:
            limit = disk_limit(settings.disk, folder)
            store = Store.open(folder, namespace, limit, needs_checkpoints=bool(layout.opaque))
    except (StoreError, OSError) as error:
        log.warning(
            "model %s: no disk tier, serving from RAM alone: %s", settings.entries[0].label, error
        )
        return None, str(error)
    if store.obstacle is not None:
        log.warning(
            "model %s: disk tier is only read, nothing is written: %s",
            *(settings.entries[0].label, store.obstacle),
        )
    return store, None


def open_tier(
    objects: Objects,
    store: Store,
    layout: Layout,
    seconds: Callable[[int, int], float],
    label: str,
) -> RemoteTier:
    """Open the part of the shared remote that belongs to one model."""
    from mlxcache.remote.fetch import Shape  # noqa: PLC0415 - only with --remote
    from mlxcache.remote.tier import RemoteTier  # noqa: PLC0415

    shape = Shape(layout.bytes_per_token, layout.checkpoint_bytes, bool(layout.opaque))
    return RemoteTier(objects, store, shape, seconds, layout.vocab_size, label=label)


def open_images(loaded: Loaded, plan: MemoryPlan, settings: Settings) -> images.Images | None:
    """Reserve memory in the budget of `plan` for images; return the object that feeds them.

    Returns None if there is too little memory or the model cannot be fed images.
    """
    vision, label = loaded.vision, settings.entries[0].label
    if loaded.unseen is not None:
        log.info("model %s: images disabled: %s", label, loaded.unseen)
    if vision is None:
        return None
    found = images.measure(vision, plan.transient)
    if found is None:
        log.warning(
            "model %s: images disabled: a test image did not change the model's input embeddings",
            label,
        )
        return None
    largest, chunk = found.longest(plan.transient, vision.most_tokens), settings.prefill_chunk
    while largest and found.kept(largest, chunk) > plan.budget.limit // IMAGES_PART:
        largest //= 2
    if not largest or not plan.budget.reserve("images", found.kept(largest, chunk)):
        log.warning("model %s: images disabled: --ram %s has no room for them", label, settings.ram)
        return None
    return images.Images(vision.limited(largest), found, largest)


def watch_pressure(
    ram: SharedRam,
    thread: MlxThread,
    weights: int,
    look: Callable[[], MemoryPressure] = read_pressure,
) -> Pressure:
    """Start a monitor of the machine's memory pressure and return it. MLX thread only.

    `ram`: its budget is withheld in part under pressure. `weights`: bytes of the weights that are
    not charged to that budget. `look`: reads the pressure.
    """
    held = mx.get_active_memory() + mx.get_cache_memory()
    base = max(0, read_footprint() - held)
    pressure = Pressure(ram, thread.post, base=base, weights=weights, look=look)
    pressure.start()
    return pressure
