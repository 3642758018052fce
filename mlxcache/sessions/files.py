"""Import and export of sessions as files: snapshots, and mlx-lm's prompt caches."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import shutil
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from mlxcache.cache.kv_cache import KVCache
from mlxcache.errors import BadRequest, Busy, DiskFull, SnapshotRefused, Unsupported
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import device
from mlxcache.model.mlx_lm_format import (
    PromptCache,
    PromptCacheFile,
    check_portable,
    read_prompt_cache,
)
from mlxcache.owner import OWNER, own_ids, plain_ids
from mlxcache.private import make_folder
from mlxcache.sessions.journal import Served
from mlxcache.store.database import store_errors
from mlxcache.store.leaves import Leaf
from mlxcache.store.lock import is_running
from mlxcache.store.sessions import new_id
from mlxcache.store.snapshot_format import SessionInfo, detect_format
from mlxcache.store.snapshots import (
    SnapshotExport,
    check_prompt_cache,
    import_snapshot,
    read_snapshot,
    with_owner,
)
from mlxcache.store.store import FREE_FLOOR, Store
from mlxcache.types import WARMING, Job, Prompt, Tokens, join_ids, token_ids

if TYPE_CHECKING:
    from mlxcache.sessions.book import ModelSessions

log = logging.getLogger("mlxcache.engine")

INCOMING = re.compile(r"restore-(\d+)-.*")

ANSWER_S = 120.0
"""Most seconds to wait for a part of a file while the MLX thread is in a long pass."""

Submit = Callable[[Job], Awaitable[Any]]
"""Type of `Engine.submit`; the result is an async context manager and iterator of events."""


def remove_stale(folder: Path) -> None:
    for path in folder.glob("restore-*"):
        match = INCOMING.fullmatch(path.name)
        if match and not is_running(int(match[1])):
            path.unlink(missing_ok=True)


class SessionFiles:
    """Exports sessions of one model to files and imports them. Use on the event loop."""

    def __init__(
        self,
        book: ModelSessions,
        kv: KVCache,
        thread: MlxThread,
        *,
        submit: Submit,
        prompt_caches: PromptCacheReader,
        incoming: Path,
    ):
        self._book, self._model = book, book.model
        self._kv, self._thread = kv, thread
        self._submit, self._prompt_caches = submit, prompt_caches
        self._incoming = incoming

    async def snapshot(self, id: str) -> SnapshotExport:
        """Return a snapshot of a session; iterate it on another thread, because it reads files.

        Raises Unsupported without a disk tier, or for ranks whose KV cannot be joined.
        """
        store = self._stored()
        info = await self._book.info(id)
        await self._book.settled()
        seen = store.for_namespace(info.namespace)
        return await asyncio.to_thread(SnapshotExport, seen, info, OWNER.get())

    async def prompt_cache(self, id: str) -> PromptCacheExport:
        """Export the main leaf of a session as a prompt cache file for mlx-lm's tools.

        Computes the KV that is not in RAM. Raises Busy if there is no memory, or if the KV was
        evicted meanwhile, and Unsupported if mlx-lm cannot read such a file of this session.
        """
        self._check_whole()
        info = await self._book.info(id)
        if info.namespace != self._model.namespace:
            raise Unsupported(
                f"This session was made with another model ({info.model}): serve that model to "
                "export it."
            )
        check_portable(self._kv.layout)
        owner, path = OWNER.get(), self._model.path
        ids = plain_ids(info.leaves[0].ids, owner)
        await compute(self._submit, ids)
        return await self._thread.ask(
            lambda: PromptCacheExport(self._kv, self._thread, ids, path, owner)
        )

    def incoming(self, nbytes: int) -> Path:
        """Make and return the folder in which to write a file for `restore`. Raises DiskFull."""
        with store_errors(self._incoming):
            make_folder(self._incoming)
            if shutil.disk_usage(self._incoming).free < nbytes + FREE_FLOOR:
                raise DiskFull(f"The disk has no room for a file of {nbytes} bytes.")
        return self._incoming

    async def restore(
        self,
        path: Path,
        name: str | None = None,
        prompt: str | None = None,
        served: Served | None = None,
    ) -> str:
        """Import the file at `path`: a snapshot, or a prompt cache of mlx-lm; return its session.

        `prompt`: text, or JSON list of token ids, of which the prompt cache was made, if the file
        has no tokens. KV that a prompt cache lacks, or that cannot be used, is computed. `served`:
        another model to which the snapshot must belong, and which need not be loaded. Raises
        SnapshotRefused, BadRequest, StoreError and Unsupported.
        """
        owner, model = OWNER.get(), served or self._model
        try:
            checked = await asyncio.to_thread(
                read_snapshot,
                path,
                model.snapshot_namespace,
                model=model.name,
                spec=model.spec,
                vocab_size=model.vocab_size,
            )
            checked = with_owner(checked, owner)
        except SnapshotRefused as refused:
            if not await asyncio.to_thread(_is_snapshot, path):
                self._check_whole()
            try:
                await asyncio.to_thread(check_prompt_cache, path)
                ids = await self._thread.ask(lambda: self._prompt_caches.read(path, prompt, owner))
            except SnapshotRefused as error:
                is_ours = await asyncio.to_thread(_is_snapshot, path)
                raise (refused if is_ours and prompt is None else error) from error
            await compute(self._submit, ids)
            ids = own_ids(ids, owner)
            leaf = Leaf(ids, prompt_tokens=len(ids), key_tokens=len(ids), last_used_at=time.time())
            own = self._model
            info = SessionInfo(new_id(), own.namespace, own.name, (leaf,), created_at=time.time())
        else:
            store = self._stored().for_namespace(model.namespace)
            info = await asyncio.to_thread(import_snapshot, store, checked)
            info = replace(info, namespace=model.namespace)
        return await self._book.adopt(info, name)

    def _check_whole(self) -> None:
        if self._kv.layout.divided:
            raise Unsupported(
                "Prompt caches of a model on several machines can be neither exported nor "
                "imported: make a snapshot, or serve the model on one machine for that."
            )

    def _stored(self) -> Store:
        if self._book.store is None:
            raise Unsupported("Snapshots need a disk tier, and this server has none (--disk off).")
        return self._book.store


def _is_snapshot(path: Path) -> bool:
    """Return False for a prompt cache of mlx-lm, True for a snapshot and for any other file."""
    try:
        return detect_format(path) == "mlxcache"
    except SnapshotRefused:
        return True


# -- prompt caches of mlx-lm ------------------------------------------------------------------


class PromptCacheExport:
    """A prompt cache file of `nbytes` bytes; iterate once, on any thread except the MLX thread.

    A lineage stays leased until the iteration ends or the export is garbage collected.
    """

    def __init__(
        self, kv: KVCache, thread: MlxThread, ids: Tokens, model: str, owner: str | None = None
    ):
        """Lease the lineage of `ids`. Call on the MLX thread.

        Raises Busy if RAM does not hold their KV or has no room, RuntimeError if the device fails.
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
    whether the content of a file is the same.
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
        """Read the file at `path`, insert its KV under `own_ids(ids, owner)`, and return `ids`.

        It is not inserted if it differs from what the model computes, or if there is no memory.
        Call on the MLX thread. Raises SnapshotRefused, Unsupported, and BadRequest for a file
        without valid token ids.
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
        """Append the KV of `ids` that is not in RAM to a lineage, and commit it, if possible."""
        kv = self._kv
        lease = kv.acquire(join_ids(ids, ids[-1:]), 1)
        if lease is None:
            return
        try:
            start = lease.length
            if start < len(ids):
                tail = ([array[..., start:, :] for array in slot] for slot in found.arrays)
                lease.lineage.append(tail, len(ids) - start)
                if kv.layout.opaque:
                    lease.lineage.go_on_to(found.state)
                kv.commit(lease, ids, checkpoint=True)
                kv.persist(lease, ids, whole=True)
        except BaseException:
            kv.abandon(lease)
            raise
        kv.release(lease)


async def compute(submit: Submit, ids: Tokens) -> None:
    """Compute the KV of `ids` that is not in RAM, and a checkpoint after the last of them.

    The prompt has one more token, because no checkpoint can be taken after the last token of a
    prompt.
    """
    if not len(ids) or int(ids.min()) < 0:
        raise Unsupported("mlx-lm's prompt caches hold only text, and this session has images.")
    prompt = Prompt(join_ids(ids, ids[-1:]), marks=(len(ids),))
    job = Job(f"req_{secrets.token_hex(12)}", prompt, max_tokens=1, raw=True, api=WARMING)
    async with await submit(job) as stream:
        async for _ in stream:
            pass
