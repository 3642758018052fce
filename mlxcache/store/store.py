"""The disk tier of one folder: find, verify, write, pin and remove KV by its token ids."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mlxcache.errors import Corrupt, DiskFull, Gone, StoreError, Unsupported
from mlxcache.safetensors import Malformed, Tensor
from mlxcache.store import index, maintenance
from mlxcache.store.context import StoreContext
from mlxcache.store.database import Database, store_errors
from mlxcache.store.digests import Chain, Chains, root_digest
from mlxcache.store.eviction import Space
from mlxcache.store.folder import CHECKPOINT, RUN, Folder
from mlxcache.store.found import Found, Piece, Problem, Saved, StoreStats
from mlxcache.store.index import Match, Row
from mlxcache.store.kv_files import (
    check_checkpoint,
    check_run,
    is_run_finite,
    open_file,
    read_ahead,
)
from mlxcache.store.leaf_files import ReadIds
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Held, Listed
from mlxcache.store.lock import NoLock, ProcessLock, opening_lock
from mlxcache.store.maintenance import Progress
from mlxcache.store.parts import other_parts, read_part_name
from mlxcache.store.recovery import (
    StoreReopener,
    find_obstacle,
    free_least,
    open_copy,
    open_database,
    recover,
)
from mlxcache.store.reserve import LEAST_BYTES, Reserve
from mlxcache.store.saving import save_checkpoint, save_run
from mlxcache.store.snapshot_kv import SnapshotKV
from mlxcache.store.totals import Totals, read_totals
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.store.sessions import Sessions

FREE_FLOOR = 2_000_000_000
"""Bytes of the file system that the store leaves free for other programs."""

MOST_LEAVES_READ = 50
"""Most leaves whose files are looked up one by one before the files of a session are removed.

If more leaves share tokens with the session, every file that contains shared tokens stays.
"""

_UNREADABLE = (errno.EIO, errno.ENXIO, errno.EISDIR, errno.ELOOP)
"""Errors that mean a damaged file, unlike those for a lack of descriptors or memory."""


class Store:
    """Runs and checkpoints of one namespace in a folder that several processes may share.

    `database` also holds tables of other modules, such as that of sessions. `context`: the state of
    the open folder. `limit`: limit in bytes for the whole folder, or None. `needs_checkpoints`: see
    `open`. Thread-safe.
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
        once. None means no limit, for commands that work without a server. `free_floor`: bytes of
        the disk to leave free. `needs_checkpoints`: the model has layers whose state cannot be cut;
        None infers this from the files. `reading`: nothing will be written. A folder that cannot be
        written, or is on a full disk if `reading`, is opened for reading only: see `obstacle`.
        Blocks while another process opens the same folder. Raises StoreError.
        """
        place = Folder(folder)
        space, reserve = Space(place, limit, free_floor), Reserve(place, limit)
        with store_errors(folder):
            why = find_obstacle(place)
            if reading and why is None and place.index.exists() and place.free() < LEAST_BYTES:
                why = f"The disk of {folder} is full."
            if why is not None:
                context = _open_copy(place, space, reserve, why)
            else:
                context = _open(place, space, reserve)
        return cls(context, namespace, needs_checkpoints=needs_checkpoints)

    @property
    def obstacle(self) -> str | None:
        """Reason why the folder can only be read now; None if it can be written."""
        return self.database.obstacle

    @contextmanager
    def freeing(self) -> Iterator[None]:
        """Allow the body of a `with` statement to free space even if the disk is full.

        On a full disk, the reserve is removed before the body, and written again after it as far as
        there is space; see `Reserve`. Does nothing while the folder cannot be written.
        """
        if self.obstacle is not None:
            yield
            return
        with self.context.reserve.freeing() as full:
            yield
            if full:
                with suppress(DiskFull):  # what the block did is done
                    self.database.empty_log()

    def for_namespace(self, namespace: str) -> Store:
        """Return a store of another namespace in the same open folder.

        Both share the open folder, so only one of them may be closed.
        """
        return self if namespace == self.namespace else Store(self.context, namespace)

    def close(self) -> None:
        """Write the uses of files that were not written yet, and close the folder.

        Later calls raise StoreError, also those of stores made by `for_namespace`.
        """
        self.context.close()

    def chain(self, ids: Tokens) -> Chain:
        """Return the digests of the prefixes of `ids`, by which files and objects are named."""
        return self._chains.of(ids)

    # -- finding and verifying -------------------------------------------------------------------

    def find(self, ids: Tokens, *, touch: bool = True) -> Found:
        """Find the longest prefix of `ids` on disk, to the token, and the checkpoints along it.

        `touch`: count this as a use of the files found, which delays their eviction. Uses are
        written to the index later, with the next write or by `note_uses`. Raises StoreError.
        """
        return self._look_up(ids, touch=touch)

    def _look_up(self, ids: Tokens, *, touch: bool) -> Found:
        """Find what this folder has; see `find`, which subclasses restrict."""
        with self.database.read() as connection:
            match = index.lookup(connection, self._chains.of(ids))
        if touch:
            self.context.note_use([row for row, _, _ in match.cover])
            self.context.note_use(match.checkpoints)
        pieces = tuple(
            Piece(self._path(row), row.id, start, end, row.start, row.stop, row.nbytes)
            for row, start, end in match.cover
        )
        saved = tuple(
            Saved(self._path(row), row.id, row.start, row.nbytes) for row in match.checkpoints
        )
        return Found(match.length, pieces, saved)

    def reused(self, found: Found, tokens: int) -> None:
        """Count that a request reused the first `tokens` tokens of `found`.

        The counts stay in memory until the next write to the index, or `note_uses`.
        """
        ids = [piece.id for piece in found.pieces if piece.start < tokens]
        ids += [one.id for one in found.checkpoints if one.position <= tokens]
        self.context.note_reuse(ids)

    def note_uses(self) -> None:
        """Write to the index the uses that `find` counted, and the reuses that `reused` counted.

        They are collected in memory until this or any other write to the index. Does nothing
        while the index cannot be written.
        """
        if self.obstacle is not None:
            return
        with self.database.write() as connection:
            self.context.write_uses(connection)

    def verify(self, piece: Piece, ids: Tokens, *, late: bool = True) -> None:
        """Read a file and check its header, tokens and checksums against `piece`.

        `ids`: token ids for which `piece` was found, or others with the same beginning. Unless
        `late`, the tensors of sliding windows are not read. Raises Corrupt after moving a damaged
        file to quarantine and removing the files that continue it, Gone if the file was evicted, or
        StoreError if it cannot be read.
        """
        base = self._chains.of(ids[: piece.first]).whole[-1]
        self._verify(piece, lambda fd: check_run(fd, self.namespace, base, piece, ids, late=late))

    def verify_checkpoint(self, saved: Saved, ids: Tokens) -> None:
        """Read a checkpoint and check it against `saved`. Raises as `verify`.

        `ids`: token ids for which `saved` was found, or others with the same beginning.
        """
        position = saved.position
        digest = self._chains.of(ids[:position]).at(position)
        self._verify(saved, lambda fd: check_checkpoint(fd, self.namespace, digest, position))

    def read_ahead(self, piece: Piece, nbytes: int = 0) -> None:
        """Tell the operating system to read a file that will be verified soon. Does not block.

        `nbytes`: how many bytes from its start on; 0 means all.
        """
        read_ahead(piece.path, nbytes)

    def has_checkpoints(self) -> bool:
        """Return whether the model needs checkpoints, inferred from the newest runs if unknown."""
        if self._needs_checkpoints is not None:
            return self._needs_checkpoints
        with self.database.read() as connection:
            return index.has_checkpoints(connection, root_digest(self.namespace))

    def on_disk(self, listed: Sequence[Listed], ids: ReadIds) -> list[Listed]:
        """Return sessions of any namespaces with what is on disk of them. Raises StoreError."""
        held: dict[str, Held] = {}
        for namespace in {one.session.namespace for one in listed}:
            own = [one for one in listed if one.session.namespace == namespace]
            found = self.for_namespace(namespace).measure([one.leaves for one in own], ids)
            held |= {one.session.id: disk for one, disk in zip(own, found, strict=True)}
        return [replace(one, disk=held[one.session.id]) for one in listed]

    def look_ahead(self, listed: Sequence[Listed], ids: ReadIds) -> None:
        """Look up the files of sessions, so that `on_disk` is fast later. Raises StoreError."""
        self.on_disk(listed, ids)

    def measure(self, groups: Sequence[Sequence[LeafRow]], ids: ReadIds) -> list[Held]:
        """Return how many tokens of each leaf are durable, and the bytes of each group's files.

        The files do not count as used. `ids` reads token ids; it is called for leaves whose files
        may have changed since they were measured last. Raises StoreError.
        """

        def look_up(path: Tokens) -> tuple[Chain, Match]:
            chain = self._chains.of(path)
            return chain, index.lookup(connection, chain)

        needed = self.has_checkpoints()
        with self.database.read() as connection:
            return self.context.leaf_files.measure(connection, groups, ids, look_up, needed=needed)

    # -- writing ---------------------------------------------------------------------------------

    def write_run(
        self,
        ids: Tokens,
        start: int,
        tensors: Sequence[Tensor],
        late: frozenset[str] = frozenset(),
    ) -> None:
        """Save the KV of tokens [start, len(ids)). Blocks for an fsync; durable on return.

        `start` is a multiple of 64; the first axis of each tensor is those tokens. Blocks that are
        already on disk are left out, and nothing is written if all are. `late`: names of the
        tensors of sliding windows; `verify` can skip them, because a prompt that continues far
        beyond these tokens does not read them. Raises PrefixNotStored if [0, start) is not on disk,
        DiskFull if no room can be made, StoreError, and ValueError for a wrong `start` or shape.
        """
        save_run(self.context, self._chains.of(ids), start, tensors, late)

    def write_checkpoint(self, ids: Tokens, tensors: Sequence[Tensor]) -> None:
        """Save `tensors`, the state after `ids`. Blocks for an fsync; durable on return.

        Nothing is written if it is on disk already. Afterwards surplus checkpoints along the path
        are removed; see `thinning`. Raises DiskFull if no room can be made, StoreError, and
        ValueError if `ids` is empty.
        """
        save_checkpoint(self.context, self._chains.of(ids), tensors)

    def snapshot_kv(self) -> SnapshotKV:
        """Return the KV of this store in the form in which snapshots hold it.

        Raises Unsupported if it cannot be converted to that form, because the store has only one
        rank's part of it.
        """
        if (part := read_part_name(self.namespace)) is not None:
            raise Unsupported(
                f"This session was made while the model was divided among {part.size} machines: "
                "serve it there in the same way to make a snapshot of it."
            )
        return SnapshotKV(self)

    def make_room(self, nbytes: int) -> None:
        """Evict files until the database can grow by `nbytes` bytes within the folder's limits.

        Called before rows are added to tables other than that of files, such as those of sessions.
        Raises DiskFull and StoreError.
        """
        with self.database.write() as connection:
            self.context.check_present()
            self.context.make_room(connection, nbytes, has_row=False)

    # -- pinning and removing --------------------------------------------------------------------

    def pin(self, name: str, paths: Sequence[Tokens]) -> None:
        """Pin the files of `paths` under `name`, so that they are evicted last.

        `name`: any text, such as the id of a session. `paths`: token ids, each from token 0. They
        replace the files pinned under `name` before; empty `paths` unpin those. Files written later
        are not pinned until the next call. Raises StoreError.
        """
        with self.database.write() as connection:
            connection.execute("DELETE FROM pin WHERE name = ?", (name,))
            for ids in paths:
                match = index.lookup(connection, self._chains.of(ids))
                files = [row.id for row, _, _ in match.cover]
                files += [row.id for row in match.checkpoints]
                connection.executemany(
                    "INSERT OR IGNORE INTO pin VALUES (?, ?)", [(name, file) for file in files]
                )

    def pin_session(self, sessions: Sessions, id: str, *, pinned: bool) -> None:
        """Pin or unpin the files of the session `id`, of any namespace.

        `sessions`: the table with the session; its rows are not changed. Raises StoreError, and
        NotFound if `pinned` is True and there is no session `id`.
        """
        if not pinned:
            self.pin(id, [])
            return
        paths = [leaf.ids for leaf in sessions.leaves(id)]
        self.for_namespace(sessions.get(id).namespace).pin(id, paths)

    def delete_session(self, sessions: Sessions, id: str) -> None:
        """Remove a session of any namespace, and the files that no other session needs.

        `sessions`: the table that holds it. Raises NotFound if it has no session `id`, StoreError
        if the disk or the index fails.
        """
        session, leaves = sessions.get(id), sessions.leaves(id)
        with self.freeing():
            self.pin(id, [])
            sessions.delete(id)
            for leaf in leaves:
                self.for_namespace(session.namespace).remove_unshared(sessions, leaf.ids)

    def remove_unshared(self, sessions: Sessions, ids: Tokens) -> int:
        """Remove the files of `ids` that no session needs; return the number removed.

        A file that also contains tokens of a session stays as a whole. If the model is divided, the
        files of other ranks' parts in this folder are removed too, but not counted. Raises
        StoreError.
        """
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
        """Remove the files of `ids` that are not needed to reuse its first `keep` tokens.

        These are the runs without any of those tokens, and the checkpoints at positions above
        `keep`. Files that continue a removed one are removed too. Returns the number of all files
        removed. Raises StoreError.
        """
        files = self._files(ids)
        return self._remove(files, {file.id for file in files if _needed_beyond(file) < keep})

    def _remove(self, files: Sequence[Piece | Saved], needed: set[int]) -> int:
        """Remove those of `files` that are not needed, and return the number of files removed.

        `needed`: ids of files that must stay; the files that these continue stay too. All files
        that continue a removed file are removed with it. The run that a removed file continued is
        then removed as well, unless it must stay.
        """
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
        stays if its values after `keep` are finite: another request computed it. Raises StoreError.
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
        """Return the figures of the whole folder, and the counts of this process.

        Raises StoreError.
        """
        context = self.context
        with self.database.read() as connection, store_errors(self.folder):
            used = context.space.used(connection)
            held = read_totals(connection)
            quarantined = len(context.folder.quarantined())
            obstacle = self.obstacle or context.space.obstacle(connection, used)
        runs, checkpoints = held.get(RUN, Totals()), held.get(CHECKPOINT, Totals())
        both = runs + checkpoints
        return self._with_counts(
            obstacle,
            used_bytes=used,
            runs=runs.files,
            checkpoints=checkpoints.files,
            run_bytes=runs.disk,
            checkpoint_bytes=checkpoints.disk,
            index_bytes=used - both.disk,
            tokens=both.tokens,
            pinned_bytes=both.pinned_disk,
            quarantined=quarantined,
        )

    def nothing(self, obstacle: str) -> StoreStats:
        """Return zeros as the figures of a folder that cannot be read; `obstacle` says why not.

        The counts of this process are included.
        """
        return self._with_counts(obstacle)

    def check(self, progress: Progress = lambda _, __: None) -> list[Problem]:
        """Read every file of every namespace and return the problems found. Changes nothing.

        `progress(done, total)` is called with numbers of files. Raises StoreError, also if the
        store is closed in the meantime.
        """
        return maintenance.check(self.context, progress)

    def prune(self, limit: int | None = None, progress: Progress = lambda _, __: None) -> int:
        """Remove damaged files and the quarantine, then evict files down to `limit` bytes.

        If `limit` is None, nothing is evicted. Returns the bytes freed, without those of files
        removed because they continue a damaged one. Reads every file, and removes all that `check`
        reports except a damaged index, which the next start rebuilds. `progress(done, total)` is
        called with numbers of files. Raises StoreError.
        """
        with self.freeing():
            return maintenance.prune(self.context, limit, progress)

    def clear(self, *, pinned: bool = False) -> int:
        """Remove the runs and checkpoints of every namespace, and the quarantine.

        Unless `pinned`, pinned files stay, and those that they continue. Files that are being
        written always stay. Returns the bytes freed. Raises StoreError.
        """
        with self.freeing():
            return maintenance.clear(self.context, pinned)

    def _with_counts(self, obstacle: str | None, **held: int) -> StoreStats:
        names = ("written_bytes", "written_tokens", "verified", "corrupt", "evicted")
        counts = {name: self.context.counted(name) for name in names}
        return StoreStats(limit_bytes=self.limit, obstacle=obstacle, **held, **counts)

    def _path(self, row: Row) -> Path:
        return self.context.folder.file(row.kind, row.digest)

    def _files(self, ids: Tokens) -> list[Piece | Saved]:
        found = self._look_up(ids, touch=False)
        return [*found.pieces, *found.checkpoints]

    def _verify(self, file: Piece | Saved, check: Callable[[int], None]) -> None:
        """Open a file and check it; a damaged file goes to quarantine. Raises as `verify`.

        `check(descriptor)` raises Malformed if the open file is damaged.
        """
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

    def _is_sound_for_others(self, file: Piece | Saved, own: set[int], keep: int) -> bool:
        """Return whether `file` is a run that other paths use too, with finite values after `keep`.

        `keep`: position in the path that is examined. `own`: ids of the files of that path that
        reach beyond `keep`.
        """
        if isinstance(file, Saved):
            return False
        with self.database.read() as connection:
            behind = {row.id for row in index.subtree(connection, file.id)} - own
        shared = bool(behind) or file.end < file.last
        return shared and is_run_finite(file.path, max(0, keep - file.first))


def _open(place: Folder, space: Space, reserve: Reserve) -> StoreContext:
    """Open a folder that can be written, and repair it. Raises StoreError and OSError."""
    place.make()
    with reserve.freeing(), opening_lock(place.path):
        free_least(place)
        lock = ProcessLock(place.locks)
        try:
            database = open_database(place, space.limit)
            context = StoreContext(place, database, lock, space, reserve)
            recover(context)
            with database.read() as connection:
                context.resume_clock(index.latest_use(connection))
            maintenance.evict_excess(context)
            database.check_before(StoreReopener(context))
        except BaseException:
            lock.release()
            raise
    return context


def _open_copy(place: Folder, space: Space, reserve: Reserve, why: str) -> StoreContext:
    """Open a folder for reading only, with a copy of its index in memory.

    `why`: the reason why it cannot be written, for messages. Raises StoreError and OSError.
    """
    place.note_device()
    database = open_copy(place, why)
    context = StoreContext(place, database, NoLock(), space, reserve)
    with database.read() as connection:
        context.resume_clock(index.latest_use(connection))
    database.check_before(StoreReopener(context))
    return context


def _end(file: Piece | Saved) -> int:
    """Return the position up to which `file` has KV, or a state, of the ids it was found for."""
    return file.position if isinstance(file, Saved) else file.end


def _needed_beyond(file: Piece | Saved) -> int:
    """Return the most leading tokens of a path that do not need `file`, a file of that path.

    A session that shares more leading tokens than that with the path needs the file.
    """
    return file.position - 1 if isinstance(file, Saved) else file.first
