"""mlx-lm's prompt cache files, written from sessions and read as sessions."""

from __future__ import annotations

import json
import logging
import secrets
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxcache.cache.kv_cache import KVCache
from mlxcache.errors import BadRequest, Busy, Unsupported
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import device
from mlxcache.model.mlx_lm_format import PromptCache, PromptCacheFile, read_prompt_cache
from mlxcache.owner import own_ids
from mlxcache.types import WARMING, Job, Prompt, Tokens

log = logging.getLogger("mlxcache.engine")

ANSWER_S = 120.0
"""Seconds that a part of a file may wait for the MLX thread, which may be in a long pass."""

Submit = Callable[[Job], Awaitable[Any]]
"""`Engine.submit`: queues a job; the result is an async context manager and iterator of events."""


class PromptCacheExport:
    """A prompt cache file being written: iterate once, on any thread but MLX's; `nbytes` in all.

    A lineage is leased until the iteration ends, or until the export is garbage collected.
    """

    def __init__(
        self, kv: KVCache, thread: MlxThread, ids: Tokens, model: str, owner: str | None = None
    ):
        """Lease the lineage that holds `ids`, as the model is fed them, shape (n,).

        On the MLX thread.

        Raises Busy where RAM does not hold all of them with their state.
        """
        lease = kv.acquire(own_ids(np.append(ids, ids[-1:]), owner), 1)
        if lease is None:
            raise Busy("There is no memory for a prompt cache now.", retry_after=5.0)
        if lease.cached < len(ids):
            kv.release(lease)
            raise Busy("The session was evicted meanwhile; try again.", retry_after=1.0)
        try:
            device.confirm()  # the lease may hold copies, and no commit waits for them
        except RuntimeError:
            kv.abandon(lease)
            raise
        file = PromptCacheFile(lease.lineage, model, ids)
        parts = [iter(file)]
        self.nbytes = file.nbytes
        self._parts = parts
        self._thread = thread

        def release() -> None:
            parts.clear()  # its views must go before the buffers are written to again
            kv.release(lease)

        self._release = weakref.finalize(self, thread.post, release)
        self._release.atexit = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            while part := self._thread.call(lambda: next(self._parts[0], b"")).result(ANSWER_S):
                yield part
        finally:
            self._release()


class PromptCacheReader:
    """Reads mlx-lm's prompt cache files into the prefix tree.

    `agrees(found, ids)` computes some of a file's KV again and compares, on the MLX thread;
    `tokenise(text)` is mlx-lm's tokenisation of a prompt.
    """

    def __init__(
        self,
        kv: KVCache,
        agrees: Callable[[PromptCache, Tokens], bool],
        tokenise: Callable[[str], Sequence[int]],
    ):
        self._kv = kv
        self._agrees = agrees
        self._tokenise = tokenise

    def read(self, path: Path, prompt: str | None, owner: str | None = None) -> Tokens:
        """Read the file at `path`: return its token ids, shape (n,), and insert its KV if it
        agrees.

        It is inserted into the owner's prefix tree. `prompt`: the text, or JSON list of ids, that
        the file was made of; not needed where the file has its tokens. KV that does not agree, or
        for which there is no memory, is left out. On the MLX thread. Raises SnapshotRefused for a
        file that is no prompt cache of such a model, BadRequest where there are no tokens or
        unknown ones.
        """
        kv = self._kv
        vocabulary = kv.layout.vocab_size
        found = read_prompt_cache(path, kv.layout, mx.cpu)
        ids = found.ids if found.ids is not None else self._ids_of(prompt)
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise BadRequest(f"Token ids must be from 0 to {vocabulary - 1}.", param="prompt")
        size = path.stat().st_size  # comparing an array reads all of it
        if not kv.ram.reserve("import", size):
            log.warning("imported KV not used, its prompt is computed: no room for %d bytes", size)
            return ids
        try:
            if self._agrees(found, ids):
                self._insert(found, own_ids(ids, owner))
            else:
                log.warning(
                    "imported KV not used, its prompt is computed: it differs from this model's KV"
                )
        finally:
            del found
            kv.budget.release("import", size)
            mx.clear_cache()
        return ids

    def _ids_of(self, prompt: str | None) -> Tokens:
        if not prompt:
            raise BadRequest(
                "This prompt cache of mlx-lm has no tokens: give the text it was made of with "
                "--prompt TEXT.",
                param="prompt",
            )
        if prompt.lstrip().startswith("["):
            try:
                return np.array(json.loads(prompt), np.int32).reshape(-1)
            except (ValueError, TypeError, OverflowError):
                pass  # a text that begins with a bracket
        return np.array(self._tokenise(prompt), np.int32)

    def _insert(self, found: PromptCache, ids: Tokens) -> None:
        """Append what RAM lacks of `ids` to a lineage, and commit it as if it had been computed."""
        kv = self._kv
        lease = kv.acquire(np.append(ids, ids[-1:]), 1)
        if lease is None or found.arrays is None:
            return
        try:
            start = lease.length
            if start < len(ids):
                tail = ([array[..., start:, :] for array in slot] for slot in found.arrays)
                lease.lineage.append(tail, len(ids) - start)
                if kv.layout.opaque:
                    lease.lineage.restore(found.state)
                kv.commit(lease, ids, checkpoint=True)
                kv.persist(lease, ids, whole=True)
        except BaseException:
            kv.abandon(lease)
            raise
        kv.release(lease)


async def compute(submit: Submit, ids: Tokens) -> None:
    """Compute the part of `ids` that RAM lacks, and the state after them.

    One more token is fed, so that there is a position to stop at before it. Raises what `submit`
    raises.
    """
    if not len(ids) or int(ids.min()) < 0:
        raise Unsupported("mlx-lm's prompt caches are of text alone; this session has images.")
    prompt = Prompt(np.append(ids, ids[-1:]), marks=(len(ids),))
    job = Job(f"req_{secrets.token_hex(12)}", prompt, max_tokens=1, raw=True, api=WARMING)
    async with await submit(job) as stream:
        async for _ in stream:
            pass
