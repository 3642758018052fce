"""The files of a model: fetched, digested, and the namespace of the KV that the model computes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from mlxcache.config import Settings
from mlxcache.config.models import DEMO_ID
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import demo, load, serialise
from mlxcache.model.examine import examine
from mlxcache.model.fingerprint import fingerprint
from mlxcache.model.hub import here, inspect_folder, weights_bytes
from mlxcache.model.kv import Layout
from mlxcache.sessions.journal import Served

log = logging.getLogger("mlxcache.engine")


def fetch_model(
    settings: Settings, on_progress: Callable[[str, float | None], None]
) -> load.ModelSpec | None:
    """Return the model to load, downloading it if needed; None for the built-in demo.

    `on_progress(what, share)` is called during the download; `what` has the name of the model, and
    `share` is from 0 to 1, or None if unknown. Blocks. Raises ModelError if the model cannot be
    found, downloaded or run.
    """
    if settings.model is None:
        return None

    def downloading(name: str, done: int, total: int) -> None:
        on_progress(f"downloading {name}", done / total if total else None)

    spec = _spec_of(settings, settings.model)
    load.fetch(spec, downloading)
    return spec


def _spec_of(settings: Settings, model: str) -> load.ModelSpec:
    return load.ModelSpec(
        model,
        adapter=settings.adapter,
        draft=settings.draft_model,
        trust_remote_code=settings.trust_remote_code,
        context=settings.context,
        id=settings.entries[0].name,
        images=settings.feeds_images,
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
    """Compute those digests of the model's files that are not stored yet, for `namespace_of`.

    Does nothing without a disk tier. Blocks while the files are read; may be called on any thread.
    Raises ModelError if a file cannot be read.
    """
    if settings.disk != "off":
        path, *draft = load.base_folders(spec)
        _fingerprint(path, load.backend_of(spec, path), "", settings, *draft)


def namespace_of(
    path: Path, backend: str, layout: Layout, settings: Settings, draft: Path | None = None
) -> str:
    """Return the namespace of the model in folder `path`. Blocks while its files are read.

    `backend`: the library that runs it. `draft`: folder of its draft model. Raises ModelError for a
    file that cannot be read.
    """
    return _fingerprint(path, backend, serialise.layout_key(layout), settings, draft)


def _fingerprint(
    path: Path, backend: str, layout_key: str, settings: Settings, draft: Path | None = None
) -> str:
    return fingerprint(
        path,
        adapter=Path(settings.adapter) if settings.adapter else None,
        memo=settings.cache_dir / "fingerprints.json",
        layout_key=layout_key,
        draft=draft,
        backend=backend,
    )


def weigh_files(label: str, model: str) -> int | None:
    """Return the bytes of a model's weight files; None if they are damaged or not on this machine.

    In both of these cases logs which it is. `label`: the model's name in the log. `model`: a path
    or Hub id. Blocks.
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

    Also returns None if its draft model is missing. `thread`: the MLX thread, which examines the
    model. The files are hashed in another thread, at the first call. Raises ModelError if they
    cannot be read, or if the model cannot be fed.
    """
    entry = settings.entries[0]
    if entry.model is None:
        spec = await thread.ask(lambda: demo_spec(settings))
    else:
        spec = _spec_of(settings, entry.model)
    path = await asyncio.to_thread(here, spec.model)
    draft = await asyncio.to_thread(here, spec.draft) if spec.draft is not None else None
    if path is None or (draft is None and spec.draft is not None):
        return None
    found = await thread.ask(lambda: examine(spec, settings.kv_bits))
    namespace = await asyncio.to_thread(
        namespace_of, path, found.info.backend, found.layout, settings, draft
    )
    run = serialise.run_spec(found.layout)
    return Served(found.info.id, spec.model, namespace, run, found.layout.vocab_size)
