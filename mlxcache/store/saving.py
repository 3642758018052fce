"""Saving of runs and checkpoints: a row that reserves space, the file, then the row is durable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from mlxcache.errors import PrefixNotStored, StoreError
from mlxcache.safetensors import Tensor
from mlxcache.store import index
from mlxcache.store.context import StoreContext
from mlxcache.store.database import store_errors
from mlxcache.store.digests import BLOCK, Chain
from mlxcache.store.eviction import checkpoints_over_share, surplus_checkpoints
from mlxcache.store.folder import CHECKPOINT, RUN, remove, write
from mlxcache.store.index import Match, Row
from mlxcache.store.kv_files import compose_checkpoint, compose_run
from mlxcache.store.lock import is_alive
from mlxcache.types import Tokens

WAIT_S = 30.0

_POLL_S = 0.02
_USE_S = 30.0
"""Seconds after a use of a file in which writing to its path does not count as another one."""


class _Changed(Exception):
    """Signal that the index changed since the file was composed, so it must be composed again."""


class _Taken(_Changed):
    """Signal that another process is writing the same file."""


@dataclass(frozen=True, slots=True)
class _NewFile:
    """A file to write: its index row, still without sizes, and the content of the file.

    `tokens`: token ids of a run; None for a checkpoint.
    """

    row: Row
    buffers: Sequence[bytes | memoryview]
    tokens: Tokens | None = None


def save_run(
    context: StoreContext,
    chain: Chain,
    start: int,
    tensors: Sequence[Tensor],
) -> None:
    start = int(start)  # NumPy's integers are not JSON's
    length = len(chain.ids)
    count = length - start
    if start % BLOCK or start < 0 or count <= 0 or not tensors:
        raise ValueError(
            f"no run of {length} tokens can begin at {start}: expected a multiple of {BLOCK} "
            "below the length, and tensors"
        )
    for tensor in tensors:
        if not tensor.shape or tensor.shape[0] != count:
            raise ValueError(
                f"{tensor.name} has shape {tensor.shape}: its first axis must be {count} tokens"
            )

    def compose(match: Match) -> _NewFile | None:
        if match.length < start:
            raise PrefixNotStored(
                f"only {match.length} of the {start} tokens before the run are on disk"
            )
        if match.length >= length:
            return None
        kept = _skip_rows(tensors, match.length // BLOCK * BLOCK - start)
        return _new_run(context, chain, match, kept)

    _save(context, chain, compose)


def save_checkpoint(context: StoreContext, chain: Chain, tensors: Sequence[Tensor]) -> None:
    if not len(chain.ids):
        raise ValueError("a checkpoint needs at least one token before it")

    def compose(match: Match) -> _NewFile | None:
        if match.checkpoints and match.checkpoints[-1].start == len(chain.ids):
            return None
        _evict_checkpoints(context, match, sum(tensor.nbytes for tensor in tensors))
        return _new_checkpoint(context, chain, match, tensors)

    _save(context, chain, compose)


def _evict_checkpoints(context: StoreContext, match: Match, nbytes: int) -> None:
    limit = context.space.limit
    if limit is None or not match.cover:
        return
    with context.database.write() as connection:
        context.check_present()
        context.write_uses(connection)
        rows = checkpoints_over_share(connection, context.space.estimate(nbytes, 0), limit)
        context.space.remove(connection, rows)
    context.count("evicted", len(rows))


def _skip_rows(tensors: Sequence[Tensor], skipped: int) -> list[Tensor]:
    found = []
    for tensor in tensors:
        shape = (tensor.shape[0] - skipped, *tensor.shape[1:])
        at = tensor.nbytes // tensor.shape[0] * skipped
        found.append(Tensor(tensor.name, tensor.dtype, shape, tensor.bytes[at:]))
    return found


def _new_run(context: StoreContext, chain: Chain, match: Match, tensors: list[Tensor]) -> _NewFile:
    start, stop = match.length // BLOCK * BLOCK, len(chain.ids)
    header = compose_run(chain, start, stop, tensors)
    key = chain.at(min(start + BLOCK, stop))
    place = (chain.at(stop), chain.whole[start // BLOCK], key, start, stop)
    row = _new_row(context, RUN, place, match.run_before(start), None)
    return _NewFile(row, [header, *(tensor.bytes for tensor in tensors)], chain.ids[start:])


def _new_checkpoint(
    context: StoreContext, chain: Chain, match: Match, tensors: Sequence[Tensor]
) -> _NewFile:
    position = len(chain.ids)
    base = chain.whole[position // BLOCK]
    previous = match.checkpoints[-1] if match.checkpoints else None
    header = compose_checkpoint(chain, previous.digest if previous else b"", tensors)
    place = (chain.at(position), base, base, position, position)
    row = _new_row(context, CHECKPOINT, place, match.run_before(position), previous)
    return _NewFile(row, [header, *(tensor.bytes for tensor in tensors)])


def _new_row(
    context: StoreContext,
    kind: str,
    place: tuple[bytes, bytes, bytes, int, int],
    parent: Row | None,
    previous: Row | None,
) -> Row:
    links = (parent.id if parent else None, previous.id if previous else None)
    return Row(0, kind, *place, 0, 0, context.now(), *links, context.lock.name)


def _save(context: StoreContext, chain: Chain, compose: Callable[[Match], _NewFile | None]) -> None:
    """Write the file that `compose` makes; durable on return.

    `compose(match)` gets the part of the chain that is on disk; it returns None if nothing needs to
    be written. It is called again if the index changes in the meantime. Raises StoreError, also if
    another process has been writing the same file for `WAIT_S` seconds.
    """
    deadline = time.monotonic() + WAIT_S
    with context.saving:
        while True:
            with context.database.read() as connection:
                version = index.version(connection)
                match = index.lookup(connection, chain)
            context.note_use(match.rows, unless_within=_USE_S)
            new = compose(match)
            if new is None:
                return
            try:
                id = _reserve(context, chain, match, new, version)
            except _Taken:
                if time.monotonic() > deadline:
                    path = context.folder.file(new.row.kind, new.row.digest)
                    raise StoreError(
                        f"Another process has been writing {path} for {WAIT_S:.0f} s."
                    ) from None
                time.sleep(_POLL_S)
            except _Changed:
                continue
            else:
                _put(context, chain, match, new, id)
                return


def _reserve(
    context: StoreContext, chain: Chain, match: Match, new: _NewFile, version: tuple[int, int, int]
) -> int:
    """Insert the row of a file to be written, make room for the file, and return the row's id.

    `match`: the part of `chain` on disk, found when `index.version` was `version`. Raises _Changed
    if `match` is out of date, or if a damaged file with the same digest had to be removed first,
    _Taken if another process is writing the file, and DiskFull if no room can be made.
    """
    row = new.row
    with context.database.write() as connection:
        context.check_present()
        for stale in index.rows(connection, "owner = ?", context.lock.name):
            index.delete(connection, stale)  # left by a failed write that could not remove it
        same = index.one(connection, "kind = ? AND digest = ?", row.kind, row.digest)
        owner = None if same is None else same.owner
        if owner is not None and is_alive(context.folder.locks, owner):
            raise _Taken
        changed = index.version(connection) != version
        if changed and _identity_of(index.lookup(connection, chain)) != _identity_of(match):
            raise _Changed
        if same is not None and owner is not None:
            context.space.remove(connection, [same])
            same = None
        nbytes = sum(len(buffer) for buffer in new.buffers)
        size = context.space.estimate(nbytes, row.stop - row.start)
        if same is None:
            id = index.insert(connection, replace(row, nbytes=nbytes, disk=size))
            context.make_room(connection, size, has_row=True)
            return id
    # its row is damaged, else the lookup would have found it
    context.remove_file(same.id, corrupt=False)
    raise _Changed


def _put(context: StoreContext, chain: Chain, match: Match, new: _NewFile, id: int) -> None:
    row = new.row
    final = context.folder.file(row.kind, row.digest)
    temp = context.folder.temp(row.kind, row.digest, context.lock.name, id)
    try:
        with store_errors(final):
            size = write(temp, final, new.buffers)
        with context.database.write() as connection:
            done = "UPDATE file SET owner = NULL, disk = ?, used = ? WHERE id = ?"
            if not connection.execute(done, (size, context.now(), id)).rowcount:
                raise PrefixNotStored(
                    "a run before this one was removed as damaged in the meantime"
                )
            if new.tokens is not None:
                index.put_tokens(connection, id, new.tokens)
            else:
                path = index.lookup(connection, chain)
                limit = context.space.limit or 0
                gone = surplus_checkpoints(connection, chain.namespace, chain.ids, path, limit)
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
    context.count("written_bytes", sum(len(buffer) for buffer in new.buffers))
    context.count("written_tokens", row.stop - row.start)


def _identity_of(match: Match) -> tuple[int, list[int]]:
    return (match.length, [row.id for row in match.rows])
