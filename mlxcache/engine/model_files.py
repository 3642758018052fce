"""The files of a model: fetched, digested, and the namespace of the KV that the model computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from mlxcache.config import Settings
from mlxcache.config.models import DEMO_ID
from mlxcache.model import demo, load, serialise
from mlxcache.model.fingerprint import fingerprint
from mlxcache.model.kv import Layout


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

    spec = load.ModelSpec(
        settings.model,
        adapter=settings.adapter,
        draft=settings.draft_model,
        trust_remote_code=settings.trust_remote_code,
        context=settings.context,
        id=settings.entries[0].name,
        images=settings.feeds_images,
    )
    load.fetch(spec, downloading)
    return spec


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
    if settings.disk == "off":
        return
    path, *draft = load.base_folders(spec)
    fingerprint(
        path,
        adapter=Path(spec.adapter).expanduser() if spec.adapter else None,
        memo=settings.cache_dir / "fingerprints.json",
        layout_key="",
        draft=draft[0] if draft else None,
        backend=load.backend_of(spec, path),
    )


def namespace_of(
    path: Path, backend: str, layout: Layout, settings: Settings, draft: Path | None = None
) -> str:
    """Return the namespace of the model in folder `path`. Blocks while its files are read.

    `backend`: the library that runs it. `draft`: folder of its draft model. Raises ModelError for a
    file that cannot be read.
    """
    return fingerprint(
        path,
        adapter=Path(settings.adapter).expanduser() if settings.adapter else None,
        memo=settings.cache_dir / "fingerprints.json",
        layout_key=serialise.layout_key(layout),
        draft=draft,
        backend=backend,
    )
