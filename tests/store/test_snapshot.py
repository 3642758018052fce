"""Export of a session from one store into a file, and import into another."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcache.cli.offline import Offline
from mlxcache.errors import DiskFull, Gone, SnapshotRefused, StoreError
from mlxcache.store import snapshot_format, snapshots
from mlxcache.store.kv_files import is_finite
from mlxcache.store.snapshot_format import detect_format
from mlxcache.store.snapshots import Snapshot, SnapshotExport, import_snapshot, read_snapshot
from mlxcache.types import Tokens, join_ids, token_ids
from tests.memory import peak_bytes
from tests.store.session_of import (
    NAMESPACE,
    SPEC,
    held,
    ids_of,
    kv,
    poisoned,
    save,
    session,
    snapshot_in,
    state,
    store_in,
    write,
)


def told(info: Any) -> dict[str, Any]:
    fields = {k: getattr(info, k) for k in info.__slots__ if k not in ("leaves", "ids")}
    if hasattr(info, "leaves"):
        fields["leaves"] = [told(leaf) for leaf in info.leaves]
    else:
        fields["ids"] = info.ids.tolist()
    return fields


def exported(tmp_path: Path, ids: Tokens, **options: Any) -> Path:
    """Save `ids` in the store `a`, and export them."""
    save(store_in(tmp_path / "a"), ids, **options)
    return snapshot_in(tmp_path / "s", store_in(tmp_path / "a"), session(ids))


def moved(tmp_path: Path, info: Any, **options: Any) -> Snapshot:
    path = snapshot_in(tmp_path / "s", store_in(tmp_path / "a"), info)
    snapshot = read_snapshot(path, NAMESPACE, spec=SPEC, **options)
    assert told(import_snapshot(store_in(tmp_path / "b"), snapshot)) == told(info)
    return snapshot


@pytest.mark.parametrize("length", [1, 63, 64, 65, 300, 1000])
def test_a_session_is_the_same_elsewhere(tmp_path: Path, length: int) -> None:
    ids = ids_of(length)
    save(store_in(tmp_path / "a"), ids, states=[n for n in (1, 64, 250) if n <= length])
    moved(tmp_path, session(ids))
    b = store_in(tmp_path / "b")
    assert held(b, ids) == length
    assert [s.position for s in b.find(ids).checkpoints] == [n for n in (1, 64, 250) if n <= length]


def test_leaves_that_share_a_prefix_hold_it_once(tmp_path: Path) -> None:
    a = store_in(tmp_path / "a")
    main = ids_of(1000)
    agent = ids_of(700, 1, head=main[:500])
    of_agent = ids_of(680, 2, head=agent[:600])
    other = ids_of(130, 3)
    inside = main[:256].copy()
    leaves = [main, agent, of_agent, other, inside]
    for leaf in leaves:
        save(a, leaf, states=[70, len(leaf)])
    snapshot = moved(tmp_path, session(*leaves))
    b = store_in(tmp_path / "b")
    for leaf in leaves:
        assert held(b, leaf) == len(leaf)
    parts = [(leaf.parent, leaf.start) for leaf in snapshot.description.leaves]
    assert parts == [(None, 0), (0, 448), (1, 576), (None, 0), (0, 192)]
    states = [(c.leaf, c.position) for c in snapshot.description.checkpoints]
    assert states == [(0, 70), (0, 256), (0, 1000), (1, 700), (2, 680), (3, 70), (3, 130)]


def test_what_is_not_on_disk_is_not_in_it_but_all_tokens_are(tmp_path: Path) -> None:
    a = store_in(tmp_path / "a")
    ids, agent = ids_of(500), ids_of(300, 1)
    save(a, ids[:210])
    snapshot = moved(tmp_path, session(ids, agent))
    assert [leaf.rows for leaf in snapshot.description.leaves] == [210, 0]
    assert held(store_in(tmp_path / "b"), ids) == 210
    assert held(store_in(tmp_path / "b"), agent) == 0


def test_a_model_with_states_alone(tmp_path: Path) -> None:
    ids = ids_of(500)
    store = store_in(tmp_path / "a")
    for position in (100, 500):
        store.write_checkpoint(ids[:position], state(ids[:position]))
    moved(tmp_path, session(ids))
    b = store_in(tmp_path / "b")
    assert held(b, ids) == 0
    assert [s.position for s in b.find(ids).checkpoints] == [100, 500]


def test_a_damaged_run_is_left_out(tmp_path: Path) -> None:
    a = store_in(tmp_path / "a")
    ids = ids_of(640)
    save(a, ids, step=128)
    victim = a.find(ids).pieces[2].path
    content = bytearray(victim.read_bytes())
    content[-9] ^= 4
    victim.write_bytes(content)
    snapshot = moved(tmp_path, session(ids))
    assert snapshot.description.leaves[0].rows == 256
    assert held(store_in(tmp_path / "b"), ids) == 256


def test_too_many_checkpoints_keep_the_first_and_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MOST_STATES", 3)
    ids = ids_of(300)
    save(store_in(tmp_path / "a"), ids, states=[64, 128, 192, 256, 300])
    snapshot = moved(tmp_path, session(ids))
    assert [c.position for c in snapshot.description.checkpoints] == [64, 256, 300]


def test_it_is_written_in_bounded_pieces_with_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 20_000)
    ids = ids_of(1000)
    path = exported(tmp_path, ids, step=1000, states=[900])
    steps: list[tuple[int, int]] = []
    snapshot = read_snapshot(path)
    import_snapshot(store_in(tmp_path / "b"), snapshot, lambda *at: steps.append(at))
    b = store_in(tmp_path / "b")
    assert held(b, ids) == 1000
    assert len(b.find(ids).pieces) == len(steps) - 1 == 6
    assert steps[-1] == (snapshot.nbytes, snapshot.nbytes)
    assert steps == sorted(steps)


def test_restoring_twice_writes_once(tmp_path: Path) -> None:
    ids = ids_of(500)
    save(store_in(tmp_path / "a"), ids, states=[300])
    snapshot = moved(tmp_path, session(ids))
    b = store_in(tmp_path / "b")
    import_snapshot(b, snapshot)
    assert b.stats().written_tokens == 0
    assert held(b, ids) == 500


def test_another_model_is_refused_by_namespace_and_both_are_named(tmp_path: Path) -> None:
    ids = ids_of(100)
    path = exported(tmp_path, ids)
    with pytest.raises(SnapshotRefused) as refused:
        read_snapshot(path, "f" * 32, model="else/here")
    text = str(refused.value)
    assert "owner/some-model (01234567)" in text
    assert "else/here (ffffffff)" in text
    assert refused.value.code == "wrong_model"


def test_other_shapes_and_unknown_ids_are_refused(tmp_path: Path) -> None:
    ids = ids_of(100)
    path = exported(tmp_path, ids)
    for name, other in (("kv.0.0", ("F16", (2, 4))), ("kv.9.0", ("F32", (2, 4)))):
        with pytest.raises(SnapshotRefused, match="shapes"):
            read_snapshot(path, spec={**SPEC, name: other})
    with pytest.raises(SnapshotRefused, match="token ids"):
        read_snapshot(path, vocab_size=int(ids.max()))
    assert read_snapshot(path, vocab_size=int(ids.max()) + 1)


@pytest.mark.parametrize("dtype", ["F16", "BF16", "F32"])
def test_numbers_are_finite_by_their_bits(dtype: str) -> None:
    """Each value of 16 bits, alone between zeros; of F32 each with the exponent of one of them."""
    bits = np.arange(1 << 16, dtype=np.uint32)
    raw: np.ndarray
    if dtype == "F16":
        values, raw = bits.astype(np.uint16).view(np.float16), bits.astype(np.uint16)
    else:  # bfloat16 is the upper half of a float32
        values = (bits << 16).view(np.float32)
        raw = bits.astype(np.uint16) if dtype == "BF16" else bits << 16
    zeros = np.zeros(2, raw.dtype)
    for value, one in zip(values, raw, strict=True):
        data = memoryview(np.array([*zeros, one, 0], raw.dtype).tobytes())
        assert is_finite(dtype, data) == np.isfinite(value)
    last = np.zeros(1 << 20, raw.dtype)
    last[-1] = raw[np.flatnonzero(np.isnan(values))[0]]
    assert not is_finite(dtype, memoryview(last.tobytes()))
    assert is_finite(dtype, memoryview(b""))
    assert is_finite("U32", memoryview(last.tobytes()))


@pytest.mark.parametrize("name", [*SPEC, "state.0"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_holds_nan_or_infinity_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: float
) -> None:
    ids = ids_of(300)
    save(store_in(tmp_path / "a"), ids, states=[250])
    with poisoned(monkeypatch, name, value):
        path = snapshot_in(tmp_path / "s", store_in(tmp_path / "a"), session(ids))
    monkeypatch.setattr(snapshots, "PIECE_BYTES", 10_000)
    cache = tmp_path / "cache"
    with pytest.raises(SnapshotRefused, match="NaN or infinity"):
        import_snapshot(store_in(tmp_path / "b"), read_snapshot(path, NAMESPACE, spec=SPEC))
    with pytest.raises(SnapshotRefused, match="NaN or infinity"):
        Offline(cache).restore(path, None, None, None, lambda *_: None)
    for store in (store_in(tmp_path / "b"), store_in(cache / "store")):
        assert (store.stats().runs, store.stats().checkpoints) == (0, 0)
    assert Offline(cache).sessions() == []


@pytest.mark.parametrize("field", ["id", "namespace", "label", "name", "title", "client", "model"])
def test_a_text_longer_than_any_of_its_kind_is_refused(tmp_path: Path, field: str) -> None:
    info = session(ids_of(64))
    store = (
        store_in(tmp_path / "a", "x" * 201) if field == "namespace" else store_in(tmp_path / "a")
    )
    long: dict[str, Any] = {field: "x" * 100_000}
    path = snapshot_in(tmp_path / "s", store, replace(info, **long))
    with pytest.raises(SnapshotRefused, match=rf"length <= \d+ - at `\$.{field}`"):
        read_snapshot(path)


def test_ids_that_stand_for_an_image_come_back(tmp_path: Path) -> None:
    ids = ids_of(100)
    ids = join_ids(ids[:40], token_ids(~ids[40:60]), ids[60:])
    path = exported(tmp_path, ids)
    store = store_in(tmp_path / "b")
    import_snapshot(store, read_snapshot(path, vocab_size=int(ids.max()) + 1))
    assert held(store, ids) == held(store_in(tmp_path / "a"), ids) > 60


@pytest.mark.parametrize("limit", ["_MOST_ROW", "MOST_STATE_BYTES"])
def test_what_is_read_as_a_whole_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    ids = ids_of(100)
    path = exported(tmp_path, ids, states=[100])
    monkeypatch.setattr(snapshot_format, limit, {"_MOST_ROW": 91, "MOST_STATE_BYTES": 74}[limit])
    with pytest.raises(SnapshotRefused):
        read_snapshot(path)
    monkeypatch.setattr(snapshot_format, limit, {"_MOST_ROW": 92, "MOST_STATE_BYTES": 75}[limit])
    assert read_snapshot(path)


def test_kv_whose_prefix_was_evicted_meanwhile_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = store_in(tmp_path / "a")
    main, agent = ids_of(300), ids_of(300, 1, head=ids_of(300)[:200])
    save(a, main)
    save(a, agent)
    find = a.find
    monkeypatch.setattr(a, "find", lambda ids: find(ids[:100] if ids is main else ids))
    made = SnapshotExport(a, session(main, agent))
    write(tmp_path / "s", made)
    assert [leaf.rows for leaf in read_snapshot(tmp_path / "s").description.leaves] == [100, 0]


def test_what_does_not_fit_the_cap_is_refused_before_it_evicts(tmp_path: Path) -> None:
    ids = ids_of(3000)
    path = exported(tmp_path, ids, step=3000)
    with pytest.raises(DiskFull):
        import_snapshot(store_in(tmp_path / "b", limit=300_000), read_snapshot(path))
    assert store_in(tmp_path / "b").stats().runs == 0


def test_what_is_evicted_while_it_is_read_is_in_the_file(tmp_path: Path) -> None:
    ids = ids_of(640)
    a = store_in(tmp_path / "a")
    save(a, ids, step=128)
    whole = b"".join(SnapshotExport(a, session(ids)))
    made = SnapshotExport(a, session(ids))
    for piece in a.find(ids).pieces:
        piece.path.unlink()
    assert b"".join(made) == whole


def test_what_is_evicted_and_not_held_ends_the_file_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshots, "MOST_HELD", 3)
    ids = ids_of(640)
    a = store_in(tmp_path / "a")
    save(a, ids, step=128)
    made = SnapshotExport(a, session(ids))
    a.find(ids).pieces[3].path.unlink()
    with pytest.raises(Gone):
        write(tmp_path / "s", made)
    with pytest.raises(SnapshotRefused):
        read_snapshot(tmp_path / "s")


def test_whose_file_it_is(tmp_path: Path) -> None:
    import mlx.core as mx

    ids = ids_of(10)
    path = exported(tmp_path, ids)
    assert detect_format(path) == "mlxcache"
    other = tmp_path / "o.safetensors"
    mx.save_safetensors(str(other), {"0.0": mx.zeros(3)}, {"1.0": "KVCache"})
    assert detect_format(other) == "mlx-lm"
    mx.save_safetensors(str(other), {"weight": mx.zeros(3)})
    for none in (other, tmp_path / "nowhere", tmp_path):
        with pytest.raises(SnapshotRefused):
            detect_format(none)


def test_nothing_to_export(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no tokens"):
        SnapshotExport(store_in(tmp_path / "a"), replace(session(ids_of(3)), leaves=()))


def test_any_tool_can_read_it(tmp_path: Path) -> None:
    import mlx.core as mx

    ids = ids_of(300)
    path = exported(tmp_path, ids)
    read: Any = mx.load(str(path), format="safetensors", return_metadata=True)
    arrays, metadata = read
    assert metadata["format"] == "mlxcache-snapshot"
    assert np.array_equal(np.array(arrays["tokens"]), ids)
    expected = np.frombuffer(kv(ids, 0, 300)[0].data, np.float32).reshape(300, 2, 4)
    assert np.array_equal(np.array(arrays["kv.0.0"]), expected)


@pytest.mark.slow
def test_a_large_session_is_never_in_ram(tmp_path: Path) -> None:
    """A snapshot of 184 MB may grow the process by a third of that."""
    ids = ids_of(2_000_000)
    a = store_in(tmp_path / "a")
    for end in range(100_000, len(ids) + 1, 100_000):
        start = (end - 100_000) // 64 * 64
        a.write_run(ids[:end], start, kv(ids, start, end))
    info = session(ids)
    before = peak_bytes()
    path = snapshot_in(tmp_path / "s", a, info)
    snapshot = read_snapshot(path)
    grown = peak_bytes() - before
    assert snapshot.nbytes == len(ids) * 92
    assert grown < 60e6
    import_snapshot(store_in(tmp_path / "b"), snapshot)
    assert store_in(tmp_path / "b").find(ids).length == len(ids)
