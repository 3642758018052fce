"""Snapshots of a divided model hold the whole, and any other division of it can read them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxcache.errors import StoreError, Unsupported
from mlxcache.model.load import ModelSpec, load
from mlxcache.ranks import operations as op
from mlxcache.ranks.follower import Follower
from mlxcache.ranks.leader import Leader
from mlxcache.ranks.rank_zero import GroupStore, Whole, wait_for_outcome
from mlxcache.safetensors import Tensor
from mlxcache.store.database import TemporaryDatabase
from mlxcache.store.leaves import Leaf
from mlxcache.store.parts import Mode, PartName
from mlxcache.store.sessions import Sessions
from mlxcache.store.snapshot_format import SessionInfo
from mlxcache.store.snapshots import SnapshotExport, SnapshotKV, import_snapshot, read_snapshot
from mlxcache.store.store import Store
from mlxcache.types import Tokens
from tests.conftest import ToyMaker
from tests.ranks.shards import Group, Shards
from tests.ranks.test_division import check_same
from tests.ranks.two_stores import Operations, Questions, some_ids

TOKENS, WHOLE = 200, "whole"


class Stores:
    """The stores of all ranks of `shards` in one process; `group` is what rank 0 has of them."""

    def __init__(self, shards: Shards, model: Path, folder: Path):
        self.shards, division = shards, shards.division
        names = [
            PartName(WHOLE, division.mode, rank, division.size).namespace
            for rank in range(division.size)
        ]
        self.each = [
            Store.open(folder / str(rank), name, None, needs_checkpoints=True)
            for rank, name in enumerate(names)
        ]
        loaded = load(ModelSpec(str(model))).model
        self.followers = [
            self._follower(loaded, rank, self.each[rank]) for rank in range(1, division.size)
        ]
        questions = [Questions(follower) for follower in self.followers]
        leader = Leader(None, [Operations(one) for one in self.followers], questions)
        leader.tell(op.Open(WHOLE, "off"))
        wait_for_outcome(leader, op.STORE)
        whole = Whole(WHOLE, division.mode, division.size, division)
        self.group = GroupStore(self.each[0], leader, whole, needs_checkpoints=True)

    def _follower(self, model: Path, rank: int, store: Store) -> Follower:
        layout = self.shards.ranks[rank].layout
        group = Group(rank, self.shards.division.size)
        return Follower(model, layout, group, lambda _: store, rank=rank)

    def fill(self, ids: Tokens) -> None:
        """Write what each rank has of `ids` to its disk."""
        for store, rank in zip(self.each, self.shards.ranks, strict=True):
            store.write_run(ids, 0, rank.rows(len(ids)))
            store.write_checkpoint(ids, rank.state())

    def close(self) -> None:
        for follower in self.followers:
            follower.close()
        self.group.close()


@contextmanager
def stores(shards: Shards, model: Path, folder: Path) -> Iterator[Stores]:
    made = Stores(shards, model, folder)
    try:
        yield made
    finally:
        made.close()


def session(store: Store, ids: Tokens) -> SessionInfo:
    leaf = Leaf(ids, prompt_tokens=len(ids), key_tokens=64, last_used_at=1.0)
    return SessionInfo("ses_1", store.namespace, "toy", (leaf,), created_at=1.0)


def export(store: Store, ids: Tokens, path: Path) -> Path:
    """Write a snapshot of a session with `ids` to `path`."""
    made = SnapshotExport(store, session(store, ids))
    path.write_bytes(b"".join(made))
    assert path.stat().st_size == made.nbytes
    return path


def kept(store: Store, ids: Tokens) -> list[Tensor]:
    """All tensors that a store has of `ids`."""
    found, files = store.find(ids), SnapshotKV(store)
    made = []
    for name, dtype, shape in files.row_kinds(found.pieces):
        data = b"".join(files.rows(ids, found.pieces, name, 0, found.length))
        made.append(Tensor(name, dtype, (found.length, *shape), memoryview(data)))
    for saved in found.checkpoints:
        data, at = b"".join(files.state_bytes(ids, saved)), 0
        for place in files.state_places(ids, saved):
            part = memoryview(data)[at : at + place.nbytes]
            made.append(Tensor(place.name, place.dtype, place.shape, part))
            at += place.nbytes
    return made


def divided(toy: ToyMaker, mode: str, size: int) -> tuple[Shards, Path]:
    model = toy("qwen3_5", heads=4, kv_heads=4, layers=8, intermediate=256)
    assert mode in {"tensor", "pipeline"}
    which: Mode = "tensor" if mode == "tensor" else "pipeline"
    return Shards(model, which, size, some_ids(TOKENS).tolist()), model


def restore(path: Path, store: Store) -> None:
    """Import a snapshot of the whole model, checked as for a server that has it."""
    import_snapshot(store, read_snapshot(path, WHOLE))


def check_exchange(
    toy: ToyMaker, folder: Path, before: Sequence[object], after: Sequence[object]
) -> None:
    """From one division to one process, and from there to another division, and back."""
    ids = some_ids(TOKENS)
    shards, model = divided(toy, str(before[0]), int(str(before[1])))
    alone = Store.open(folder / "alone", WHOLE, None)
    with stores(shards, model, folder / "before") as first:
        first.fill(ids)
        restore(export(first.group, ids, folder / "a.safetensors"), alone)
        parts = [kept(store, ids) for store in first.each]
    whole = kept(alone, ids)
    check_same(
        [t for t in whole if t.name.startswith(("state", "skel"))],
        shards.division.join_states([_state(part) for part in parts]),
    )
    other, _ = divided(toy, str(after[0]), int(str(after[1])))
    with stores(other, model, folder / "after") as second:
        restore(export(alone, ids, folder / "b.safetensors"), second.group)
        assert second.group.find(ids).length == TOKENS
        assert [one.position for one in second.group.find(ids).checkpoints] == [TOKENS]
        for rank, store in enumerate(second.each):
            rows = [tensor for tensor in whole if tensor.name.startswith("kv")]
            check_same(_rows(kept(store, ids)), other.division.cut_rows(rows, rank))
            check_same(_state(kept(store, ids)), other.division.cut_states(_state(whole), rank))
        again = export(second.group, ids, folder / "c.safetensors")
    back = Store.open(folder / "back", WHOLE, None)
    restore(again, back)
    check_same(kept(back, ids), whole)
    alone.close()
    back.close()


def _rows(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor.name.startswith("kv")]


def _state(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor for tensor in tensors if not tensor.name.startswith("kv")]


def test_a_snapshot_goes_from_two_ranks_to_one_process_and_to_two(toy: ToyMaker, tmp_path: Path):
    """By parts of layers, and from there to a pipeline."""
    check_exchange(toy, tmp_path, ("tensor", 2), ("pipeline", 2))


@pytest.mark.slow
def test_a_snapshot_goes_from_two_ranks_to_four(toy: ToyMaker, tmp_path: Path):
    """From a pipeline to parts of layers."""
    check_exchange(toy, tmp_path, ("pipeline", 2), ("tensor", 4))


@pytest.fixture
def two(toy: ToyMaker, tmp_path: Path) -> Iterator[Stores]:
    shards, model = divided(toy, "tensor", 2)
    with stores(shards, model, tmp_path / "two") as made:
        yield made


def test_a_rank_whose_disk_cannot_be_read_is_named(
    two: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The snapshot is not complete, and what is on disk stays."""
    ids = some_ids(TOKENS)
    two.fill(ids)
    made = SnapshotExport(two.group, session(two.group, ids))
    own = SnapshotKV.rows

    def fail(files: SnapshotKV, *arguments: object) -> Iterator[bytes]:
        if files.store is two.each[1]:
            raise StoreError("input/output error")
        return own(files, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SnapshotKV, "rows", fail)
    with pytest.raises(StoreError, match="Rank 1: input/output error"):
        b"".join(made)
    assert two.group.find(ids).length == TOKENS


def test_a_rank_that_cannot_write_fails_the_import(
    two: Stores, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What was there before stays, and the same file can be imported later."""
    ids, before = some_ids(TOKENS), some_ids(64, seed=3)
    for store, rank in zip(two.each, two.shards.ranks, strict=True):
        store.write_run(before, 0, rank.rows(64))
    alone = Store.open(tmp_path / "alone", WHOLE, None)
    alone.write_run(ids, 0, two.shards.whole.rows(TOKENS))
    path = export(alone, ids, tmp_path / "a.safetensors")

    def fail(*_: object) -> None:
        raise StoreError("no space left")

    with monkeypatch.context() as patch:
        patch.setattr(two.each[1], "write_run", fail)
        with pytest.raises(StoreError, match="Rank 1: no space left"):
            restore(path, two.group)
    assert two.group.find(ids).length == 0
    assert two.group.find(before).length == 64
    restore(path, two.group)
    assert two.group.find(ids).length == TOKENS
    alone.close()


def test_sessions_of_another_division_are_not_exported_and_are_removed_on_all_ranks(two: Stores):
    """Each rank has the files of its own part under another name."""
    ids = some_ids(64)
    former = [
        store.for_namespace(PartName(WHOLE, "tensor", rank, 4).namespace)
        for rank, store in enumerate(two.each)
    ]
    for store, rank in zip(former, two.shards.ranks, strict=True):
        store.write_run(ids, 0, rank.rows(64))
    seen = two.group.for_namespace(former[0].namespace)
    assert seen.find(ids).length == 64
    with pytest.raises(Unsupported, match="divided among 4 machines"):
        seen.snapshot_kv()
    sessions = Sessions(TemporaryDatabase())
    made = sessions.adopt(session(seen, ids), 1.0, None, None)
    two.group.delete_session(sessions, made)
    deadline = time.monotonic() + 10
    while former[1].find(ids).length and time.monotonic() < deadline:
        time.sleep(0.01)  # other ranks remove files later
    assert [store.find(ids).length for store in former] == [0, 0]
