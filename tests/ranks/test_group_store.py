"""On disk is what every rank has on its own disk, and what is removed is removed on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlxcache.errors import PrefixNotStored, StoreError
from mlxcache.model import kv, serialise
from mlxcache.model.lineage import Lineage
from mlxcache.safetensors import Tensor
from mlxcache.store.database import TemporaryDatabase
from mlxcache.store.leaves import Leaf
from mlxcache.store.sessions import Sessions
from mlxcache.store.snapshot_format import SessionInfo
from mlxcache.store.store import Store
from mlxcache.types import join_ids
from tests.ranks.two_stores import TwoStores, some_ids


@pytest.fixture
def two(toy_llama: Path, tmp_path: Path) -> Iterator[TwoStores]:
    stores = TwoStores(toy_llama, tmp_path)
    yield stores
    stores.close()


def wait_for_changes(two: TwoStores) -> None:
    """Changes of rank 1's files are made in order, and a write is waited for."""
    ids = some_ids(64, seed=99)
    two.write(two.fed(ids), ids)


def test_a_write_has_ended_when_every_rank_has_written(two: TwoStores):
    """Each rank has its own files, and finds what it wrote itself."""
    ids = some_ids(200)
    two.write(two.fed(ids), ids)
    assert two.store.find(ids).length == two.other.find(ids).length == 200


def test_a_prefix_is_found_as_far_as_every_rank_has_it(two: TwoStores):
    """What rank 0 alone has does not count as durable."""
    ids = some_ids(256)
    lineage = two.fed(ids)
    two.write(lineage, ids[:128])
    two.write(lineage, ids, 128, tell=False)
    assert Store.find(two.store, ids).length == 256
    assert two.store.find(ids).length == 128


def test_a_rank_that_lacks_the_prefix_has_it_written_again(two: TwoStores):
    """As if rank 0 lacked it too: the store says so, and takes files that it has."""
    ids = some_ids(256)
    lineage = two.fed(ids)
    two.write(lineage, ids[:128], tell=False)
    with pytest.raises(PrefixNotStored, match="Rank 1"):
        two.write(lineage, ids, 128)
    two.write(lineage, ids)
    assert two.store.find(ids).length == 256


def test_a_failed_write_of_a_rank_is_a_failed_write(
    two: TwoStores, monkeypatch: pytest.MonkeyPatch
):
    """With its cause, whatever it is."""
    ids = some_ids(64)
    lineage = two.fed(ids)

    def fail(*_: object) -> None:
        raise OSError("no such disk")

    monkeypatch.setattr(two.other, "write_run", fail)
    with pytest.raises(StoreError, match="Rank 1: no such disk"):
        two.write(lineage, ids)


def test_files_are_verified_on_every_rank(two: TwoStores):
    """Before any is loaded: a damaged file of another rank is a miss here."""
    ids = some_ids(128)
    two.write(two.fed(ids), ids)
    found = two.store.find(ids)
    two.store.verify(found.pieces[0], ids)
    (file,) = [piece.path for piece in two.other.find(ids).pieces]
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.chmod(0o600)
    file.write_bytes(data)
    with pytest.raises(StoreError, match="Rank 1"):
        two.store.verify(found.pieces[0], ids)
    assert two.store.find(ids).length == 0


def test_files_that_a_rank_has_evicted_meanwhile_are_not_loaded(two: TwoStores):
    """The prompt is then computed; else the rank would end while it loads."""
    ids = some_ids(128)
    two.write(two.fed(ids), ids)
    (piece, *_) = two.store.find(ids).pieces
    two.other.clear()
    with pytest.raises(StoreError, match="files after token 0 are no longer on disk"):
        two.store.verify(piece, ids)


def test_a_piece_is_used_as_far_as_every_rank_has_it(two: TwoStores):
    """Rank 1 has a file of another reply, whose first tokens are those of the evicted one."""
    ids = some_ids(256)
    other = join_ids(ids[:110], some_ids(146, seed=5))
    lineage = two.fed(ids)
    two.write(lineage, ids[:100])
    two.write(two.fed(other), other, 64)
    two.write(lineage, ids, 64, tell=False)
    found = two.store.find(ids)
    assert found.length == 110
    assert [(piece.start, piece.end) for piece in found.pieces] == [(0, 100), (100, 110)]
    for piece in found.pieces:
        two.store.verify(piece, ids)


def test_what_was_written_can_be_loaded_on_every_rank(two: TwoStores):
    """A follower reads its own files to the same values."""
    ids = some_ids(128)
    lineage = two.fed(ids)
    two.write(lineage, ids)
    again = two.empty(128)
    two.load(again, ids, two.store.find(ids).pieces)
    theirs = two.follower.lineage(again.number)
    assert theirs.length == 128
    assert np.array_equal(np.array(lineage.view(0, 0, 0, 128)), np.array(theirs.view(0, 0, 0, 128)))


def test_what_is_removed_is_removed_on_every_rank(two: TwoStores):
    """Except what another session shares."""
    ids = some_ids(192)
    lineage = two.fed(ids)
    two.write(lineage, ids[:128])
    two.write(lineage, ids, 128)
    sessions = Sessions(TemporaryDatabase())
    leaf = Leaf(ids[:128], prompt_tokens=128, key_tokens=128, last_used_at=1.0)
    info = SessionInfo("ses_1", two.store.namespace, "toy", (leaf,), created_at=1.0)
    made = sessions.adopt(info, 1.0, None, None)
    two.store.remove_unshared(sessions, ids)
    wait_for_changes(two)
    assert two.other.find(ids).length == Store.find(two.store, ids).length == 128
    two.store.delete_session(sessions, made)
    wait_for_changes(two)
    assert two.other.find(ids).length == Store.find(two.store, ids).length == 0


def test_clearing_clears_every_rank(two: TwoStores):
    """Also what was pinned there, if that is asked for."""
    ids = some_ids(128)
    two.write(two.fed(ids), ids)
    two.store.pin("kept", [ids])
    wait_for_changes(two)
    two.store.clear()
    wait_for_changes(two)
    assert two.other.find(ids).length == 128
    two.store.clear(pinned=True)
    wait_for_changes(two)
    assert two.other.find(ids).length == 0


def test_ranks_that_do_not_answer_are_an_error_of_the_disk(two: TwoStores):
    """Their loss ends the process elsewhere. They are not asked again: a late answer is wrong."""
    two.questions.silent = True
    with pytest.raises(StoreError, match="did not answer"):
        two.store.find(some_ids(64))
    two.questions.silent = False
    with pytest.raises(StoreError, match="did not answer"):
        two.store.find(some_ids(64))


def test_checkpoints_are_common_to_all_ranks(toy_qwen3_5: Path, tmp_path: Path):
    """One that a rank lacks is not used; a rank loads its own."""
    two = TwoStores(toy_qwen3_5, tmp_path)
    ids = some_ids(128)
    half = two.fed(ids[:64])
    two.write(half, ids[:64])
    two.write_state(half, ids[:64])
    whole = two.fed(ids)
    two.write(whole, ids)
    Store.write_checkpoint(two.store, ids, _state_tensors(whole))
    assert [one.position for one in Store.find(two.store, ids).checkpoints] == [64, 128]
    assert [one.position for one in two.store.find(ids).checkpoints] == [64]
    two.store.verify_checkpoint(two.store.find(ids).checkpoints[0], ids)
    again = two.empty(64)
    found = two.store.find(ids[:64])
    two.load(again, ids[:64], found.pieces, found.checkpoints[0])
    theirs, own = (two.follower.lineage(one.number) for one in (again, half))
    assert str(theirs.capture()) == str(own.capture())
    two.close()


def _state_tensors(lineage: Lineage) -> list[Tensor]:
    return serialise.state_tensors(kv.states(lineage.slots))
