"""Writing runs and checkpoints: a row that sets room aside, the file, then the row made durable."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mlxcache.errors import PrefixNotStored, StoreError
from mlxcache.safetensors import Header, Tensor
from mlxcache.store import index
from mlxcache.store.context import StoreContext
from mlxcache.store.database import translated
from mlxcache.store.digests import BLOCK, Chain
from mlxcache.store.folder import CHECKPOINT, RUN, remove, write
from mlxcache.store.index import Match, Row
from mlxcache.store.kv_files import (
    Checkpoint,
    Run,
    block_checksums,
    checkpoint_header,
    checksum_of,
    run_header,
)
from mlxcache.store.lock import alive
from mlxcache.store.thinning import crowded, unneeded
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


def save_run(
    context: StoreContext,
    chain: Chain,
    start: int,
    tensors: Sequence[Tensor],
    late: frozenset[str],
) -> None:
    """Save the KV of the chain's tokens from `start` on; see `Store.write_run`."""
    start = int(start)  # NumPy's integers are not JSON's
    length = len(chain.ids)
    count = length - start
    if start % BLOCK or start < 0 or count <= 0 or not tensors:
        raise ValueError(f"no run of {length} tokens can begin at {start}")
    for tensor in tensors:
        if not tensor.shape or tensor.shape[0] != count:
            raise ValueError(f"{tensor.name} of shape {tensor.shape} is not one of {count} tokens")
    ordered = sorted(tensors, key=lambda tensor: tensor.name in late)

    def draft(match: Match) -> _Draft | None:
        if match.length < start:
            raise PrefixNotStored(f"of the {start} tokens before a run, {match.length} are on disk")
        if match.length >= length:
            return None
        return _draft_run(
            context, chain, match, _from(ordered, match.length // BLOCK * BLOCK - start), late
        )

    _save(context, chain, draft)


def save_checkpoint(context: StoreContext, chain: Chain, tensors: Sequence[Tensor]) -> None:
    """Save the state after the chain's tokens; see `Store.write_checkpoint`."""
    if not len(chain.ids):
        raise ValueError("a checkpoint needs at least one token before it")

    def draft(match: Match) -> _Draft | None:
        if match.checkpoints and match.checkpoints[-1].start == len(chain.ids):
            return None
        _make_way(context, match, sum(tensor.nbytes for tensor in tensors))
        return _draft_checkpoint(context, chain, match, tensors)

    _save(context, chain, draft)


def _make_way(context: StoreContext, match: Match, nbytes: int) -> None:
    """Remove other checkpoints for one of `nbytes`, so that there is room left for KV."""
    limit = context.space.limit
    if limit is None or not match.cover:
        return
    with context.database.write() as connection:
        context.check_present()
        context.write_uses(connection)
        rows = crowded(connection, context.space.estimate(nbytes, 0), limit)
        context.space.remove(connection, rows)
    context.count("evicted", len(rows))


def _from(tensors: Sequence[Tensor], skipped: int) -> list[Tensor]:
    """The tensors without the first `skipped` of their tokens; views, no copies."""
    found = []
    for tensor in tensors:
        shape = (tensor.shape[0] - skipped, *tensor.shape[1:])
        at = tensor.nbytes // tensor.shape[0] * skipped
        found.append(Tensor(tensor.name, tensor.dtype, shape, tensor.bytes[at:]))
    return found


def _draft_run(
    context: StoreContext, chain: Chain, match: Match, tensors: list[Tensor], late: frozenset[str]
) -> _Draft:
    stop = len(chain.ids)
    start = match.length // BLOCK * BLOCK
    base = chain.whole[start // BLOCK]
    buffers = [tensor.bytes for tensor in tensors]
    tokens = chain.ids[start:]
    sums, late_sums = (
        block_checksums([t.bytes for t in tensors if (t.name in late) is is_late], len(tokens))
        for is_late in (False, True)
    )
    words = Run(
        _NO_HEADER,
        chain.namespace,
        base,
        start,
        tokens,
        tuple(sums),
        late,
        tuple(late_sums) if late else (),
    )
    header = run_header(words, tensors)
    row = _row(context, RUN, chain.at(stop), base, match.holder(start))
    row = replace(row, key=chain.at(min(start + BLOCK, stop)), start=start, stop=stop)
    return _Draft(row, [header, *buffers], tokens)


def _draft_checkpoint(
    context: StoreContext, chain: Chain, match: Match, tensors: Sequence[Tensor]
) -> _Draft:
    position = len(chain.ids)
    base = chain.whole[position // BLOCK]
    digest = chain.at(position)
    buffers = [tensor.bytes for tensor in tensors]
    previous = match.checkpoints[-1] if match.checkpoints else None
    words = Checkpoint(
        header=_NO_HEADER,
        namespace=chain.namespace,
        digest=digest,
        base=base,
        position=position,
        previous=previous.digest if previous else b"",
        checksum=checksum_of(buffers),
    )
    header = checkpoint_header(words, tensors)
    row = _row(context, CHECKPOINT, digest, base, match.holder(position))
    row = replace(row, start=position, stop=position, previous=previous.id if previous else None)
    return _Draft(row, [header, *buffers])


def _row(context: StoreContext, kind: str, digest: bytes, base: bytes, parent: Row | None) -> Row:
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
        used=context.now(),
        parent=parent.id if parent else None,
        previous=None,
        owner=context.lock.name,
    )


def _save(context: StoreContext, chain: Chain, draft: Callable[[Match], _Draft | None]) -> None:
    """Write what `draft` makes of the state of the index; None: it is all there."""
    deadline = time.monotonic() + WAIT_S
    with context.saving:
        while True:
            with context.database.read() as connection:
                version = index.version(connection)
                match = index.lookup(connection, chain)
            context.note_use(_path(match), unless_within=_USE_S)
            made = draft(match)
            if made is None:
                return
            try:
                id = _reserve(context, chain, match, made, version)
            except _Taken:
                if time.monotonic() > deadline:
                    raise StoreError(
                        "Another process has been writing the same for long."
                    ) from None
                time.sleep(_POLL_S)
            except _Changed:
                continue
            else:
                _put(context, chain, match, made, id)
                return


def _reserve(
    context: StoreContext, chain: Chain, match: Match, made: _Draft, version: tuple[int, int, int]
) -> int:
    """Add the row, make the room; returns the id. Raises _Changed if `match` no longer holds."""
    row = made.row
    with context.database.write() as connection:
        context.check_present()
        for stale in index.rows(connection, "owner = ?", context.lock.name):
            index.delete(connection, stale)  # a write that failed so badly that it could not
        same = index.one(connection, "kind = ? AND digest = ?", row.kind, row.digest)
        if same is not None and same.owner is not None and alive(context.folder, same.owner):
            raise _Taken
        changed = index.version(connection) != version
        if changed and _essence(index.lookup(connection, chain)) != _essence(match):
            raise _Changed
        if same is not None and same.owner is not None:
            context.space.remove(connection, [same])
            same = None
        nbytes = sum(len(buffer) for buffer in made.buffers)
        size = context.space.estimate(nbytes, row.stop - row.start)
        if same is None:
            id = index.insert(connection, replace(row, nbytes=nbytes, disk=size))
            context.make_room(connection, size, has_row=True)
            return id
    # the index is wrong about a file that the lookup should have found
    context.remove_file(same.id, corrupt=False)
    raise _Changed


def _put(context: StoreContext, chain: Chain, match: Match, made: _Draft, id: int) -> None:
    """Write the file and make its row durable; after an error neither is there."""
    row = made.row
    final = context.folder.file(row.kind, row.digest)
    temp = context.folder.temp(row.kind, row.digest, context.lock.name, id)
    try:
        with translated(final):
            size = write(temp, final, made.buffers)
        with context.database.write() as connection:
            _make_durable(context, connection, made, id, size)
            if made.tokens is None:
                path = index.lookup(connection, chain)
                limit = context.space.limit or 0
                gone = unneeded(connection, chain.namespace, chain.ids, path, limit)
                context.space.remove(connection, gone)
            for checkpoint in match.checkpoints:
                if checkpoint.parent is None and row.start < checkpoint.start <= row.stop:
                    connection.execute(
                        "UPDATE file SET parent = ? WHERE id = ?", (id, checkpoint.id)
                    )
    except BaseException:
        with suppress(StoreError), context.database.write() as connection:
            connection.execute("DELETE FROM file WHERE id = ?", (id,))
        with suppress(OSError):
            remove(final)
        raise
    context.count("written_bytes", sum(len(buffer) for buffer in made.buffers))
    context.count("written_tokens", row.stop - row.start)


def _make_durable(
    context: StoreContext, connection: sqlite3.Connection, made: _Draft, id: int, size: int
) -> None:
    changed = connection.execute(
        "UPDATE file SET owner = NULL, disk = ?, used = ? WHERE id = ?", (size, context.now(), id)
    )
    if not changed.rowcount:
        raise PrefixNotStored("what a run builds on was found damaged while it was written")
    if made.tokens is not None:
        index.put_tokens(connection, id, made.tokens)


def _path(match: Match) -> list[Row]:
    return [row for row, _, _ in match.cover] + list(match.checkpoints)


def _essence(match: Match) -> tuple[int, list[int]]:
    return (match.length, [row.id for row in _path(match)])
