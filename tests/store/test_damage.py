"""Damage of files and of the index: always a counted miss, never wrong content."""

from __future__ import annotations

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.errors import Corrupt, Gone, PrefixNotStored, StoreError
from mlxcache.safetensors import Malformed, parse, read_header
from mlxcache.store.digests import Chains
from mlxcache.store.kv_files import check_checkpoint, check_run
from mlxcache.store.store import Store
from mlxcache.types import Tokens, join_ids
from tests.store.content import (
    NAMESPACE,
    assert_right,
    branch,
    files,
    length_right,
    on_disk,
    opened,
    put,
    snapshot,
    tokens,
    turns,
)


def assert_malformed(path: Path, raw: bytes, check) -> None:
    path.write_bytes(raw)
    fd = os.open(path, os.O_RDONLY)
    try:
        with pytest.raises(Malformed):
            check(fd)
    finally:
        os.close(fd)


@pytest.fixture
def run_and_check(store):
    ids = tokens(100)
    put(store, ids)
    (piece,) = store.find(ids).pieces
    root = Chains(NAMESPACE).of(ids).whole[0]
    return piece.path, lambda fd: check_run(fd, NAMESPACE, root, piece, ids)


@pytest.fixture
def checkpoint_and_check(store):
    ids = tokens(100)
    store.write_checkpoint(ids, snapshot(ids))
    (saved,) = store.find(ids).checkpoints
    digest = Chains(NAMESPACE).of(ids).at(100)
    return saved.path, lambda fd: check_checkpoint(fd, NAMESPACE, digest, 100)


@pytest.fixture(params=["run", "checkpoint"])
def small_file(request):
    return request.getfixturevalue(f"{request.param}_and_check")


def test_every_byte_flipped_is_noticed(small_file, tmp_path):
    path, check = small_file
    raw = path.read_bytes()
    for at in range(len(raw)):
        flipped = raw[:at] + bytes((raw[at] ^ 1 << at % 8,)) + raw[at + 1 :]
        assert_malformed(tmp_path / "flipped", flipped, check)


def test_every_length_but_the_right_one_is_noticed(small_file, tmp_path):
    path, check = small_file
    raw = path.read_bytes()
    for length in range(len(raw)):
        assert_malformed(tmp_path / "cut", raw[:length], check)
    assert_malformed(tmp_path / "cut", raw + b"\0", check)


def test_a_damaged_file_is_a_miss_that_is_counted(store, folder):
    ids = tokens(1000)
    turns(store, ids, 300, 600, 1000)
    store.write_checkpoint(ids, snapshot(ids))
    damaged = store.find(ids).pieces[1].path
    flip(damaged, -1)
    assert length_right(store, ids) == 256 + 44
    assert store.stats().corrupt == 1
    assert store.stats().quarantined == 1
    assert [path.name.partition("-")[2] for path in (folder / "quarantine").iterdir()] == [
        damaged.name
    ]
    assert (store.stats().runs, store.stats().checkpoints) == (1, 0)
    assert store.check() == []
    put(store, ids, 256)
    assert assert_right(store, ids).length == 1000


def test_pruning_removes_all_that_a_check_names(store, folder):
    ids, others = tokens(1000), tokens(500, 1)
    turns(store, ids, 300, 600, 1000)
    store.write_checkpoint(ids, snapshot(ids))
    put(store, others)
    first, second, third = (piece.path for piece in store.find(ids).pieces)
    flip(second, -1)
    third.unlink()
    stray = first.with_name("0" * 32 + ".safetensors")
    stray.write_bytes(b"no run")
    temp = first.with_name(".4194304-00000000-1.tmp")
    temp.write_bytes(b"half")
    assert {problem.path for problem in store.check()} >= {second, third, stray, temp}
    store.prune()
    assert store.check() == []
    assert not list((folder / "quarantine").iterdir())
    assert assert_right(store, ids).length == 300
    assert assert_right(store, others).length == 500
    put(store, ids, 256)
    assert assert_right(store, ids).length == 1000


def test_only_the_blocks_that_are_wanted_are_read(store):
    ids = tokens(1000)
    put(store, ids)
    flip(store.find(ids).pieces[0].path, -1)
    (piece,) = store.find(ids[:640]).pieces
    store.verify(piece, ids[:640])
    with pytest.raises(Corrupt):
        assert_right(store, ids)


def test_each_file_swapped_with_each_other_is_a_miss(folder, tmp_path):
    ids = tokens(500)
    fork = branch(ids, 256, 500)
    with opened(folder) as store:
        turns(store, ids, 128, 256, 500)
        put(store, fork, 256)
        for prefix in (ids[:128], ids[:256], ids, fork):
            store.write_checkpoint(prefix, snapshot(prefix))
        whole = tmp_path / "whole"
        shutil.copytree(folder, whole)
        every = files(folder)
    with opened(tmp_path / "b", namespace="b") as other:
        put(other, ids[:128])
    every_source = [*every, *files(tmp_path / "b")]
    for target in every:
        for source in every_source:
            if source == target:
                continue
            shutil.rmtree(folder)
            shutil.copytree(whole, folder)
            content = (whole / source.relative_to(folder)) if source in every else source
            with opened(folder) as store:
                target.write_bytes(content.read_bytes())
                for probe in (ids, fork):
                    length_right(store, probe)
                assert store.stats().corrupt == 1
                assert store.check() == []


def test_a_file_that_is_gone_is_a_miss_and_no_damage(store):
    ids = tokens(600)
    turns(store, ids, 300, 600)
    found = store.find(ids)
    found.pieces[1].path.unlink()
    with pytest.raises(Gone):
        store.verify(found.pieces[1], ids)
    assert assert_right(store, ids).length == 300
    store.prune(limit=0)
    with pytest.raises(Gone):
        store.verify(found.pieces[0], ids)
    assert store.stats().corrupt == 0
    assert store.stats().quarantined == 0


def test_the_quarantine_is_bounded(folder):
    with opened(folder, 20_000_000) as store:
        for seed in range(12):
            ids = tokens(20_000, seed)
            put(store, ids)
            flip(store.find(ids).pieces[0].path, 5000)
            with pytest.raises(Corrupt):
                assert_right(store, ids)
        assert store.stats().corrupt == 12
        assert 1 <= store.stats().quarantined <= 8
        held = on_disk(folder / "quarantine")
        assert held <= 20_000_000 // 8
        store.prune()
        assert store.stats().quarantined == 0


def test_a_lost_index_is_made_again(folder):
    ids, fork, other = history(folder)
    before = survey(folder, ids, fork, other)
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    assert survey(folder, ids, fork, other) == before
    with opened(folder) as store:
        assert store.check() == []
        longer = join_ids(ids, tokens(300, 8))
        put(store, longer, len(ids) // 64 * 64)
        assert assert_right(store, longer).length == len(longer)


def test_a_lost_file_in_the_middle_takes_what_builds_on_it(folder):
    ids = tokens(1000)
    with opened(folder) as store:
        turns(store, ids, 300, 600, 1000)
        middle = store.find(ids).pieces[1].path
    middle.unlink()
    (folder / "index.sqlite").unlink()
    with opened(folder) as store:
        assert assert_right(store, ids).length == 300
        assert len(files(folder)) == 1
        assert store.check() == []


def test_strange_files_are_set_aside_when_the_folder_opens(folder):
    ids = tokens(300)
    with opened(folder) as store:
        put(store, ids)
        (run,) = files(folder)
    copy = run.with_name("00" * 16 + ".safetensors")
    shutil.copy(run, copy)
    (run.parent / "notes.txt").write_text("hello")
    (folder / "runs" / "empty.safetensors").write_text("")
    shutil.copy(run, folder / "checkpoints" / run.name)
    with opened(folder) as store:
        assert store.stats().quarantined == 4
        assert store.stats().corrupt == 4
        assert assert_right(store, ids).length == 300
        assert store.check() == []


def test_check_reports_and_changes_nothing(folder):
    ids = tokens(1000)
    with opened(folder) as store:
        turns(store, ids, 300, 600, 1000)
        store.write_checkpoint(ids, snapshot(ids))
        assert store.check() == []
        first, second, third = (piece.path for piece in store.find(ids).pieces)
        flip(first, -1)
        second.unlink()
        (third.parent / "stray").write_text("")
        (third.parent / ".1-2-3.tmp").write_text("")
        what = {problem.path.name: problem.what for problem in store.check()}
        assert what == {
            first.name: "is damaged: the checksum of a block is wrong",
            second.name: "is in the index but missing",
            "stray": "is not in the index",
            ".1-2-3.tmp": "was left by a process that ended",
        }
        assert store.stats().runs == 3
    with opened(folder) as store:
        assert [problem.path for problem in store.check()] == [first]


def test_an_index_of_other_tables_is_made_again(folder):
    """A flipped byte in SQLite's own schema makes such an index."""
    every = history(folder)
    index = folder / "index.sqlite"
    raw = index.read_bytes()
    index.write_bytes(raw.replace(b"parent INTEGER,", b"parenT INTEGER,"))
    assert index.read_bytes() != raw
    with opened(folder) as store:
        assert store.stats().quarantined == 1
        for ids in every:
            assert assert_right(store, ids).length == len(ids)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_damaged_index_never_serves_wrong_content(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("d") / "s"
    every = history(folder)
    index = folder / "index.sqlite"
    raw = bytearray(index.read_bytes())
    for _ in range(data.draw(st.integers(0, 12))):
        raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
    kept = data.draw(st.one_of(st.just(len(raw)), st.integers(0, len(raw) - 1)))
    index.write_bytes(bytes(raw[:kept]))
    if data.draw(st.booleans()):
        (folder / "index.sqlite-wal").write_bytes(data.draw(st.binary(max_size=200)))
    for _ in range(2):
        try:
            store = Store.open(folder, NAMESPACE, 10**9, free_floor=0)
        except StoreError as error:
            assert "newer version" in str(error)  # noqa: PT017 - the only way not to open
            return
        for ids in every:
            while length_right(store, ids) < len(ids):
                with suppress(PrefixNotStored):
                    put(store, ids, store.find(ids).length // 64 * 64)
        assert store.check() == []
        store.close()


@pytest.mark.parametrize("where", [slice(0, 4096), slice(4096, None)], ids=["head", "tables"])
def test_an_index_that_is_damaged_under_an_open_store_is_made_again_by_the_next(
    folder: Path, where: slice
) -> None:
    ids = tokens(1000)
    with opened(folder) as store:
        turns(store, ids, 300, 1000)
        store.database.empty_log(shrink=True)
        index = folder / "index.sqlite"
        data = bytearray(index.read_bytes())
        data[where] = bytes(len(data[where]))
        with index.open("r+b") as file:
            file.write(data)
        store.database.drop_pool()
        with pytest.raises(StoreError):
            put(store, tokens(500, 3))
        with suppress(StoreError):
            assert store.find(ids).length in (0, 1000)
    with opened(folder) as store:
        assert assert_right(store, ids).length == 1000
        put(store, tokens(500, 3))
        assert store.check() == []


@pytest.mark.parametrize("reading", [False, True])
def test_a_folder_of_a_later_version_is_refused_and_nothing_is_lost(folder, monkeypatch, reading):
    every = history(folder)

    def set_version(number: int) -> None:
        with closing(sqlite3.connect(folder / "index.sqlite")) as connection:
            connection.execute(f"PRAGMA user_version = {number}")

    set_version(2)
    before = {path: path.read_bytes() for path in files(folder)}
    if reading:
        monkeypatch.setattr("mlxcache.store.recovery.find_obstacle", lambda _: "read-only")
    with pytest.raises(StoreError, match="newer version of mlxcache: update mlxcache, or choose"):
        Store.open(folder, NAMESPACE, 10**9)
    assert {path: path.read_bytes() for path in files(folder)} == before
    monkeypatch.undo()
    set_version(1)
    with opened(folder) as store:
        assert store.stats().quarantined == 0
        for ids in every:
            assert assert_right(store, ids).length == len(ids)


@pytest.mark.parametrize("at", [18, 19])
def test_an_index_of_a_format_that_nobody_writes_is_rebuilt(folder, at):
    """SQLite would only read it: its header's versions for writing and reading."""
    every = history(folder)
    raw = bytearray((folder / "index.sqlite").read_bytes())
    raw[at] = 3
    (folder / "index.sqlite").write_bytes(bytes(raw))
    with opened(folder) as store:
        for ids in every:
            assert length_right(store, ids) > 0
            put(store, ids, store.find(ids).length // 64 * 64)
            assert assert_right(store, ids).length == len(ids)
        assert store.check() == []


@given(st.binary(max_size=400))
def test_any_bytes_are_a_header_or_malformed(raw):
    with suppress(Malformed):
        header = parse(raw, len(raw) + 8)
        assert sum(place.nbytes for place in header.places) == 0


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,15]}}',
        '{"a":{"dtype":"F32","shape":[-4],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[16,0]}}',
        '{"a":{"dtype":"F32","shape":[99999999999,99999999999],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F99","shape":[4],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F32","shape":[4.0],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F32","shape":[true,4],"data_offsets":[0,16]}}',
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[4,20]}}',
        '{"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]},"a":{}}',
        '{"a":{"dtype":["F32"],"shape":[4],"data_offsets":[0,16]}}',
        '{"__metadata__":{"a":1}}',
        "[]",
        "[" * 5000,
    ],
)
def test_headers_that_lie_are_malformed(text):
    with pytest.raises(Malformed):
        parse(text.encode(), 8 + len(text) + 16)


def test_a_header_that_claims_a_huge_size_is_not_read(tmp_path):
    path = tmp_path / "f"
    path.write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    fd = os.open(path, os.O_RDONLY)
    with pytest.raises(Malformed, match="does not fit"):
        read_header(fd)
    os.close(fd)


def flip(path: Path, at: int) -> None:
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0x10
    path.write_bytes(raw)


def history(folder: Path) -> tuple[Tokens, Tokens, Tokens]:
    ids, other = tokens(700), tokens(150, 5)
    fork = branch(ids, 330, 500)
    with opened(folder) as store:
        turns(store, ids, 100, 400, 700)
        turns(store, fork, 330, 500)
        put(store, other)
        for position in (64, 100, 300, 400, 700):
            store.write_checkpoint(ids[:position], snapshot(ids[:position]))
        store.write_checkpoint(fork, snapshot(fork))
    return ids, fork, other


def survey(folder: Path, *every: Tokens) -> list[object]:
    with opened(folder) as store:
        found = [assert_right(store, ids) for ids in every]
    return [
        (
            one.length,
            [(piece.path, piece.start, piece.end) for piece in one.pieces],
            [(saved.path, saved.position) for saved in one.checkpoints],
        )
        for one in found
    ]
