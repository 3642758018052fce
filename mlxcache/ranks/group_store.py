"""The store of rank 0: a prefix counts as on disk only if every rank has its part on disk."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from mlxcache.errors import GroupLost, PrefixNotStored, StoreError, Unsupported
from mlxcache.ranks import operations as op
from mlxcache.ranks.division import Division
from mlxcache.ranks.group_snapshots import GroupSnapshotKV
from mlxcache.ranks.leader import Leader
from mlxcache.safetensors import Tensor
from mlxcache.store.found import Found, Piece, Saved
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Held, Listed, ReadIds, durable_tokens
from mlxcache.store.parts import Mode, read_part_name
from mlxcache.store.sessions import Sessions
from mlxcache.store.snapshots import SnapshotKV
from mlxcache.store.store import Progress, Store
from mlxcache.types import Tokens

FIRST_PAUSE_S, PAUSE_S = 0.001, 0.05
"""Pause between two questions for the outcome of a write: the first one, and the longest."""


@dataclass(frozen=True, slots=True)
class Whole:
    """The model that a group of ranks serves, and its division.

    `namespace`: that of the model if one process serves it. `mode`: division by parts of layers
    ("tensor") or by layers ("pipeline"). `size`: number of ranks. `division`: how its KV is
    divided, or the reason why that is not known.
    """

    namespace: str
    mode: Mode
    size: int
    division: Division | str


class GroupStore(Store):
    """The store of rank 0 over `own`, its own folder, and those of the other ranks.

    A prefix is found as far as every rank has it, and a write has ended when it has ended on every
    rank. What is removed here is removed on the other ranks soon after. `whole`: the model that the
    group serves. Thread-safe. Raises StoreError if another rank cannot be reached; `Watch` reports
    that loss.
    """

    def __init__(self, own: Store, leader: Leader, whole: Whole, *, needs_checkpoints: bool):
        super().__init__(own.context, own.namespace, needs_checkpoints=needs_checkpoints)
        self._own = own
        self._leader = leader
        self._whole = whole
        self._uploading = threading.Lock()

    def for_namespace(self, namespace: str) -> Store:
        """Return a store of another namespace in the same open folder.

        If the namespace is that of a part of the same model from a time when it was divided in
        another way, the result is a `FormerGroupStore`.
        """
        own = super().for_namespace(namespace)
        part = read_part_name(namespace)
        if own is self or part is None or part.whole != self._whole.namespace:
            return own
        return FormerGroupStore(own, self._leader, part.mode, part.size)

    def snapshot_kv(self) -> SnapshotKV:
        division = self._whole.division
        if isinstance(division, str):
            raise Unsupported(f"No snapshot can be made or read here: {division}.")
        return GroupSnapshotKV(
            self,
            self._own,
            self._leader,
            division,
            self._whole.namespace,
            uploading=self._uploading,
            wait=partial(wait_for_outcome, self._leader),
        )

    def find(self, ids: Tokens, *, touch: bool = True) -> Found:
        found = self._look_up(ids, touch=touch)
        for answer in self._ask(op.Find(ids.tobytes(), touch)):
            found = _as_far(found, answer.length, answer.checkpoints)
        return found

    def look_ahead(self, listed: Sequence[Listed], ids: ReadIds) -> None:
        """Do nothing: what the other ranks hold is not remembered."""

    def measure(self, groups: Sequence[Sequence[LeafRow]], ids: ReadIds) -> list[Held]:
        return [self._measure([ids(leaf) for leaf in group]) for group in groups]

    def _measure(self, paths: Sequence[Tokens]) -> Held:
        found = [self._look_up(ids, touch=False) for ids in paths]
        for answer in self._ask(op.FindAll([ids.tobytes() for ids in paths])):
            pairs = zip(found, answer.found, strict=True)
            found = [_as_far(own, *theirs) for own, theirs in pairs]
        files = {one.path: one.nbytes for each in found for one in each.pieces}
        files |= {one.path: one.nbytes for each in found for one in each.checkpoints}
        needed = self.has_checkpoints()
        saved = ((x.length, [one.position for one in x.checkpoints]) for x in found)
        return Held(
            tuple(durable_tokens(*one, needed=needed) for one in saved), sum(files.values())
        )

    def verify(self, piece: Piece, ids: Tokens, *, late: bool = True) -> None:
        super().verify(piece, ids, late=late)
        question = op.Verify(ids[: piece.end].tobytes(), piece.start, piece.end, late)
        _check_verified(self._ask(question))

    def verify_checkpoint(self, saved: Saved, ids: Tokens) -> None:
        super().verify_checkpoint(saved, ids)
        _check_verified(self._ask(op.VerifyState(ids[: saved.position].tobytes())))

    def write_run(
        self,
        ids: Tokens,
        start: int,
        tensors: Sequence[Tensor],
        late: frozenset[str] = frozenset(),
    ) -> None:
        try:
            super().write_run(ids, start, tensors, late)
        finally:
            wait_for_outcome(self._leader, op.key_of(ids.tobytes(), start))

    def write_checkpoint(self, ids: Tokens, tensors: Sequence[Tensor]) -> None:
        try:
            super().write_checkpoint(ids, tensors)
        finally:
            wait_for_outcome(self._leader, op.key_of(ids.tobytes(), None))

    def pin(self, name: str, paths: Sequence[Tokens]) -> None:
        super().pin(name, paths)
        self._ask(op.Pin(name, [ids.tobytes() for ids in paths]))

    def remove_unshared(self, sessions: Sessions, ids: Tokens) -> int:
        needed = max(sessions.sharing(self.namespace, ids).values(), default=0)
        gone = super().remove_unshared(sessions, ids)
        self._ask(op.Remove(ids.tobytes(), needed, self._whole.mode, self._whole.size))
        return gone

    def forget_beyond(self, ids: Tokens, keep: int) -> None:
        super().forget_beyond(ids, keep)
        self._ask(op.Forget(ids.tobytes(), keep))

    def prune(self, limit: int | None = None, progress: Progress = lambda _, __: None) -> int:
        freed = super().prune(limit, progress)
        self._ask(op.Prune(limit))
        return freed

    def clear(self, *, pinned: bool = False) -> int:
        freed = super().clear(pinned=pinned)
        self._ask(op.Clear(pinned))
        return freed

    def _ask(self, question: op.AnyQuestion) -> list[op.Answer]:
        return ask_ranks(self._leader, question)


class FormerGroupStore(Store):
    """Rank 0's part of KV that the same model had while it was divided in another way.

    `own`: the store of that part. `mode`, `size`: how the model was divided then, and among how
    many ranks. `remove_unshared` also removes the parts that the other ranks of the present group
    have of these files. Thread-safe. Raises StoreError as `GroupStore` does.
    """

    def __init__(self, own: Store, leader: Leader, mode: Mode, size: int):
        super().__init__(own.context, own.namespace)
        self._leader, self._mode, self._size = leader, mode, size

    def remove_unshared(self, sessions: Sessions, ids: Tokens) -> int:
        needed = max(sessions.sharing(self.namespace, ids).values(), default=0)
        gone = super().remove_unshared(sessions, ids)
        ask_ranks(self._leader, op.Remove(ids.tobytes(), needed, self._mode, self._size))
        return gone


def ask_ranks(leader: Leader, question: op.AnyQuestion) -> list[op.Answer]:
    """Ask every other rank as `Leader.ask` does. Raises StoreError if one does not answer."""
    try:
        return leader.ask(question)
    except GroupLost as error:
        raise StoreError(f"The other ranks cannot be reached: {error}.") from error


def _as_far(found: Found, length: int, checkpoints: Sequence[int] | None) -> Found:
    """Return `found`, what this rank has of a prefix, restricted to what another rank has too.

    `length`: number of positions from the start of the prefix that the other rank has on its disk.
    `checkpoints`: the positions at which the other rank has checkpoints, or None if its layers need
    none.
    """
    saved = found.checkpoints
    if checkpoints is not None:
        known = set(checkpoints)
        saved = tuple(one for one in saved if one.position in known)
    length = min(found.length, length)
    pieces = tuple(
        replace(one, end=min(one.end, length)) for one in found.pieces if one.start < length
    )
    return replace(found, length=length, pieces=pieces, checkpoints=saved)


def _check_verified(answers: Sequence[op.Answer]) -> None:
    """Raise StoreError if an answer says that a file of its rank cannot be used.

    `answers`: in the order of ranks, from rank 1.
    """
    for rank, answer in enumerate(answers, 1):
        if answer.failure is not None:
            raise StoreError(f"Rank {rank}: {answer.failure}")


def wait_for_outcome(leader: Leader, key: bytes) -> None:
    """Block until the write of the file `key` has ended on all ranks other than 0.

    `key`: a result of `key_of`, or `STORE` for the opening of the stores. Raises
    PrefixNotStored if the file builds on a prefix that a rank does not have, and StoreError for any
    other failure.
    """
    pause, left = FIRST_PAUSE_S, None
    failures: dict[int, op.Answer] = {}
    while left is None or left:
        answers = dict(enumerate(ask_ranks(leader, op.Outcome(key)), 1))
        left = set(answers) if left is None else left
        ended = {rank for rank in left if answers[rank].ended}
        failures |= {rank: answers[rank] for rank in ended if answers[rank].failure is not None}
        left -= ended
        if left:
            time.sleep(pause)
            pause = min(2 * pause, PAUSE_S)
    for rank, answer in failures.items():
        kind = PrefixNotStored if answer.missing else StoreError
        raise kind(f"Rank {rank}: {answer.failure}")
