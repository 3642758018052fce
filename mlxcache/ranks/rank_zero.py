"""Rank 0's side of a group: it has the others load their parts, and loads its own.

In the store of the group, a prefix counts as on disk only if every rank has its part on disk.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from mlx import nn

from mlxcache.config import disk_limit
from mlxcache.config.memory import MemoryPressure, read_pressure
from mlxcache.errors import GroupLost, ModelError, PrefixNotStored, StoreError, Unsupported
from mlxcache.model import device, kv
from mlxcache.model.kv import Layout
from mlxcache.ranks import operations as op
from mlxcache.ranks.division import Division, find_division, part_of
from mlxcache.ranks.group import (
    Links,
    Place,
    Setup,
    Share,
    Watch,
    accept_all,
    divide,
    first_layer,
    united,
    versions,
    wait_for_all,
)
from mlxcache.ranks.group_snapshots import GroupSnapshotKV
from mlxcache.ranks.leader import Leader, checked
from mlxcache.ranks.mirrored import mirrored_parts
from mlxcache.ranks.setup import config_digest
from mlxcache.ranks.tensor_links import with_probes
from mlxcache.safetensors import Tensor
from mlxcache.scheduling.parts import WHOLE
from mlxcache.store.found import Found, RunPart, Saved
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Held, Listed, ReadIds, durable_tokens
from mlxcache.store.parts import Mode, PartName, read_part_name
from mlxcache.store.sessions import Sessions
from mlxcache.store.snapshots import SnapshotKV
from mlxcache.store.store import Progress, Store
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.ranks")

_SHARE = msgspec.msgpack.Decoder(Share)


class RankZero:
    """The group as rank 0 sees it: connections, division of the model, and stores.

    Call the methods in the order of their definition, on the MLX thread, unless they say that any
    thread may call them. `own_age()`: seconds that the current operation of the MLX thread has run.
    `on_loss(why)` is called on another thread if a rank is lost. `whole`: the layout of the
    undivided model, known after `divide`. Known after `survey` are `ram_limit`, the least budget of
    the other ranks in bytes, `buffer_limit`, the smallest number of buffers that the device of any
    rank can hold, and `parts`. `namespace`: that of the undivided model, known after `open_store`.
    """

    def __init__(self, place: Place, own_age: Callable[[], float], on_loss: Callable[[str], None]):
        self.place = place
        self.ram_limit: int | None = None
        self.buffer_limit: int | None = None
        self.parts = WHOLE
        self.whole: Layout | None = None
        self.namespace: str | None = None
        self._division: Division | str = "the model was not divided yet"
        self._kv_bits: int | None = None
        self._model_type = ""
        self._own_age, self._on_loss = own_age, on_loss
        self._links: Sequence[Links] = ()
        self._group: Any = None
        self._leader: Leader | None = None
        self._watch: Watch | None = None

    def gather(
        self,
        model: str,
        folder: Path,
        *,
        trust_remote_code: bool,
        adapter: str | None,
        kv_bits: int | None,
        ram: str | int,
        wire: str | int,
    ) -> None:
        """Wait until the other ranks have connected, then tell them to load their parts.

        `model`: the model's path or name on every machine. `folder`: where it is on this one.
        Blocks for the connections, not for the loads. Raises GroupLost.
        """
        self._kv_bits = kv_bits
        self._group = group = with_probes(lambda: mx.distributed.init(strict=True))
        self._links = accept_all(self.place.host, group)
        setup = Setup(
            model,
            self.place.mode,
            trust_remote_code,
            adapter,
            kv_bits,
            ram,
            wire,
            config_digest(folder),
            versions(),
        )
        for links in self._links:
            links.operations.send_bytes(msgspec.msgpack.encode(setup))

    def divide(self, model: nn.Module, config: Mapping[str, Any]) -> None:
        """Reduce `model`, whose weights were not read yet, to the part of rank 0.

        Raises ModelError.
        """
        self._model_type = str(config.get("model_type"))
        self.whole = kv.survey(model, kv_bits=self._kv_bits, evaluate=False)
        divide(model, config, self._group, self.place.mode)

    def survey(self, model: nn.Module, kv_bits: int | None) -> Layout:
        """Wait until all ranks have loaded their parts; return a layout that suits them all.

        Blocks. Raises GroupLost, and ModelError if a rank cannot load its part, or the parts do not
        fit together.
        """
        self._hear_shares()  # a rank that could not load its part makes no pass
        wait_for_all(self._group)
        layout = kv.survey(model, kv_bits=kv_bits)
        shares = self._hear_shares()
        own = part_of(layout, first_layer(model, self.place.mode))
        assert self.whole is not None
        try:
            self._division = find_division(
                part_of(self.whole),
                [own, *(share.tensors for share in shares)],
                self.place.mode,
                self._model_type,
            )
        except Unsupported as error:
            log.warning("snapshots disabled: %s", error)
            self._division = str(error)
        self.ram_limit = min(share.ram_limit for share in shares)
        limits = [device.buffer_limit(), *(share.buffer_limit for share in shares)]
        self.buffer_limit = min((one for one in limits if one is not None), default=None)
        self._leader = leader = Leader(
            self._group,
            [links.operations for links in self._links],
            [links.questions for links in self._links],
            [links.heartbeat for links in self._links],
        )
        self._watch = Watch(leader, self._own_age, self._on_loss)
        self.parts = mirrored_parts(leader)
        return united(layout, shares)

    def _hear_shares(self) -> list[Share]:
        shares = []
        for rank, links in enumerate(self._links, 1):
            try:
                share = _SHARE.decode(links.operations.recv_bytes())
            except (OSError, EOFError) as error:
                raise GroupLost(f"rank {rank} ended while it loaded the model") from error
            if share.failure is not None:
                raise ModelError(f"rank {rank}: {share.failure}")
            shares.append(share)
        return shares

    def open_store(
        self, folder: Path, namespace: str, setting: str | int, *, needs_checkpoints: bool
    ) -> Store:
        """Open the store of all ranks, each in a folder of its own.

        `namespace`: that of the whole model. `setting`: the setting `disk`. Blocks. Raises
        StoreError if a rank has no store.
        """
        leader, size = self._leader, self._group.size()
        assert leader is not None
        leader.tell(op.Open(namespace, setting))
        wait_for_outcome(leader, op.STORE)
        own = Store.open(
            folder,
            PartName(namespace, self.place.mode, 0, size).namespace,
            disk_limit(setting, folder),
            needs_checkpoints=needs_checkpoints,
        )
        self.namespace = namespace
        whole = Whole(namespace, self.place.mode, size, self._division)
        return GroupStore(own, leader, whole, needs_checkpoints=needs_checkpoints)

    def figures(self) -> dict[str, Any]:
        """Return the part of `GET /v1/cache` about the division of the model. Any thread."""
        others = self._watch.figures() if self._watch is not None else []
        return {"mode": self.place.mode, "size": self._group.size(), "others": others}

    def read_pressure(self) -> MemoryPressure:
        """Return the greatest memory pressure of all machines of the group. Any thread."""
        own = read_pressure()
        other = self._watch.worst_pressure() if self._watch is not None else own
        return other if other.level > own.level else own

    def close(self) -> None:
        """End the group: the other ranks finish their queued writes, then exit. Does not wait."""
        if self._watch is not None:
            self._watch.close()
        if self._leader is not None:
            self._leader.tell(op.End())
        for links in self._links:
            links.close()


# -- the store of all ranks ------------------------------------------------------------------------

FIRST_PAUSE_S, PAUSE_S = 0.001, 0.05
"""Pause between two questions for the outcome of a write: the first one, and the longest."""


@dataclass(frozen=True, slots=True)
class Whole:
    """The model that a group of ranks serves, and its division.

    `division`: how its KV is divided, or the reason why that is not known.
    """

    namespace: str
    mode: Mode
    size: int
    division: Division | str


class GroupStore(Store):
    """The store of rank 0 over `own`, its own folder, and those of the other ranks.

    A prefix is found as far as every rank has it, and a write has ended when it has ended on every
    rank. What is removed here is removed on the other ranks soon after. Thread-safe. Raises
    StoreError if another rank cannot be reached; `Watch` reports that loss.
    """

    def __init__(self, own: Store, leader: Leader, whole: Whole, *, needs_checkpoints: bool):
        super().__init__(own.context, own.namespace, needs_checkpoints=needs_checkpoints)
        self._own = own
        self._leader = leader
        self._whole = whole
        self._uploading = threading.Lock()

    def for_namespace(self, namespace: str) -> Store:
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
        for answer in self._leader.ask(op.Find(ids.tobytes(), touch)):
            found = _as_far(found, answer.length, answer.checkpoints)
        return found

    def look_ahead(self, listed: Sequence[Listed], ids: ReadIds) -> None:
        """Do nothing: what the other ranks hold is not remembered."""

    def measure(self, groups: Sequence[Sequence[LeafRow]], ids: ReadIds) -> list[Held]:
        return [self._measure([ids(leaf) for leaf in group]) for group in groups]

    def _measure(self, paths: Sequence[Tokens]) -> Held:
        found = [self._look_up(ids, touch=False) for ids in paths]
        for answer in self._leader.ask(op.FindAll([ids.tobytes() for ids in paths])):
            pairs = zip(found, answer.found, strict=True)
            found = [_as_far(own, *theirs) for own, theirs in pairs]
        files = {one.path: one.nbytes for each in found for one in each.pieces}
        files |= {one.path: one.nbytes for each in found for one in each.checkpoints}
        needed = self.has_checkpoints()
        saved = ((x.length, [one.position for one in x.checkpoints]) for x in found)
        return Held(
            tuple(durable_tokens(*one, needed=needed) for one in saved), sum(files.values())
        )

    def verify(self, piece: RunPart, ids: Tokens) -> None:
        super().verify(piece, ids)
        question = op.Verify(ids[: piece.end].tobytes(), piece.start, piece.end)
        checked(self._leader.ask(question))

    def verify_checkpoint(self, saved: Saved, ids: Tokens) -> None:
        super().verify_checkpoint(saved, ids)
        checked(self._leader.ask(op.VerifyState(ids[: saved.position].tobytes())))

    def write_run(self, ids: Tokens, start: int, tensors: Sequence[Tensor]) -> None:
        try:
            super().write_run(ids, start, tensors)
        finally:
            wait_for_outcome(self._leader, op.key_of(ids.tobytes(), start))

    def write_checkpoint(self, ids: Tokens, tensors: Sequence[Tensor]) -> None:
        try:
            super().write_checkpoint(ids, tensors)
        finally:
            wait_for_outcome(self._leader, op.key_of(ids.tobytes(), None))

    def pin(self, name: str, paths: Sequence[Tokens]) -> None:
        super().pin(name, paths)
        self._leader.ask(op.Pin(name, [ids.tobytes() for ids in paths]))

    def remove_unshared(self, sessions: Sessions, ids: Tokens) -> int:
        needed = max(sessions.sharing(self.namespace, ids).values(), default=0)
        gone = super().remove_unshared(sessions, ids)
        self._leader.ask(op.Remove(ids.tobytes(), needed, self._whole.mode, self._whole.size))
        return gone

    def forget_beyond(self, ids: Tokens, keep: int) -> None:
        super().forget_beyond(ids, keep)
        self._leader.ask(op.Forget(ids.tobytes(), keep))

    def prune(self, limit: int | None = None, progress: Progress = lambda _, __: None) -> int:
        freed = super().prune(limit, progress)
        self._leader.ask(op.Prune(limit))
        return freed

    def clear(self, *, pinned: bool = False) -> int:
        freed = super().clear(pinned=pinned)
        self._leader.ask(op.Clear(pinned))
        return freed


class FormerGroupStore(Store):
    """Rank 0's part of KV that the same model had while it was divided in another way.

    `remove_unshared` also removes the parts that the other ranks of the present group have.
    """

    def __init__(self, own: Store, leader: Leader, mode: Mode, size: int):
        super().__init__(own.context, own.namespace)
        self._leader, self._mode, self._size = leader, mode, size

    def remove_unshared(self, sessions: Sessions, ids: Tokens) -> int:
        needed = max(sessions.sharing(self.namespace, ids).values(), default=0)
        gone = super().remove_unshared(sessions, ids)
        self._leader.ask(op.Remove(ids.tobytes(), needed, self._mode, self._size))
        return gone


def _as_far(found: Found, length: int, checkpoints: Sequence[int] | None) -> Found:
    """Return `found`, what this rank has of a prefix, restricted to what another rank has too.

    `checkpoints`: None if the layers of the other rank need none.
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


def wait_for_outcome(leader: Leader, key: bytes) -> None:
    """Block until the write of the file `key` has ended on all ranks other than 0.

    Raises PrefixNotStored if the file builds on a prefix that a rank does not have, and StoreError
    for any other failure.
    """
    pause, left = FIRST_PAUSE_S, None
    failures: dict[int, op.Answer] = {}
    while left is None or left:
        answers = dict(enumerate(leader.ask(op.Outcome(key)), 1))
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
