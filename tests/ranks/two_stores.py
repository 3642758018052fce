"""A leader and a follower in one process, each with a store: operations are carried out at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import msgspec
import numpy as np

from mlxcache.cache.restore import DiskLookup
from mlxcache.model import kv, serialise
from mlxcache.model.lineage import Lineage
from mlxcache.model.load import ModelSpec, load
from mlxcache.ranks import operations as op
from mlxcache.ranks.follower import Follower
from mlxcache.ranks.leader import Leader
from mlxcache.ranks.mirrored import MirroredFiles, MirroredLineage
from mlxcache.ranks.rank_zero import GroupStore, Whole, wait_for_outcome
from mlxcache.store.found import RunPart, Saved
from mlxcache.store.store import Store
from mlxcache.types import Tokens, token_ids

_QUESTION = msgspec.msgpack.Decoder(op.AnyQuestion)


class Operations:
    """A connection over which a follower does what it is told before `send_bytes` returns."""

    def __init__(self, follower: Follower):
        self._follower = follower

    def send_bytes(self, data: bytes) -> None:
        assert self._follower.obey(data)


class Questions:
    """A connection over which a follower answers. `silent`: it answers nothing any more."""

    def __init__(self, follower: Follower):
        self._follower = follower
        self._answers: deque[bytes] = deque()
        self.silent = False

    def send_bytes(self, data: bytes) -> None:
        if not self.silent:
            answer = self._follower.answer(_QUESTION.decode(data))
            self._answers.append(msgspec.msgpack.encode(answer))

    def poll(self, seconds: float) -> bool:
        return bool(self._answers)

    def recv_bytes(self) -> bytes:
        return self._answers.popleft()


class TwoStores:
    """Rank 0 with `store`, and `follower` with `other`, of the same whole model."""

    def __init__(self, model: Path, folder: Path):
        self.model = load(ModelSpec(str(model))).model
        plain = kv.survey(self.model)
        self.other = Store.open(
            folder / "other", "namespace.tensor.1of2", None, needs_checkpoints=plain.opaque
        )
        self.follower = Follower(self.model, plain, None, lambda it: self.other)
        self.questions = Questions(self.follower)
        leader = Leader(None, [Operations(self.follower)], [self.questions])
        self.leader = leader
        self.layout = replace(plain, divided=True)
        self.files = MirroredFiles(leader, self.layout)
        own = Store.open(
            folder / "own", "namespace.tensor.0of2", None, needs_checkpoints=plain.opaque
        )
        leader.tell(op.Open("namespace", "off"))
        wait_for_outcome(leader, op.STORE)
        whole = Whole("namespace", "tensor", 2, "not divided")
        self.store = GroupStore(own, leader, whole, needs_checkpoints=plain.opaque)

    def empty(self, capacity: int) -> MirroredLineage:
        lineage = MirroredLineage(self.leader, self.layout, 1 << 30)
        lineage.grow(capacity)
        return lineage

    def fed(self, ids: Tokens) -> MirroredLineage:
        """A lineage with `ids`, on both ranks."""
        lineage = self.empty(len(ids))
        lineage.note_feed(ids)
        self.model(mx.array(ids)[None], cache=lineage.caches)
        kv.eval_states(lineage.caches)
        lineage.advance(len(ids))
        return lineage

    def write(self, lineage: Lineage, ids: Tokens, start: int = 0, *, tell: bool = True) -> None:
        """Write the run of `ids` from `start`; without `tell`, rank 1 is not told."""
        out = memoryview(bytearray(serialise.run_bytes(self.layout, len(ids) - start)))
        spans = [(lineage, start, len(ids))]
        if tell:
            self.store.write_run(ids, start, self.files.copy_run(ids, start, spans, out))
        else:
            tensors = serialise.copied_run(self.layout, spans, out)
            Store.write_run(self.store, ids, start, tensors)

    def write_state(self, lineage: Lineage, ids: Tokens) -> None:
        """Write a checkpoint at the end of `ids`, which must be that of the lineage."""
        state = lineage.capture()
        self.store.write_checkpoint(ids, self.files.copy_state(ids, state))

    def load(
        self, lineage: Lineage, ids: Tokens, pieces: Sequence[RunPart], state: Saved | None = None
    ) -> None:
        """Load files of `ids` into an empty lineage, and a checkpoint at their end."""
        lookup = DiskLookup(ids, target=len(ids), pieces=tuple(pieces), state=state)
        self.files.load_runs(lookup, lineage)
        self.files.load_state(lookup, lineage)

    def close(self) -> None:
        self.follower.close()
        self.store.close()


def some_ids(count: int, seed: int = 0) -> Tokens:
    return token_ids(np.random.default_rng(seed).integers(3, 200, count).astype(np.int32))
