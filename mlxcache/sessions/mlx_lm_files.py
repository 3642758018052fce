"""Export and import of mlx-lm's prompt cache files."""

from __future__ import annotations

import json
import logging
import secrets
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxcache.cache.kv_cache import KVCache
from mlxcache.errors import BadRequest, Busy, Unsupported
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import device
from mlxcache.model.mlx_lm_format import PromptCache, PromptCacheFile, read_prompt_cache
from mlxcache.owner import own_ids
from mlxcache.types import WARMING, Job, Prompt, Tokens, join_ids, token_ids

log = logging.getLogger("mlxcache.engine")

ANSWER_S = 120.0
"""Most seconds to wait for a part of a file while the MLX thread is in a long pass."""

Submit = Callable[[Job], Awaitable[Any]]
"""Type of `Engine.submit`, which queues a job.

The result is an async context manager and an async iterator of events.
"""


class PromptCacheExport:
    """A prompt cache file of `nbytes` bytes; iterating over the export yields them in order.

    Iterate only once, on any thread except the MLX thread. A lineage stays leased until the
    iteration ends or the export is garbage collected.
    """

    def __init__(
        self, kv: KVCache, thread: MlxThread, ids: Tokens, model: str, owner: str | None = None
    ):
        """Lease the lineage that holds `ids`. Call on the MLX thread.

        `ids`: token ids as the model is fed them, shape (n,); their KV is found in the prefix tree
        under `own_ids(ids, owner)`. `owner`: owner of the session. `model`: path or name of the
        model, to be written into the file. Raises Busy if there is no memory for a lease, or if RAM
        does not hold the KV of all `ids`, and RuntimeError if the device reports an error.
        """
        lease = kv.acquire(own_ids(join_ids(ids, ids[-1:]), owner), 1)
        if lease is None:
            raise Busy("There is no free memory for a prompt cache: try again.", retry_after=5.0)
        if lease.cached < len(ids):
            kv.release(lease)
            raise Busy(
                "The session was evicted from RAM during the export: try again.", retry_after=1.0
            )
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

    `agrees(found, ids)` computes part of the KV of `ids` again on the MLX thread and returns
    whether the content `found` of a file is the same. `tokenise(text)` tokenises a prompt as mlx-lm
    does.
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
        """Read the file at `path`, insert its KV, and return its token ids, shape (n,).

        The KV is inserted into the prefix tree under `own_ids(ids, owner)`, where `ids` are the
        returned ids. It is not inserted if it differs from what the model computes, or if there is
        no memory for it. `prompt`: the text, or a JSON list of token ids, of which the file was
        made; used only if the file has no token ids. Call on the MLX thread. Raises SnapshotRefused
        if the file is no prompt cache for the served model, Unsupported if mlx-lm itself cannot
        read such files of this model, BadRequest if there are no token ids, or ids that the model
        does not have, and what `agrees` raises.
        """
        kv = self._kv
        vocabulary = kv.layout.vocab_size
        found = read_prompt_cache(path, kv.layout, mx.cpu)
        ids = found.ids if found.ids is not None else self._ids_of(prompt)
        if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            raise BadRequest(f"Token ids must be from 0 to {vocabulary - 1}.", param="prompt")
        size = path.stat().st_size  # comparing an array reads all of it
        if not kv.ram.reserve("import", size):
            log.warning(
                "model %s: KV of the prompt cache %s not used, it is computed: no RAM for %d bytes",
                *(kv.label, path, size),
            )
            return ids
        try:
            if self._agrees(found, ids):
                self._insert(found, own_ids(ids, owner))
            else:
                log.warning(
                    "model %s: KV of the prompt cache %s not used, it is computed: the model's "
                    "differs",
                    *(kv.label, path),
                )
        finally:
            del found
            kv.budget.release("import", size)
            mx.clear_cache()
        return ids

    def _ids_of(self, prompt: str | None) -> Tokens:
        if not prompt:
            raise BadRequest(
                "This prompt cache of mlx-lm has no tokens: give the text it was made of, or its "
                "token ids as a JSON list, with --prompt TEXT.",
                param="prompt",
            )
        if prompt.lstrip().startswith("["):
            try:
                return token_ids(json.loads(prompt))
            except (ValueError, TypeError, OverflowError):
                pass  # a text that begins with a bracket
        return token_ids(self._tokenise(prompt))

    def _insert(self, found: PromptCache, ids: Tokens) -> None:
        """Append the KV of `ids` that is not in RAM to a lineage, and commit it.

        `ids`: as `own_ids` returns them. Inserts nothing if there is no memory, or if the file has
        only the newest positions of a sliding window.
        """
        kv = self._kv
        lease = kv.acquire(join_ids(ids, ids[-1:]), 1)
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
    """Compute the KV of `ids` that is not in RAM, and a checkpoint after the last of them.

    Submits a job by `submit`, and waits for its end. Its prompt has one more token after `ids`,
    because no checkpoint can be taken after the last token of a prompt. Raises what `submit`
    raises, and Unsupported if `ids` are empty or contain images.
    """
    if not len(ids) or int(ids.min()) < 0:
        raise Unsupported("mlx-lm's prompt caches hold only text, and this session has images.")
    prompt = Prompt(join_ids(ids, ids[-1:]), marks=(len(ids),))
    job = Job(f"req_{secrets.token_hex(12)}", prompt, max_tokens=1, raw=True, api=WARMING)
    async with await submit(job) as stream:
        async for _ in stream:
            pass
