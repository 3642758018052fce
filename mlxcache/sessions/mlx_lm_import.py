"""Files of mlx-lm's `cache_prompt` as sessions, used where they hold what they should."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlxcache.errors import BadRequest
from mlxcache.model.mlx_lm_check import agrees
from mlxcache.model.mlx_lm_read import PromptCache, prompt_ids, read_prompt_cache
from mlxcache.owner import own_ids
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.engine.runtime import Core

log = logging.getLogger("mlxcache.engine")


def take_in(core: Core, path: Path, prompt: str | None, owner: str | None = None) -> Tokens:
    """The tokens of the prompt cache at `path`, its KV in the owner's tree if it is of this model.

    `prompt`: what the file was made of, as text or as a JSON list of ids; not needed where the file
    has its tokens. KV that is not that of the model, or for which there is no memory, is left.
    On the MLX thread. Raises SnapshotRefused for what is no prompt cache of such a model, and
    BadRequest without tokens, or for ids that the model does not have.
    """
    layout = core.layout
    found = read_prompt_cache(path, layout, mx.cpu)
    ids = found.ids if found.ids is not None else _ids_of(core, prompt)
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= layout.vocab_size:
        raise BadRequest(f"Token ids must be from 0 to {layout.vocab_size - 1}.", param="prompt")
    size = path.stat().st_size  # looking at an array reads all of it
    if not core.memory.room.reserve("import", size):
        log.warning("there is no memory to read a prompt cache of %d bytes: it is computed", size)
        return ids
    try:
        if agrees(core.loaded.model, layout, found, ids):
            _insert(core, found, own_ids(ids, owner))
        else:
            log.warning("a prompt cache is not what this model computes for its prompt: left aside")
    finally:
        del found
        core.memory.budget.release("import", size)
        mx.clear_cache()
    return ids


def _ids_of(core: Core, prompt: str | None) -> Tokens:
    if not prompt:
        raise BadRequest(
            "This is a prompt cache of mlx-lm's, which has no tokens: give what it was made of "
            "with --prompt TEXT.",
            param="prompt",
        )
    if prompt.lstrip().startswith("["):
        try:
            return np.array(json.loads(prompt), np.int32).reshape(-1)
        except (ValueError, TypeError, OverflowError):
            pass  # a text that begins with a bracket
    return np.array(prompt_ids(core.loaded.tokenizer, prompt), np.int32)


def _insert(core: Core, found: PromptCache, ids: Tokens) -> None:
    """Append what is missing of `ids` to a lineage, and commit it as if it had been computed."""
    memory = core.memory
    lease = memory.acquire(np.append(ids, ids[-1:]), 1)
    if lease is None or found.arrays is None:
        return
    try:
        start = lease.lineage.length
        if start < len(ids):
            tail = ([array[..., start:, :] for array in slot] for slot in found.arrays)
            lease.lineage.append(tail, len(ids) - start)
            if memory.layout.opaque:
                lease.lineage.restore(found.state)
            memory.commit(lease, ids, checkpoint=True)
            if core.disk is not None:
                core.disk.ended(lease, ids)
    except BaseException:
        memory.abandon(lease)
        raise
    memory.release(lease)
