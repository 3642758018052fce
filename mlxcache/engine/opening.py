"""What is found and opened for a model before it is served: files, store, remote, images."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxcache.cache.pressure import Pressure
from mlxcache.cache.shared_ram import SharedRam
from mlxcache.config import Settings, disk_limit
from mlxcache.config.memory import MemoryPressure, read_footprint, read_pressure
from mlxcache.config.models import DEMO_ID
from mlxcache.errors import StoreError
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import demo, load, serialise
from mlxcache.model.examine import examine
from mlxcache.model.fingerprint import fingerprint
from mlxcache.model.hub import here, inspect_folder, weights_bytes
from mlxcache.model.kv import Layout
from mlxcache.ranks.rank_zero import RankZero
from mlxcache.residency.memory import IMAGES_PART, MemoryPlan, bits_of
from mlxcache.scheduling import images
from mlxcache.sessions.journal import Served
from mlxcache.store.kv_files import KV_FORMAT
from mlxcache.store.store import Store

if TYPE_CHECKING:
    from mlxcache.remote.objects import Objects
    from mlxcache.remote.tier import RemoteTier

log = logging.getLogger("mlxcache.engine")


# -- files -----------------------------------------------------------------------------------------


def fetch_model(
    settings: Settings, on_progress: Callable[[str, float | None], None]
) -> load.ModelSpec | None:
    """Return the model to load, downloading it if needed; None for the built-in demo.

    `on_progress(what, share)` is called during the download; `share` is from 0 to 1, or None if
    unknown. Blocks. Raises ModelError if the model cannot be found, downloaded or run.
    """
    if settings.model is None:
        return None

    def downloading(name: str, done: int, total: int) -> None:
        on_progress(f"downloading {name}", done / total if total else None)

    spec = spec_of(settings, settings.model)
    load.fetch(spec, downloading)
    return spec


def spec_of(settings: Settings, model: str) -> load.ModelSpec:
    """Describe `model` with the options of the first model of `settings`."""
    return load.ModelSpec(
        model,
        adapter=settings.adapter,
        draft=settings.draft_model,
        trust_remote_code=settings.trust_remote_code,
        context=settings.context,
        id=settings.entries[0].name,
        images=settings.feeds_images,
        heads=settings.speculate == "auto" and settings.kv_bits is None,
    )


def demo_spec(settings: Settings) -> load.ModelSpec:
    """Return the built-in demo model, writing it to the cache folder if it is missing.

    MLX thread only.
    """
    return load.ModelSpec(
        str(demo.materialise(settings.cache_dir / "demo")),
        context=settings.context,
        id=DEMO_ID,
        is_demo=True,
    )


def hash_files(spec: load.ModelSpec, settings: Settings) -> None:
    """Compute the digests of the model's files that are not stored yet, if there is a disk tier.

    Blocks while the files are read; any thread. Raises ModelError if one cannot be read.
    """
    if settings.disk != "off":
        path, *draft = load.base_folders(spec)
        backend = load.backend_of(spec, path)
        namespace_of(path, backend, "", settings, draft[0] if draft else None)


def namespace_of(
    path: Path, backend: str, layout_key: str, settings: Settings, draft: Path | None
) -> str:
    return fingerprint(
        path,
        adapter=Path(settings.adapter) if settings.adapter else None,
        memo=settings.cache_dir / "fingerprints.json",
        layout_key=layout_key,
        kv_format=KV_FORMAT,
        draft=draft,
        backend=backend,
    )


def weigh_files(label: str, model: str) -> int | None:
    """Return the bytes of a model's weight files; None if they are damaged or not on this machine.

    In both of these cases logs which it is. Blocks.
    """
    path, problem = inspect_folder(model)
    if problem is not None:
        log.warning("model %s: cannot be loaded: %s", label, problem)
        return None
    if path is None:
        log.info("model %s: %s is not on this machine; a request downloads it", label, model)
        return None
    return weights_bytes(path)


async def describe_unloaded(settings: Settings, thread: MlxThread) -> Served | None:
    """Describe the first model of `settings` without loading it; None if it is not on this machine.

    Also returns None if its draft model is missing. The MLX thread examines the model, and the
    files are hashed in another thread. Raises ModelError if they cannot be read, or if the model
    cannot be fed.
    """
    entry = settings.entries[0]
    if entry.model is None:
        spec = await thread.ask(lambda: demo_spec(settings))
    else:
        spec = spec_of(settings, entry.model)
    path = await asyncio.to_thread(here, spec.model)
    draft = await asyncio.to_thread(here, spec.draft) if spec.draft is not None else None
    if path is None or (draft is None and spec.draft is not None):
        return None
    found = await thread.ask(lambda: examine(spec, bits_of(settings)))
    key = serialise.layout_key(found.layout)
    namespace = await asyncio.to_thread(
        namespace_of, path, found.info.backend, key, settings, draft
    )
    run = serialise.run_spec(found.layout)
    return Served(found.info.id, spec.model, namespace, run, found.layout.vocab_size)


# -- tiers and memory ------------------------------------------------------------------------------


def open_store(
    loaded: load.Loaded, layout: Layout, settings: Settings, ranks: RankZero | None
) -> tuple[Store | None, str | None]:
    """Open the store of this model's namespace; return it and None, or None and why there is none.

    Logs a warning if the store cannot be opened, or only for reading. Blocks.
    """
    folder, label = settings.cache_dir / "store", settings.entries[0].label
    try:
        whole = layout if ranks is None or ranks.whole is None else ranks.whole
        key = serialise.layout_key(whole)
        namespace = namespace_of(loaded.path, loaded.info.backend, key, settings, loaded.draft)
        if ranks is not None:
            store: Store = ranks.open_store(
                folder, namespace, settings.disk, needs_checkpoints=layout.opaque
            )
        else:
            limit = disk_limit(settings.disk, folder)
            store = Store.open(folder, namespace, limit, needs_checkpoints=bool(layout.opaque))
    except (StoreError, OSError) as error:
        log.warning("model %s: no disk tier, serving from RAM alone: %s", label, error)
        return None, str(error)
    if store.obstacle is not None:
        log.warning(
            "model %s: disk tier is only read, nothing is written: %s", label, store.obstacle
        )
    return store, None


def open_tier(
    objects: Objects,
    store: Store,
    layout: Layout,
    seconds: Callable[[int, int], float],
    label: str,
) -> RemoteTier:
    from mlxcache.remote.exchange import Shape  # noqa: PLC0415 - only with --remote
    from mlxcache.remote.tier import RemoteTier  # noqa: PLC0415

    shape = Shape(layout.bytes_per_token, layout.checkpoint_bytes, bool(layout.opaque))
    return RemoteTier(objects, store, shape, seconds, layout.vocab_size, label=label)


def open_images(loaded: load.Loaded, plan: MemoryPlan, settings: Settings) -> images.Images | None:
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
    not charged to that budget.
    """
    held = mx.get_active_memory() + mx.get_cache_memory()
    base = max(0, read_footprint() - held)
    pressure = Pressure(ram, thread.post, base=base, weights=weights, look=look)
    pressure.start()
    return pressure
