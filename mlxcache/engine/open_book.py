"""The book of sessions of a loaded model, opened."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from mlxcache.config import Settings
from mlxcache.model.serialise import run_spec
from mlxcache.sessions.book import SessionBook
from mlxcache.sessions.files import sweep
from mlxcache.sessions.journal import Served
from mlxcache.sessions.mlx_lm_files import Submit
from mlxcache.sessions.reply_feed import Learn
from mlxcache.store.database import TemporaryDatabase
from mlxcache.store.sessions import Sessions

if TYPE_CHECKING:
    from mlxcache.engine.runtime import Core


async def open_book(core: Core, settings: Settings, submit: Submit, learn: Learn) -> SessionBook:
    """The sessions of a loaded model: in its store's database, else in one that is never written.

    Raises StoreError.
    """
    store = core.disk.store if core.disk is not None else None
    layout, name = core.layout, core.info.id
    namespace = store.namespace if store is not None else f"ram:{name}"
    path = settings.model or str(core.loaded.path)
    served = Served(name, path, namespace, run_spec(layout), layout.vocab_size)
    database = store.database if store is not None else TemporaryDatabase()
    sessions = await asyncio.to_thread(Sessions, database)
    paces, speed = await asyncio.to_thread(sessions.paces, namespace), core.scheduler.prefill.speed
    core.scheduler.inbox.put(lambda: speed.resume(paces))
    await asyncio.to_thread(sweep, settings.cache_dir / "incoming")
    incoming = settings.cache_dir / "incoming"
    decode = core.loaded.tokenizer.decode
    book = SessionBook(
        sessions, served, core, submit, incoming=incoming, store=store, decode=decode, learn=learn
    )
    await book.open()
    return book
