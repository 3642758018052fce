"""The disk tier of one folder: find, verify, write, pin and remove KV by its token ids."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from mlxcache.errors import Corrupt, DiskFull, Gone, StoreError, Unsupported
from mlxcache.safetensors import Malformed, Tensor
from mlxcache.store import index
from mlxcache.store.context import StoreContext
from mlxcache.store.database import Database, store_errors
from mlxcache.store.digests import Chain, Chains, root_digest
from mlxcache.store.eviction import Space, files_to_evict
from mlxcache.store.folder import KINDS, TEMP_SUFFIX, Folder, remove
from mlxcache.store.found import Found, Problem, RunPart, Saved, StoreStats
from mlxcache.store.index import Match, Row, read_totals
from mlxcache.store.kv_files import (
    check_checkpoint,
    check_run,
    check_whole,
    is_run_finite,
    open_file,
    read_ahead,
)
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Held, Listed, ReadIds
from mlxcache.store.lock import is_alive
from mlxcache.store.parts import other_parts, read_part_name
from mlxcache.store.recovery import is_being_written, open_folder
from mlxcache.store.saving import save_checkpoint, save_run
from mlxcache.store.snapshots import SnapshotKV
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.store.sessions import Sessions

FREE_FLOOR = 2_000_000_000

MOST_LEAVES_READ = 50

Progress = Callable[[int, int], None]

_UNREADABLE = (errno.EIO, errno.ENXIO, errno.EISDIR, errno.ELOOP)
"""Errors that mean a damaged file, unlike those for a lack of descriptors or memory."""


class Store:
    """Runs and checkpoints of one namespace in a folder that several processes may share.

    `database` also holds tables of other modules, such as that of sessions. `limit`: bytes for the
    whole folder, or None. Thread-safe. Methods raise StoreError.
    """

    def __init__(
        self, context: StoreContext, namespace: str, *, needs_checkpoints: bool | None = None
    ):
        self.context = context
        self._chains = Chains(namespace)
        self._needs_checkpoints = needs_checkpoints
        self.database: Database = context.database
        self.folder: Path = context.folder.path
        self.namespace: str = namespace
        self.limit: int | None = context.space.limit

    @classmethod
    def open(
        cls,
        folder: Path,
        namespace: str,
        limit: int | None,
        *,
        free_floor: int = FREE_FLOOR,
        needs_checkpoints: bool | None = None,
        reading: bool = False,
    ) -> Store:
        """Open `folder`, creating it if it is missing, and repair what a killed process left.

        `limit`: most bytes that the whole folder may take on disk; files beyond it are evicted at
        once. None means no limit, for commands without a server. `free_floor`: bytes of the disk to
        leave free. `needs_checkpoints`: the model has layers whose state cannot be cut; None infers
        this from the files. `reading`: nothing will be written. A folder that cannot be written, or
        is on a full disk if `reading`, is opened for reading only: see `obstacle`. Blocks while
        another process opens the same folder.
        """
        context = open_folder(Space(Folder(folder), limit, free_floor), reading=reading)
        return cls(context, namespace, needs_checkpoints=needs_checkpoints)

    @property
    def obstacle(self) -> str | None:
        return self.database.obstacle

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """Allow the body of a `with` statement to free space on a full disk; see `Reserve`."""
        if self.obstacle is not None:
            yield
            return
        with self.context.reserve.freeing() as full:
            yield
            if full:
                with suppress(DiskFull):  # what the block did is done
                    self.database.empty_log()

    def for_namespace(self, namespace: str) -> Store:
        """Return a store of another namespace in the same open folder; only one may be closed."""
        return self if namespace == self.namespace else Store(self.context, namespace)

    def close(self) -> None:
        self.context.close()

    def chain(self, ids: Tokens) -> Chain:
        return self._chains.of(ids)

    # -- finding and verifying -------------------------------------------------------------------

    def find(self, ids: Tokens, *, touch: bool = True) -> Found:
        """Find the longest prefix of `ids` on disk, to the token, and the checkpoints along it.

        `touch`: count this as a use of the files found, which delays their eviction.
        """
        return self._look_up(ids, touch=touch)

    def _look_up(self, ids: Tokens, *, touch: bool) -> Found:
        with self.database.read() as connection:
            match = index.lookup(connection, self._chains.of(ids))
        if touch:
            self.context.note_use(match.rows)
        pieces = tuple(
            RunPart(self._path(row), row.id, start, end, row.start, row.stop, row.nbytes)
            for row, start, end in match.cover
        )
        saved = tuple(
            Saved(self._path(row), row.id, row.start, row.nbytes) for row in match.checkpoints
        )
        return Found(match.length, pieces, saved)

    def reused(self, found: Found, tokens: int) -> None:
        ids = [piece.id for piece in found.pieces if piece.start < tokens]
        ids += [one.id for one in found.checkpoints if one.position <= tokens]
        self.context.note_reuse(ids)

    def note_uses(self) -> None:
        if self.obstacle is not None:
            return
        with self.database.write() as connection:
            self.context.write_uses(connection)

    def verify(self, piece: RunPart, ids: Tokens) -> None:
        """Read a file and check its header, tokens and checksums against `piece`.

        `ids`: those for which `piece` was found, or others with the same beginning. Raises
        Corrupt after moving a damaged file to quarantine and removing the files that continue it,
        Gone if the file was evicted, or StoreError if it cannot be read.
        """
        base = self._chains.of(ids[: piece.first]).whole[-1]
        self._verify(piece, lambda fd: check_run(fd, self.namespace, base, piece, ids))

    def verify_checkpoint(self, saved: Saved, ids: Tokens) -> None:
        position = saved.position
        digest = self._chains.of(ids[:position]).at(position)
        self._verify(saved, lambda fd: check_checkpoint(fd, self.namespace, digest, position))

    def read_ahead(self, piece: RunPart) -> None:
        """Tell the system to read a file. Does not block."""
        read_ahead(piece.path)

    def has_checkpoints(self) -> bool:
        """Return whether the model needs checkpoints, inferred from the newest runs if unknown."""
        if self._needs_checkpoints is not None:
            return self._needs_checkpoints
        with self.database.read() as connection:
            return index.has_checkpoints(connection, root_digest(self.namespace))

    def on_disk(self, listed: Sequence[Listed], ids: ReadIds) -> list[Listed]:
        held: dict[str, Held] = {}
        for namespace in {one.session.namespace for one in listed}:
            own = [one for one in listed if one.session.namespace == namespace]
            found = self.for_namespace(namespace).measure([one.leaves for one in own], ids)
            held |= {one.session.id: disk for one, disk in zip(own, found, strict=True)}
        return [replace(one, disk=held[one.session.id]) for one in listed]

    def look_ahead(self, listed: Sequence[Listed], ids: ReadIds) -> None:
        self.on_disk(listed, ids)

    def measure(self, groups: Sequence[Sequence[LeafRow]], ids: ReadIds) -> list[Held]:
        """Return the durable tokens of each leaf, and the bytes of each group's files."""

        def look_up(path: Tokens) -> tuple[Chain, Match]:
            chain = self._chains.of(path)
            return chain, index.lookup(connection, chain)

        needed = self.has_checkpoints()
        with self.database.read() as connection:
            return self.context.leaf_files.measure(connection, groups, ids, look_up, needed=needed)

    # -- writing ---------------------------------------------------------------------------------

    def write_run(self, ids: Tokens, start: int, tensors: Sequence[Tensor]) -> None:
        """Save the KV of tokens [start, len(ids)). Blocks for an fsync; durable on return.

        `start` is a multiple of 64; the first axis of each tensor is those tokens. Blocks that are
        already on disk are left out. Raises PrefixNotStored if [0, start) is not on disk, DiskFull
        if no room can be made, and ValueError for a wrong `start` or shape.
        """
        save_run(self.context, self._chains.of(ids), start, tensors)

    def write_checkpoint(self, ids: Tokens, tensors: Sequence[Tensor]) -> None:
        """Save `tensors`, the state after `ids`. Blocks for an fsync; durable on return.

        Afterwards surplus checkpoints along the path are removed. Raises DiskFull if no room can be
        made, and ValueError if `ids` is empty.
        """
        save_checkpoint(self.context, self._chains.of(ids), tensors)

    def snapshot_kv(self) -> SnapshotKV:
        """Return this store's KV as snapshots hold it; raises Unsupported for a rank's part."""
        if (part := read_part_name(self.namespace)) is not None:
            raise Unsupported(
                f"This session was made while the model was divided among {part.size} machines: "
                "serve it there in the same way to make a snapshot of it."
            )
        return SnapshotKV(self)

    def make_room(self, nbytes: int) -> None:
        """Evict files until other tables of the database can grow by `nbytes`. Raises DiskFull."""
        with self.database.write() as connection:
            self.context.check_present()
            self.context.make_room(connection, nbytes, has_row=False)

    # -- pinning and removing --------------------------------------------------------------------

    def pin(self, name: str, paths: Sequence[Tokens]) -> None:
        """Pin the files of `paths` under `name` instead of those before; they are evicted last.

        Files written later are not pinned until the next call.
        """
        with self.database.write() as connection:
            connection.execute("DELETE FROM pin WHERE name = ?", (name,))
            for ids in paths:
                match = index.lookup(connection, self._chains.of(ids))
                pins = [(name, row.id) for row in match.rows]
                connection.executemany("INSERT OR IGNORE INTO pin VALUES (?, ?)", pins)

    def pin_session(self, sessions: Sessions, id: str, *, pinned: bool) -> None:
        if not pinned:
            self.pin(id, [])
            return
        paths = [leaf.ids for leaf in sessions.leaves(id)]
        self.for_namespace(sessions.get(id).namespace).pin(id, paths)

    def delete_session(self, sessions: Sessions, id: str) -> None:
        """Remove a session and the files that no other session needs."""
        session, leaves = sessions.get(id), sessions.leaves(id)
        with self.freeing():
            self.pin(id, [])
            sessions.delete(id)
            for leaf in leaves:
                self.for_namespace(session.namespace).remove_unshared(sessions, leaf.ids)

    def remove_unshared(self, sessions: Sessions, ids: Tokens) -> int:
        """Remove the files of `ids` (of all parts) that no session needs; return how many."""
        others, files = sessions.sharing(self.namespace, ids), self._files(ids)
        if len(others) > MOST_LEAVES_READ:
            shared = max(others.values())
            needed = {file.id for file in files if _needed_beyond(file) < shared}
        else:
            needed = {file.id for leaf in others for file in self._files(sessions.ids(leaf))}
        for part in other_parts(self.namespace):
            Store(self.context, part).remove_beyond(ids, max(others.values(), default=0))
        return self._remove(files, needed)

    def remove_beyond(self, ids: Tokens, keep: int) -> int:
        files = self._files(ids)
        return self._remove(files, {file.id for file in files if _needed_beyond(file) < keep})

    def _remove(self, files: Sequence[RunPart | Saved], needed: set[int]) -> int:
        """Remove those of `files` that no `needed` file continues; return how many."""
        gone, left = 0, [file.id for file in files]
        while left:
            id = left.pop()
            with self.database.read() as connection:
                rows = index.subtree(connection, id)
            if rows and not {row.id for row in rows} & needed:
                with self.freeing():
                    gone += self.context.remove_file(id, corrupt=False)
                # the run it was built on may have stayed only because of it
                left += [row.parent for row in rows if row.id == id and row.parent is not None]
        return gone

    def forget_beyond(self, ids: Tokens, keep: int) -> None:
        """Remove the files that reach beyond the first `keep` tokens of `ids`.

        Called because the KV after these tokens is not finite. Each of these files is removed as a
        whole, with the files that continue it. But a run that other paths share is read first, and
        stays if its values after `keep` are finite: another request computed it.
        """
        while beyond := [file for file in self._files(ids) if _end(file) > keep]:
            own = {file.id for file in beyond}
            wrong = [file for file in beyond if not self._is_sound_for_others(file, own, keep)]
            for file in wrong:
                self.context.remove_file(file.id, corrupt=False)
            if not wrong:
                break

    # -- the whole folder ------------------------------------------------------------------------

    def stats(self) -> StoreStats:
        context = self.context
        with self.database.read() as connection, store_errors(self.folder):
            used = context.space.used(connection)
            runs, checkpoints = (read_totals(connection, kind) for kind in KINDS)
            quarantined = len(context.folder.quarantined())
            obstacle = self.obstacle or context.space.obstacle(connection, used)
        return self._with_counts(
            obstacle,
            used_bytes=used,
            runs=runs.files,
            checkpoints=checkpoints.files,
            run_bytes=runs.disk,
            checkpoint_bytes=checkpoints.disk,
            index_bytes=used - runs.disk - checkpoints.disk,
            tokens=runs.tokens,
            pinned_bytes=runs.pinned_disk + checkpoints.pinned_disk,
            quarantined=quarantined,
        )

    def nothing(self, obstacle: str) -> StoreStats:
        return self._with_counts(obstacle)

    def check(self, progress: Progress = lambda _, __: None) -> list[Problem]:
        return [problem for problem, _ in _problems(self.context, progress)]

    def prune(self, limit: int | None = None, progress: Progress = lambda _, __: None) -> int:
        """Remove damaged files and the quarantine, then evict files down to `limit` bytes.

        Returns the bytes freed, without those of files removed because they continue a damaged one.
        Removes all that `check` reports except a damaged index, which the next start rebuilds.
        """
        context = self.context
        with self.freeing():
            _remove_problems(context, progress)
            with store_errors(self.folder):
                with self.database.write() as connection:
                    context.check_present()
                    context.write_uses(connection)
                    before = context.space.used(connection)
                    context.folder.trim_quarantine(0, keep=0)
                    if limit is not None:
                        context.count("evicted", len(context.space.shrink(connection, limit)))
                return self._freed(before)

    def clear(self, *, pinned: bool = False) -> int:
        """Remove the runs and checkpoints of every namespace, and the quarantine.

        Unless `pinned`, pinned files stay, and those that they continue. Returns the bytes freed.
        """
        context = self.context
        with self.freeing(), store_errors(self.folder):
            with self.database.write() as connection:
                context.check_present()
                before = context.space.used(connection)
                context.folder.trim_quarantine(0, keep=0)
                kept = index.pinned(connection)
                everything = read_totals(connection).disk + 1
                every = files_to_evict(connection, everything, partly=True) or []
                going = takewhile(lambda row: pinned or row.id not in kept, every)
                context.space.remove(connection, list(going))
            return self._freed(before)

    def _freed(self, before: int) -> int:
        with suppress(DiskFull):  # the pages stay in the index, and are used again
            self.database.empty_log()
            self.database.empty_log(shrink=True)
        with self.database.read() as connection:
            return max(0, before - self.context.space.used(connection))

    def _with_counts(self, obstacle: str | None, **held: int) -> StoreStats:
        names = ("written_bytes", "written_tokens", "verified", "corrupt", "evicted")
        counts = {name: self.context.counted(name) for name in names}
        return StoreStats(limit_bytes=self.limit, obstacle=obstacle, **held, **counts)

    def _path(self, row: Row) -> Path:
        return self.context.folder.file(row.kind, row.digest)

    def _files(self, ids: Tokens) -> list[RunPart | Saved]:
        found = self._look_up(ids, touch=False)
        return [*found.pieces, *found.checkpoints]

    def _verify(self, file: RunPart | Saved, check: Callable[[int], None]) -> None:
        gone = Gone(f"{file.path.name} was evicted meanwhile.")
        with self.database.read() as connection:
            if index.one(connection, "id = ? AND owner IS NULL", file.id) is None:
                raise gone
        try:
            with open_file(file.path) as fd:
                check(fd)
        except FileNotFoundError as error:
            self.context.remove_file(file.id, corrupt=False)
            raise gone from error
        except (Malformed, OSError) as error:
            if isinstance(error, OSError) and error.errno not in _UNREADABLE:
                raise StoreError(f"{file.path} cannot be read: {error.strerror}.") from error
            if not self.context.remove_file(file.id, corrupt=True):
                raise gone from error
            raise Corrupt(
                f"{file.path.name} is damaged and was moved to quarantine: {error}."
            ) from error
        self.context.count("verified")

    def _is_sound_for_others(self, file: RunPart | Saved, own: set[int], keep: int) -> bool:
        """Return whether it is a run that other paths use too, with finite values after `keep`."""
        if isinstance(file, Saved):
            return False
        with self.database.read() as connection:
            behind = {row.id for row in index.subtree(connection, file.id)} - own
        shared = bool(behind) or file.end < file.last
        return shared and is_run_finite(file.path, max(0, keep - file.first))


def _end(file: RunPart | Saved) -> int:
    return file.position if isinstance(file, Saved) else file.end


def _needed_beyond(file: RunPart | Saved) -> int:
    """Return the most leading tokens of a path that do not need `file`, a file of that path."""
    return file.position - 1 if isinstance(file, Saved) else file.first


def _problems(context: StoreContext, progress: Progress) -> Iterator[tuple[Problem, Row | None]]:
    """Yield each problem with the index row of its file, or None if it has no row."""
    with store_errors(context.folder.path):
        with context.database.steady() as connection:  # no file is added or removed while listing
            context.check_present()
            (verdict,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
            rows = _paths(context, connection)
            present = [Path(entry.path) for _, entry in context.folder.files()]
        if verdict != "ok":
            yield Problem(context.folder.index, f"is damaged: {verdict}"), None
        for path in present:
            if path not in rows and not is_being_written(context.folder, path):
                left = path.name.endswith(TEMP_SUFFIX)
                what = "was left by a process that ended" if left else "is not in the index"
                yield Problem(path, what), None
        ids = {row.id for row in rows.values()}
        for number, (path, row) in enumerate(rows.items(), start=1):
            context.database.check_open()  # a closing server does not wait for this
            if wrong := _row_problem(context, path, row, ids):
                yield Problem(path, wrong), row
            progress(number, len(rows))


def _remove_problems(context: StoreContext, progress: Progress) -> None:
    strays: set[Path] = set()
    for problem, row in list(_problems(context, progress)):
        if row is not None:
            context.remove_file(row.id, corrupt=True)
        elif problem.path != context.folder.index:
            strays.add(problem.path)
    if strays:
        with context.database.write() as connection:  # another process may have added them
            for path in strays - _paths(context, connection).keys():
                remove(path)


def _paths(context: StoreContext, connection: sqlite3.Connection) -> dict[Path, Row]:
    return {context.folder.file(row.kind, row.digest): row for row in index.rows(connection)}


def _row_problem(context: StoreContext, path: Path, row: Row, ids: Collection[int]) -> str | None:
    if row.owner is not None:
        if is_alive(context.folder.locks, row.owner):
            return None
        return "was left unfinished by a process that ended"
    if row.parent is not None and row.parent not in ids:
        return "builds on a run that is missing"
    try:
        check_whole(path, row)
    except FileNotFoundError:
        with context.database.read() as connection:
            there = index.one(connection, "id = ?", row.id)
        return None if there is None else "is in the index but missing"
    except (Malformed, OSError) as error:
        return f"is damaged: {error}"
    return None
