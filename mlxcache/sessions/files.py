"""Import and export of sessions as files: snapshots, and mlx-lm's prompt caches."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from mlxcache.cache.kv_cache import KVCache
from mlxcache.errors import DiskFull, SnapshotRefused, Unsupported
from mlxcache.mlx_thread import MlxThread
from mlxcache.model.mlx_lm_format import check_portable
from mlxcache.owner import OWNER, own_ids, plain_ids
from mlxcache.private import make_folder
from mlxcache.sessions.journal import Served
from mlxcache.sessions.mlx_lm_files import (
    PromptCacheExport,
    PromptCacheReader,
    Submit,
    compute,
)
from mlxcache.store.database import store_errors
from mlxcache.store.listing import Listed
from mlxcache.store.lock import is_running
from mlxcache.store.sessions import new_id
from mlxcache.store.snapshot_format import LeafInfo, SessionInfo, detect_format
from mlxcache.store.snapshot_read import (
    Snapshot,
    check_prompt_cache,
    import_snapshot,
    read_snapshot,
    with_owner,
)
from mlxcache.store.snapshot_write import SnapshotExport
from mlxcache.store.store import FREE_FLOOR, Store

INCOMING = re.compile(r"restore-(\d+)-.*")
"""Pattern of the names of files being received: the process id and random characters."""


def remove_stale(folder: Path) -> None:
    """Remove the files in `folder` that servers were still receiving when they were killed.

    Other files, such as those that a running server is receiving, stay.
    """
    for path in folder.glob("restore-*"):
        match = INCOMING.fullmatch(path.name)
        if match and not is_running(int(match[1])):
            path.unlink(missing_ok=True)


class SessionFiles:
    """Exports sessions to files and imports them. Use on the event loop.

    `info(id)` returns a session, `adopt(info, name)` adds one to the table, and `settled()` waits
    for pending writes to disk; see `SessionBook`. `store` is None if there is no disk tier.
    """

    def __init__(
        self,
        store: Store | None,
        model: Served,
        kv: KVCache,
        thread: MlxThread,
        *,
        info: Callable[[str], Awaitable[SessionInfo]],
        adopt: Callable[[SessionInfo, str | None], Awaitable[Listed]],
        settled: Callable[[], Awaitable[bool]],
        submit: Submit,
        prompt_caches: PromptCacheReader,
        incoming: Path,
    ):
        self._store = store
        self._info = info
        self._adopt = adopt
        self._settled = settled
        self._model = model
        self._kv = kv
        self._thread = thread
        self._submit = submit
        self._prompt_caches = prompt_caches
        self._incoming = incoming

    async def snapshot(self, id: str) -> SnapshotExport:
        """Return a snapshot of a session; iterate it on another thread, because it reads files.

        Raises NotFound and StoreError; and Unsupported without a disk tier, or for a model on
        several ranks whose KV cannot be joined.
        """
        store = self._stored()
        info = await self._info(id)
        await self._settled()
        seen = store.for_namespace(info.namespace)
        return await asyncio.to_thread(SnapshotExport, seen, info, OWNER.get())

    async def prompt_cache(self, id: str) -> PromptCacheExport:
        """Export the main leaf of a session as a prompt cache file for mlx-lm's tools.

        Computes the KV that is not in RAM. Raises NotFound; Busy if there is no memory, or if the
        KV was evicted meanwhile; Unsupported for a session of another model or with images, for a
        model whose cache mlx-lm cannot read from such a file, and for one on several ranks; and
        what `Engine.submit` raises.
        """
        self._check_whole()
        info = await self._info(id)
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
        """Return the folder in which to write a file of `nbytes` bytes that `restore` then reads.

        Creates the folder. Raises DiskFull if the disk has no room for the file, and StoreError if
        the folder cannot be created.
        """
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
    ) -> Listed:
        """Import the file at `path`: a snapshot, or a prompt cache of mlx-lm.

        `name`: name of the new session; None for the name in the snapshot. `prompt`: text, or JSON
        list of token ids, of which the prompt cache was made, if the file has no tokens. KV that a
        prompt cache lacks, or that cannot be used, is computed.
        `served`: another model to which the snapshot must belong, and which need not be loaded.
        Raises SnapshotRefused, BadRequest and StoreError; for a snapshot Unsupported without a disk
        tier, and on several ranks among which its KV cannot be divided; for a prompt cache
        Unsupported on several ranks, and what `Engine.submit` raises.
        """
        owner = OWNER.get()
        try:
            checked = await asyncio.to_thread(self._read, path, served or self._model)
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
            leaf = LeafInfo(
                ids, prompt_tokens=len(ids), key_tokens=len(ids), last_used_at=time.time()
            )
            model = self._model
            info = SessionInfo(
                new_id(), model.namespace, model.name, (leaf,), created_at=time.time()
            )
        else:
            namespace = (served or self._model).namespace
            store = self._stored().for_namespace(namespace)
            info = await asyncio.to_thread(import_snapshot, store, checked)
            info = replace(info, namespace=namespace)
        return await self._adopt(info, name)

    def _read(self, path: Path, model: Served) -> Snapshot:
        return read_snapshot(
            path,
            model.snapshot_namespace,
            model=model.name,
            spec=model.spec,
            vocab_size=model.vocab_size,
        )

    def _check_whole(self) -> None:
        """Raise Unsupported if this process has only a part of the KV."""
        if self._kv.layout.lockstep.divided:
            raise Unsupported(
                "Prompt caches of a model on several machines can be neither exported nor "
                "imported: make a snapshot, or serve the model on one machine for that."
            )

    def _stored(self) -> Store:
        if self._store is None:
            raise Unsupported("Snapshots need a disk tier, and this server has none (--disk off).")
        return self._store


def _is_snapshot(path: Path) -> bool:
    """Return False for a prompt cache of mlx-lm, True for a snapshot and for any other file."""
    try:
        return detect_format(path) == "mlxcache"
    except SnapshotRefused:
        return True
