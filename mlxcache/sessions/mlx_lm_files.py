"""mlx-lm's own prompt caches: what a session holds, as a file for its tools."""

from __future__ import annotations

import json
import logging
import queue
import secrets
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import mlx.core as mx
import numpy as np

from mlxcache.errors import BadRequest, Busy, Unsupported
from mlxcache.model.mlx_lm_format import (
    PromptCache,
    PromptCacheFile,
    agrees,
    prompt_ids,
    read_prompt_cache,
)
from mlxcache.owner import own_ids
from mlxcache.types import WARMING, Job, Prompt, Tokens

if TYPE_CHECKING:
    from mlxcache.engine.runtime import Core
    from mlxcache.engine.stream import Stream

log = logging.getLogger("mlxcache.engine")

ANSWER_S = 120.0
"""Seconds that a part of a file may wait for the MLX thread, which may be in a long pass."""

Submit = Callable[[Job], Awaitable["Stream"]]
"""`Engine.submit`."""


class PromptCacheExport:
    """A prompt cache on its way out: iterate once, on any thread but MLX's, for `nbytes` bytes.

    A lineage is held until the iteration ends, or until nobody holds this any more.
    """

    def __init__(self, core: Core, ids: Tokens, model: str, owner: str | None = None):
        """On the MLX thread. `ids`: as the model is fed them.

        Raises Busy where not all of them is in RAM, with its state.
        """
        memory, inbox = core.memory, core.scheduler.inbox
        lease = memory.acquire(own_ids(np.append(ids, ids[-1:]), owner), 1)
        if lease is None:
            raise Busy("There is no memory for a prompt cache now.", retry_after=5.0)
        if lease.cached < len(ids):
            memory.release(lease)
            raise Busy("The session was evicted meanwhile; try again.", retry_after=1.0)
        file = PromptCacheFile(lease.lineage, model, ids)
        parts = [iter(file)]
        self.nbytes = file.nbytes
        self._parts = parts
        self._inbox = inbox

        def release() -> None:
            parts.clear()  # its views go before anybody writes to the buffers again
            memory.release(lease)

        self._release = weakref.finalize(self, inbox.put, release)
        self._release.atexit = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            while part := _on_mlx_thread(self._inbox, lambda: next(self._parts[0], b"")):
                yield part
        finally:
            self._release()


def _on_mlx_thread(
    inbox: queue.SimpleQueue[Callable[[], None]], action: Callable[[], bytes]
) -> bytes:
    answer: Future[bytes] = Future()

    def run() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:  # noqa: BLE001 - it is raised again in `result`
            answer.set_exception(error)

    inbox.put(run)
    return answer.result(ANSWER_S)


async def compute(submit: Submit, ids: Tokens) -> None:
    """Have all of `ids` in RAM, and the state after them. Raises what `Engine.submit` raises.

    One token more is fed, so that there is a place to stop before it.
    """
    if not len(ids) or int(ids.min()) < 0:
        raise Unsupported("mlx-lm's prompt caches are of text alone; this session has images.")
    prompt = Prompt(np.append(ids, ids[-1:]), marks=(len(ids),))
    job = Job(f"req_{secrets.token_hex(12)}", prompt, max_tokens=1, raw=True, api=WARMING)
    async with await submit(job) as stream:
        async for _ in stream:
            pass


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
