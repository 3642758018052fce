"""Access to the sessions and files of a cache folder while no server uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxcache.cli.output import Step
from mlxcache.errors import MlxcacheError, NotFound
from mlxcache.private import create
from mlxcache.store.folder import STORE
from mlxcache.store.listing import Listed, related_objects
from mlxcache.store.lock import exclusive_lock
from mlxcache.store.sessions import Session, Sessions
from mlxcache.store.snapshot_format import detect_format
from mlxcache.store.snapshots import SnapshotExport, import_snapshot, read_snapshot
from mlxcache.store.store import Store


class Offline:
    """Sessions and files in the cache folder `cache_dir`, with the methods of `Remote` for them.

    Methods that change something lock the folder exclusively, and raise InUse while a server or
    another command has locked it.
    """

    def __init__(self, cache_dir: Path):
        self.cache_dir = cache_dir

    def __str__(self) -> str:
        return f"in {self.cache_dir}"

    # -- sessions ----------------------------------------------------------------------------

    def sessions(self) -> list[dict[str, Any]]:
        if not self._exists():
            return []
        with self._open(reading=True) as (store, sessions):
            return [one.as_object() for one in _listed(store, sessions, sessions.all())]

    def computing(self) -> int:
        return 0

    def session(self, id: str) -> dict[str, Any]:
        with self._open(reading=True) as (store, sessions):
            found = _listing(store, sessions, id)
            related = related_objects(sessions.related(found.session))
            return {**found.as_object(leaves=True), "related": related}

    def patch(self, id: str, **changes: Any) -> dict[str, Any]:
        with exclusive_lock(self.cache_dir), self._open() as (store, sessions):
            sessions.update(id, **changes)
            if "pinned" in changes:
                store.pin_session(sessions, id, pinned=changes["pinned"])
            return _listing(store, sessions, id).as_object()

    def delete(self, id: str) -> None:
        with exclusive_lock(self.cache_dir), self._open() as (store, sessions):
            store.delete_session(sessions, id)

    def fork(self, id: str, name: str | None, at_tokens: int | None) -> dict[str, Any]:
        with exclusive_lock(self.cache_dir), self._open() as (store, sessions):
            made = sessions.fork(id, time.time(), name, at_tokens)
            return _listing(store, sessions, made).as_object()

    def snapshot(self, id: str, path: Path, format: str, progress: Step) -> int:
        if format != "mlxcache":
            raise MlxcacheError(f"--format {format} needs a server with the model: start one.")
        done = 0
        with self._open(reading=True) as (store, sessions):
            info = sessions.info(id)
            parts = SnapshotExport(store.for_namespace(info.namespace), info)
            with create(path) as file:
                for part in parts:
                    file.write(part)
                    done += len(part)
                    progress(done, parts.nbytes)
        return done

    def restore(
        self, path: Path, name: str | None, prompt: str | None, model: str | None, progress: Step
    ) -> dict[str, Any]:
        if model is not None:
            raise MlxcacheError("--model names a model of a running server: start one.")
        if prompt is not None:
            raise MlxcacheError(
                "--prompt is for prompt caches of mlx-lm, which only a server imports: start one."
            )
        if detect_format(path) == "mlx-lm":
            raise MlxcacheError("Only a server imports prompt caches of mlx-lm: start one.")
        checked = read_snapshot(path)
        with exclusive_lock(self.cache_dir), self._open(make=True) as (store, sessions):
            info = import_snapshot(
                store.for_namespace(checked.session.namespace), checked, progress
            )
            return _listing(store, sessions, sessions.adopt(info, time.time(), name)).as_object()

    # -- the cache ---------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Return `disk` and `sessions` as in `GET /v1/cache`, as far as known without a server."""
        if not self._exists():
            return {"disk": {"used_bytes": 0, "limit_bytes": None, "files": 0}, "sessions": 0}
        with self._open(reading=True) as (store, sessions):
            stats = store.stats()
            disk = {
                "used_bytes": stats.used_bytes,
                "limit_bytes": stats.limit_bytes,
                "files": stats.runs + stats.checkpoints,
                "tokens": stats.tokens,
                "pinned_bytes": stats.pinned_bytes,
                "quarantined": stats.quarantined,
            }
            return {"disk": disk, "sessions": sessions.count()}

    def check(self, progress: Step) -> list[dict[str, str]]:
        if not self._exists():
            return []
        with self._open(reading=True) as (store, _):
            return [{"path": str(one.path), "what": one.what} for one in store.check(progress)]

    def prune(self, limit: int | None, progress: Step) -> dict[str, Any]:
        if not self._exists():
            return {"freed_bytes": 0}
        with exclusive_lock(self.cache_dir), self._open() as (store, _):
            return {"freed_bytes": store.prune(limit, progress)}

    def clear(self, *, pinned: bool) -> dict[str, Any]:
        if not self._exists():
            return {"sessions": 0, "freed_bytes": 0}
        with (
            exclusive_lock(self.cache_dir),
            self._open() as (store, sessions),
            store.freeing(),
        ):
            freed = store.clear(pinned=pinned)  # first: the rows need space on a full disk
            return {"sessions": sessions.clear(pinned=pinned), "freed_bytes": freed}

    def _exists(self) -> bool:
        return (self.cache_dir / STORE).is_dir()

    @contextmanager
    def _open(
        self, *, make: bool = False, reading: bool = False
    ) -> Iterator[tuple[Store, Sessions]]:
        if not make and not self._exists():
            raise NotFound(f"There are no sessions in {self.cache_dir}.")
        store = Store.open(self.cache_dir / STORE, "", None, reading=reading)
        try:
            yield store, Sessions(store.database)
        finally:
            store.close()


def _listing(store: Store, sessions: Sessions, id: str) -> Listed:
    return _listed(store, sessions, [sessions.get(id)])[0]


def _listed(store: Store, sessions: Sessions, rows: Sequence[Session]) -> Sequence[Listed]:
    return store.on_disk(sessions.listed(rows), sessions.ids_of)
