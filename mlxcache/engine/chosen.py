"""The model that the settings name, as a specification to load."""

from __future__ import annotations

from collections.abc import Callable

from mlxcache.config import Settings
from mlxcache.model import demo, load


def fetched(
    settings: Settings, on_progress: Callable[[str, float | None], None]
) -> load.ModelSpec | None:
    """What to load, downloaded if need be; None: the demo, which the MLX thread makes."""
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
    )
    load.fetch(spec, downloading)
    return spec


def made(settings: Settings) -> load.ModelSpec:
    """The built-in demo, made where it is not there yet. On the MLX thread."""
    return load.ModelSpec(
        str(demo.materialise(settings.cache_dir / "demo")),
        context=settings.context,
        id=demo.DEMO_ID,
        is_demo=True,
    )
