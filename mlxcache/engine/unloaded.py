"""Size and description of a model from its files, without loading its weights."""

from __future__ import annotations

import asyncio
import logging

from mlxcache.config import Settings
from mlxcache.engine.model_files import demo_spec, namespace_of
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import serialise
from mlxcache.model.examine import examine
from mlxcache.model.hub import here, inspect_folder, weights_bytes
from mlxcache.model.load import ModelSpec
from mlxcache.sessions.journal import Served

log = logging.getLogger("mlxcache.engine")


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
        spec = ModelSpec(
            entry.model,
            adapter=settings.adapter,
            draft=settings.draft_model,
            trust_remote_code=settings.trust_remote_code,
            context=settings.context,
            id=entry.name,
            images=settings.feeds_images,
        )
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
