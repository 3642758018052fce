"""The disk tier of one folder, as the engine uses it: find, verify, write, evict."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from mlxcache.store import index, maintain, quarantine, save, verify
from mlxcache.store.comeback import Comeback
from mlxcache.store.core import Core
from mlxcache.store.database import Database, translated
from mlxcache.store.digests import root
from mlxcache.store.folder import CHECKPOINT, RUN, Folder
from mlxcache.store.found import Found, Piece, Problem, Saved, StoreStats
from mlxcache.store.index import Row
from mlxcache.store.owner import Owner, opening
from mlxcache.store.recover import open_database, recover
from mlxcache.store.space import Space
from mlxcache.store.tensors import Tensor
from mlxcache.types import Tokens

FREE_FLOOR = 2_000_000_000
"""Bytes of the file system that the store leaves free for everyone else."""


class Store:
    """Runs and checkpoints of one namespace in a folder that several processes may share.

    Every method may be called on any thread. `database` is the folder's, for other tables.
    """

    def __init__(self, core: Core):
        self._core = core
        self.database: Database = core.database
        self.folder: Path = core.folder.path
        self.namespace: str = core.namespace
        self.limit: int | None = core.space.limit
        self.states: bool | None = None
        """Whether the model has states that cannot be cut; None: nobody has said so."""

    @classmethod
    def open(
        cls, folder: Path, namespace: str, limit: int | None, *, free_floor: int = FREE_FLOOR
    ) -> Store:
        """Make or open `folder`, and put right what a killed process left.

        `limit` in bytes is a cap on all that the folder holds, by the file system's count; what
        exceeds it is evicted at once. None: no cap, for looking at a folder offline.
        Raises StoreError.
        """
        place = Folder(folder)
        with translated(folder):
            place.make()
            with opening(place):
                owner = Owner(place)
                try:
                    database = open_database(place, limit)
                    space = Space(place, limit, free_floor)
                    store = cls(Core(place, database, owner, space, namespace))
                    recover(store._core)
                    with database.read() as connection:
                        store._core.latest = index.latest_use(connection)
                    maintain.fit(store._core)
                    database.arrive = Comeback(store._core)
                except BaseException:
                    owner.release()
                    raise
        return store

    def find(self, ids: Tokens, *, touch: bool = True) -> Found:
        """The longest prefix of `ids` on disk, to the token, and the checkpoints along `ids`.

        `touch` counts as a use. Raises StoreError.
        """
        with self.database.read() as connection:
            match = index.lookup(connection, self._core.chains.of(ids))
        if touch:
            self._core.use([row for row, _, _ in match.cover])
            self._core.use(match.checkpoints)
        pieces = tuple(
            Piece(self._path(row), row.id, start, end, row.start, row.stop, row.nbytes)
            for row, start, end in match.cover
        )
        saved = tuple(
            Saved(self._path(row), row.id, row.start, row.nbytes) for row in match.checkpoints
        )
        return Found(match.length, pieces, saved)

    def reused(self, found: Found, tokens: int) -> None:
        """Count that a request went on from the first `tokens` of what was found."""
        ids = [piece.id for piece in found.pieces if piece.start < tokens]
        self._core.found(ids + [one.id for one in found.checkpoints if one.position <= tokens])

    def has_states(self) -> bool:
        """`states`; if nobody has said so, whether there are checkpoints beside the newest runs."""
        if self.states is not None:
            return self.states
        with self.database.read() as connection:
            return index.has_checkpoints(connection, root(self.namespace))

    def verify(self, piece: Piece, ids: Tokens, *, late: bool = True) -> None:
        """Read the file and check that it holds what `find` said, from its header to checksums.

        Without `late`, the tensors that were written as such are neither read nor checked.

        Raises Corrupt: the file is in quarantine, and all that builds on it is gone too. Raises
        Gone if the file was evicted meanwhile.
        """
        verify.run(self._core, piece, ids, late)

    def read_ahead(self, piece: Piece) -> None:
        """Have the system begin to read a file that is to be verified soon."""
        verify.read_ahead(piece.path)

    def verify_checkpoint(self, saved: Saved, ids: Tokens) -> None:
        """As `verify`, of a checkpoint."""
        verify.checkpoint(self._core, saved, ids)

    def write_run(
        self,
        ids: Tokens,
        start: int,
        tensors: Sequence[Tensor],
        late: frozenset[str] = frozenset(),
    ) -> None:
        """Save the KV of tokens [start, len(ids)); durable on return.

        `start` is a multiple of 64, and the first axis of each tensor is those tokens. Blocks that
        are on disk already are left out; nothing is written where all are. Raises NotAnchored
        if [0, start) is not on disk, DiskFull if no room can be made, StoreError. `late` names
        tensors that only positions soon after these tokens need: `verify` can leave them out.
        """
        save.run(self._core, ids, start, tensors, late)

    def write_checkpoint(self, ids: Tokens, tensors: Sequence[Tensor]) -> None:
        """Save the state after `ids`; durable on return. Raises DiskFull and StoreError.

        Those along one path are thinned to what its length allows: see `coverage`.
        """
        save.checkpoint(self._core, ids, tensors)

    def pin(self, name: str, paths: Sequence[Tokens]) -> None:
        """Evict what is on disk of `paths` last, in place of what `name` pinned before.

        No paths: `name` pins nothing. Files written later are not pinned until the next call.
        """
        with self.database.write() as connection:
            connection.execute("DELETE FROM pin WHERE name = ?", (name,))
            for ids in paths:
                match = index.lookup(connection, self._core.chains.of(ids))
                files = [row.id for row, _, _ in match.cover]
                files += [row.id for row in match.checkpoints]
                connection.executemany(
                    "INSERT OR IGNORE INTO pin VALUES (?, ?)", [(name, file) for file in files]
                )

    def make_room(self, nbytes: int) -> None:
        """Evict until `nbytes` more fit; for rows of other tables. Raises DiskFull."""
        with self.database.write() as connection:
            self._core.check_there()
            self._core.make_room(connection, nbytes, has_row=False)

    def note_uses(self) -> None:
        """Write the uses noted by `find` into the index, as each write does too."""
        with self.database.write() as connection:
            self._core.note_uses(connection)

    def stats(self) -> StoreStats:
        """Figures of the whole folder, and of what this process did."""
        core = self._core
        with self.database.read() as connection, translated(self.folder):
            used = core.space.used(connection)
            query = "SELECT kind, count(*), sum(disk) FROM file GROUP BY kind"
            kinds = {kind: held for kind, *held in connection.execute(query)}
            (tokens,) = connection.execute(
                "SELECT ifnull(sum(stop - start), 0) FROM file"
            ).fetchone()
            (pinned,) = connection.execute(
                "SELECT ifnull(sum(disk), 0) FROM file WHERE id IN (SELECT file FROM pin)"
            ).fetchone()
            quarantined = len(quarantine.entries(core.folder))
        runs, run_bytes = kinds.get(RUN, (0, 0))
        checkpoints, checkpoint_bytes = kinds.get(CHECKPOINT, (0, 0))
        return self._with_counts(
            used_bytes=used,
            runs=runs,
            checkpoints=checkpoints,
            run_bytes=run_bytes,
            checkpoint_bytes=checkpoint_bytes,
            index_bytes=used - run_bytes - checkpoint_bytes,
            tokens=tokens,
            pinned_bytes=pinned,
            quarantined=quarantined,
        )

    def nothing(self) -> StoreStats:
        """As `stats`, of a folder that cannot be read."""
        return self._with_counts()

    def _with_counts(self, **held: int) -> StoreStats:
        core = self._core
        names = ("written_bytes", "written_tokens", "verified", "corrupt", "evicted")
        counts = {name: core.counted(name) for name in names}
        return StoreStats(limit_bytes=self.limit, **held, **counts)

    def check(self, step: maintain.Step = lambda _, __: None) -> list[Problem]:
        """Read every file of every namespace and report what is wrong; changes nothing.

        Raises StoreError, also where the store is closed meanwhile.
        """
        return maintain.check(self._core, step)

    def prune(self, limit: int | None = None, step: maintain.Step = lambda _, __: None) -> int:
        """Remove what `check` names, and the quarantine; evict until all is within `limit`.

        Reads every file. The bytes freed; a damaged index is left for the next start to make again.
        """
        return maintain.prune(self._core, limit, step)

    def clear(self, *, pinned: bool = False) -> int:
        """Remove every file, pinned ones only if `pinned`; returns bytes freed."""
        return maintain.clear(self._core, pinned)

    def close(self) -> None:
        """Let go of the folder. Calls after this raise StoreError."""
        self._core.close()

    def _path(self, row: Row) -> Path:
        return self._core.folder.file(row.kind, row.digest)
