"""Writing runs and checkpoints: a row that sets room aside, the file, then the row made durable."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mlxcache.errors import NotAnchored, StoreError
from mlxcache.store import checksums, contents, index
from mlxcache.store.core import Core
from mlxcache.store.database import translated
from mlxcache.store.digests import BLOCK, Chain
from mlxcache.store.folder import CHECKPOINT, RUN, remove, write
from mlxcache.store.index import Match, Row
from mlxcache.store.owner import alive
from mlxcache.store.safetensors import Header
from mlxcache.store.tensors import Tensor
from mlxcache.store.thin import crowded, unneeded
from mlxcache.types import Tokens

WAIT_S = 30.0
"""How long a file that another process is writing is waited for."""

_POLL_S = 0.02
_USE_S = 30.0
"""A path that is written to is marked as used so often at most."""

_NO_HEADER = Header({}, (), 0)


class _Changed(Exception):
    """The index is not what it was when the file was composed: look again."""


class _Taken(_Changed):
    """Somebody else is writing the same file."""


@dataclass(frozen=True, slots=True)
class _Draft:
    """A row to be (its sizes open), and the buffers that its file consists of."""

    row: Row
    buffers: Sequence[bytes | memoryview]
    tokens: Tokens | None = None


def run(
    core: Core, ids: Tokens, start: int, tensors: Sequence[Tensor], late: frozenset[str]
) -> None:
    """See `Store.write_run`."""
    start = int(start)  # NumPy's integers are not JSON's
    count = len(ids) - start
    if start % BLOCK or start < 0 or count <= 0 or not tensors:
        raise ValueError(f"no run of {len(ids)} tokens can begin at {start}")
    for tensor in tensors:
        if not tensor.shape or tensor.shape[0] != count:
            raise ValueError(f"{tensor.name} of shape {tensor.shape} is not one of {count} tokens")
    chain = core.chains.of(ids)
    ordered = sorted(tensors, key=lambda tensor: tensor.name in late)

    def draft(match: Match) -> _Draft | None:
        if match.length < start:
            raise NotAnchored(f"of the {start} tokens before a run, {match.length} are on disk")
        if match.length >= len(ids):
            return None
        return _draft_run(
            core, chain, match, _from(ordered, match.length // BLOCK * BLOCK - start), late
        )

    _save(core, chain, draft)


def checkpoint(core: Core, ids: Tokens, tensors: Sequence[Tensor]) -> None:
    """See `Store.write_checkpoint`."""
    if not len(ids):
        raise ValueError("no state comes after no tokens")
    chain = core.chains.of(ids)

    def draft(match: Match) -> _Draft | None:
        if match.checkpoints and match.checkpoints[-1].start == len(ids):
            return None
        _make_way(core, match, sum(tensor.nbytes for tensor in tensors))
        return _draft_checkpoint(core, chain, match, tensors)

    _save(core, chain, draft)


def _make_way(core: Core, match: Match, nbytes: int) -> None:
    """Remove other checkpoints for one of `nbytes`, so that there is room left for KV."""
    limit = core.space.limit
    if limit is None or not match.cover:
        return
    with core.database.write() as connection:
        core.check_there()
        core.note_uses(connection)
        rows = crowded(connection, core.space.estimate(nbytes, 0), limit)
        core.space.remove(connection, rows)
    core.count("evicted", len(rows))


def _from(tensors: Sequence[Tensor], skipped: int) -> list[Tensor]:
    """The tensors without the first `skipped` of their tokens; views, no copies."""
    found = []
    for tensor in tensors:
        shape = (tensor.shape[0] - skipped, *tensor.shape[1:])
        at = tensor.nbytes // tensor.shape[0] * skipped
        found.append(Tensor(tensor.name, tensor.dtype, shape, tensor.bytes[at:]))
    return found


def _draft_run(
    core: Core, chain: Chain, match: Match, tensors: list[Tensor], late: frozenset[str]
) -> _Draft:
    stop = len(chain.ids)
    start = match.length // BLOCK * BLOCK
    base = chain.whole[start // BLOCK]
    buffers = [tensor.bytes for tensor in tensors]
    tokens = chain.ids[start:]
    sums, late_sums = (
        checksums.of_blocks([t.bytes for t in tensors if (t.name in late) is is_late], len(tokens))
        for is_late in (False, True)
    )
    words = contents.Run(
        _NO_HEADER,
        core.namespace,
        base,
        start,
        tokens,
        tuple(sums),
        late,
        tuple(late_sums) if late else (),
    )
    header = contents.run_header(words, tensors)
    row = _row(core, RUN, chain.at(stop), base, match.holder(start))
    row = replace(row, key=chain.at(min(start + BLOCK, stop)), start=start, stop=stop)
    return _Draft(row, [header, *buffers], tokens)


def _draft_checkpoint(core: Core, chain: Chain, match: Match, tensors: Sequence[Tensor]) -> _Draft:
    position = len(chain.ids)
    base = chain.whole[position // BLOCK]
    digest = chain.at(position)
    buffers = [tensor.bytes for tensor in tensors]
    previous = match.checkpoints[-1] if match.checkpoints else None
    words = contents.Checkpoint(
        header=_NO_HEADER,
        namespace=core.namespace,
        digest=digest,
        base=base,
        position=position,
        previous=previous.digest if previous else b"",
        checksum=checksums.of_whole(buffers),
    )
    header = contents.checkpoint_header(words, tensors)
    row = _row(core, CHECKPOINT, digest, base, match.holder(position))
    row = replace(row, start=position, stop=position, previous=previous.id if previous else None)
    return _Draft(row, [header, *buffers])


def _row(core: Core, kind: str, digest: bytes, base: bytes, parent: Row | None) -> Row:
    return Row(
        id=0,
        kind=kind,
        digest=digest,
        base=base,
        key=base,
        start=0,
        stop=0,
        nbytes=0,
        disk=0,
        used=core.now(),
        parent=parent.id if parent else None,
        previous=None,
        owner=core.owner.name,
    )


def _save(core: Core, chain: Chain, draft: Callable[[Match], _Draft | None]) -> None:
    """Write what `draft` makes of the state of the index; None: it is all there."""
    deadline = time.monotonic() + WAIT_S
    with core.saving:
        while True:
            with core.database.read() as connection:
                version = index.version(connection)
                match = index.lookup(connection, chain)
            core.use(_path(match), unless_within=_USE_S)
            made = draft(match)
            if made is None:
                return
            try:
                id = _reserve(core, chain, match, made, version)
            except _Taken:
                if time.monotonic() > deadline:
                    raise StoreError(
                        "Another process has been writing the same for long."
                    ) from None
                time.sleep(_POLL_S)
            except _Changed:
                continue
            else:
                _put(core, chain, match, made, id)
                return


def _reserve(
    core: Core, chain: Chain, match: Match, made: _Draft, version: tuple[int, int, int]
) -> int:
    """Add the row, make the room; returns the id. Raises _Changed if `match` no longer holds."""
    row = made.row
    with core.database.write() as connection:
        core.check_there()
        for stale in index.rows(connection, "owner = ?", core.owner.name):
            index.delete(connection, stale)  # a write that failed so badly that it could not
        same = index.one(connection, "kind = ? AND digest = ?", row.kind, row.digest)
        if same is not None and same.owner is not None and alive(core.folder, same.owner):
            raise _Taken
        changed = index.version(connection) != version
        if changed and _essence(index.lookup(connection, chain)) != _essence(match):
            raise _Changed
        if same is not None and same.owner is not None:
            core.space.remove(connection, [same])
            same = None
        nbytes = sum(len(buffer) for buffer in made.buffers)
        size = core.space.estimate(nbytes, row.stop - row.start)
        if same is None:
            id = index.insert(connection, replace(row, nbytes=nbytes, disk=size))
            core.make_room(connection, size, has_row=True)
            return id
    core.drop(same.id, corrupt=False)  # it should have been found: the index is wrong about it
    raise _Changed


def _put(core: Core, chain: Chain, match: Match, made: _Draft, id: int) -> None:
    """Write the file and make its row durable; after an error neither is there."""
    row = made.row
    final = core.folder.file(row.kind, row.digest)
    temp = core.folder.temp(row.kind, row.digest, core.owner.name, id)
    try:
        with translated(final):
            size = write(temp, final, made.buffers)
        with core.database.write() as connection:
            _make_durable(core, connection, made, id, size)
            if made.tokens is None:
                path = index.lookup(connection, chain)
                limit = core.space.limit or 0
                gone = unneeded(connection, core.namespace, chain.ids, path, limit)
                core.space.remove(connection, gone)
            for checkpoint in match.checkpoints:
                if checkpoint.parent is None and row.start < checkpoint.start <= row.stop:
                    connection.execute(
                        "UPDATE file SET parent = ? WHERE id = ?", (id, checkpoint.id)
                    )
    except BaseException:
        with suppress(StoreError), core.database.write() as connection:
            connection.execute("DELETE FROM file WHERE id = ?", (id,))
        with suppress(OSError):
            remove(final)
        raise
    core.count("written_bytes", sum(len(buffer) for buffer in made.buffers))
    core.count("written_tokens", row.stop - row.start)


def _make_durable(
    core: Core, connection: sqlite3.Connection, made: _Draft, id: int, size: int
) -> None:
    changed = connection.execute(
        "UPDATE file SET owner = NULL, disk = ?, used = ? WHERE id = ?", (size, core.now(), id)
    )
    if not changed.rowcount:
        raise NotAnchored("what a run builds on was found damaged while it was written")
    if made.tokens is not None:
        index.put_tokens(connection, id, made.tokens)


def _path(match: Match) -> list[Row]:
    return [row for row, _, _ in match.cover] + list(match.checkpoints)


def _essence(match: Match) -> tuple[int, list[int]]:
    return (match.length, [row.id for row in _path(match)])
