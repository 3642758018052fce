"""The cap holds at every moment by the file system's count; order of eviction."""

from __future__ import annotations

import errno
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from mlxcache.errors import DiskFull, PrefixNotStored, StoreError
from mlxcache.store import index
from mlxcache.store.digests import Chains
from mlxcache.store.folder import Folder
from mlxcache.store.store import Store
from tests.sampler import Sampler
from tests.store.content import (
    NAMESPACE,
    assert_right,
    branch,
    files,
    kv,
    on_disk,
    opened,
    put,
    run_bytes,
    snapshot,
    tokens,
    turns,
)

MB = 10**6


def fill(store: Store, seeds: range, count: int = 3000, row: int = 20) -> None:
    """Save conversations with a checkpoint each; skip one whose beginning is evicted meanwhile."""
    for seed in seeds:
        ids = tokens(count, seed)
        with suppress(PrefixNotStored):
            turns(store, ids, count // 2, count, row=row)
            store.write_checkpoint(ids, snapshot(ids))


def test_the_cap_holds_while_writing(folder):
    limit = 6 * MB
    with opened(folder, limit) as store, Sampler(lambda: on_disk(folder)) as sampler:
        for seed in range(30):
            count = (1 + seed % 7) * 700
            fill(store, range(seed, seed + 1), count)
            assert store.stats().used_bytes <= limit
            assert assert_right(store, tokens(count, seed), 20).length == count
        assert store.stats().evicted > 20
    assert sampler.samples > 20
    assert limit / 2 < sampler.most <= limit


def test_the_cap_holds_with_two_processes(folder):
    limit = 6 * MB
    with opened(folder, limit) as store, Sampler(lambda: on_disk(folder)) as sampler:
        code = (
            "from tests.store.test_eviction import *\n"
            f"with opened(Path({str(folder)!r}), {limit}) as store:\n"
            "    fill(store, range(1000, 1015))\n"
            "    print(store.stats().evicted)\n"
        )
        other = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT
        )
        seed = 0
        while other.poll() is None and seed < 5000:
            fill(store, range(seed, seed + 1))
            seed += 1
        out, _ = other.communicate()
        assert other.returncode == 0
        assert int(out) > 0
        assert store.stats().evicted > 0
        assert store.check() == []
    assert limit / 2 < sampler.most <= limit


def test_a_lower_cap_holds_from_the_start(folder):
    with opened(folder, 20 * MB) as store:
        fill(store, range(20))
        assert store.stats().used_bytes > 8 * MB
    with opened(folder, 4 * MB) as store:
        assert on_disk(folder) <= 4 * MB
        assert store.find(tokens(3000, 19)).length == 3000
    with opened(folder, None) as store:
        assert store.find(tokens(3000, 19)).length == 3000


def test_the_cap_holds_while_a_lost_index_is_made_again(folder):
    """Rows of a rebuilt index need room, which a full folder lacks."""
    with opened(folder) as store:
        fill(store, range(80), 1000, 8)
        runs = store.stats().runs
    for name in ("index.sqlite", "index.sqlite-wal", "index.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    limit = on_disk(folder) + 200_000
    with Sampler(lambda: on_disk(folder)) as sampler, opened(folder, limit) as store:
        assert runs / 2 < store.stats().runs < runs
        assert store.check() == []
        fill(store, range(100, 105), 1000, 8)
    assert sampler.most <= limit


def test_what_cannot_fit_is_refused_and_costs_nothing(folder):
    with opened(folder, 4 * MB) as store:
        ids = tokens(3000)
        put(store, ids)
        large = tokens(40_000, 1)
        with pytest.raises(DiskFull, match="do not fit into the 4 MB"):
            put(store, large, row=20)
        assert assert_right(store, ids).length == 3000
        assert len(files(folder)) == 1
        assert store.stats().evicted == 0


def test_least_recently_used_goes_first(folder):
    with opened(folder, 6 * MB) as store:
        fill(store, range(6))
        assert store.stats().evicted == 0
        store.find(tokens(3000, 0))
        store.find(tokens(3000, 3))
        store.find(tokens(3000, 1), touch=False)
        fill(store, range(100, 103))
        lengths = [store.find(tokens(3000, seed), touch=False).length for seed in range(6)]
        assert (lengths[0], lengths[3]) == (3000, 3000)
        assert min(lengths[1], lengths[2]) < 3000
        assert lengths[5] == 3000


def test_a_clock_that_goes_back_changes_no_order_of_use(folder, monkeypatch):
    now = 2e9
    monkeypatch.setattr(time, "time", lambda: now)
    a, b, c = (tokens(1000, seed) for seed in (1, 2, 3))
    with opened(folder) as store:
        put(store, a)
        now = 1e9  # a day in the past, or a machine whose clock was never set
        put(store, b)
    with opened(folder) as store:
        put(store, c)
        store.find(a)
        store.note_uses()
        with store.database.read() as connection:
            rows = sorted(index.rows(connection), key=lambda row: row.used)
        assert [row.digest for row in rows] == [Chains(NAMESPACE).of(x).at(1000) for x in (b, c, a)]


def test_a_conversation_shrinks_from_its_end(folder):
    with opened(folder, 6 * MB) as store:
        ids = tokens(4800)
        turns(store, ids, *range(600, 4801, 600), row=20)
        fork = branch(ids, 1500, 1800)
        put(store, fork, 1472, row=20)
        seed = 100
        while store.find(ids, touch=False).length == 4800:
            store.find(fork)
            fill(store, range(seed, seed + 1), 1000)
            seed += 1
        left = store.find(ids, touch=False).length
        assert 1500 <= left < 4800
        assert assert_right(store, fork, 20).length == 1800
        assert store.check() == []


def test_pinned_sessions_go_last(folder):
    ids = tokens(3000)
    with opened(folder, 6 * MB) as store:
        turns(store, ids, 1500, 3000, row=20)
        store.write_checkpoint(ids, snapshot(ids))
        store.pin("a", [ids])
        store.pin("b", [ids[:1000]])
        assert store.stats().pinned_bytes > run_bytes(3000, 20)
        fill(store, range(1, 30))
        assert assert_right(store, ids, 20).length == 3000
        assert store.find(ids).checkpoints
        large = tokens(60_000, 99)
        end = 0
        while store.find(ids, touch=False).length == 3000:
            others = [store.find(tokens(3000, seed), touch=False) for seed in range(1, 30)]
            put(store, large[: end + 1024], end, row=20)
            end += 1024
        assert not any(found.length for found in others)
        assert store.find(large).length == end
        store.pin("a", [])
        assert store.stats().pinned_bytes <= store.stats().used_bytes


def test_a_pin_of_one_name_outlives_anothers(folder):
    ids = tokens(3000)
    with opened(folder, 6 * MB) as store:
        put(store, ids, row=20)
        store.pin("a", [ids])
        store.pin("b", [ids])
        store.pin("a", [])
        fill(store, range(1, 30))
        assert store.find(ids).length == 3000
        store.pin("b", [])
        fill(store, range(40, 70))
        assert store.find(ids, touch=False).length == 0


def test_the_quarantine_makes_room_first(folder):
    with opened(folder, 6 * MB) as store:
        (folder / "quarantine" / "1-x").write_bytes(bytes(2 * MB))
        seed = 0
        while store.stats().quarantined:
            fill(store, range(seed, seed + 1))
            seed += 1
        assert seed > 2
        assert store.stats().evicted == 0


def test_the_floor_of_free_space_is_kept(folder, monkeypatch):
    disk, taken = 100 * MB, 80 * MB
    monkeypatch.setattr(Folder, "free", lambda self: disk - taken - on_disk(folder))
    with opened(folder, 50 * MB, free_floor=10 * MB) as store:
        fill(store, range(30))
        assert 7 * MB < on_disk(folder) <= 10 * MB
        taken = 85 * MB
        fill(store, range(30, 31))
        assert on_disk(folder) <= 5 * MB
        assert store.find(tokens(3000, 30)).length == 3000
        taken = 95 * MB
        with pytest.raises(DiskFull, match="kept free"):
            fill(store, range(31, 32))


@pytest.mark.parametrize(
    ("number", "wanted"),
    [(errno.ENOSPC, DiskFull), (errno.EDQUOT, DiskFull), (errno.EROFS, StoreError)],
)
@pytest.mark.parametrize("call", ["os.write", "sync", "os.rename", "os.ftruncate"])
def test_a_disk_that_refuses_leaves_nothing_behind(folder, monkeypatch, number, wanted, call):
    ids = tokens(500)
    with opened(folder) as store:

        def refuse(*_: object) -> None:
            raise OSError(number, "refused")

        with monkeypatch.context() as patched:
            patched.setattr(f"mlxcache.store.folder.{call}", refuse)
            with pytest.raises(wanted):
                put(store, ids)
        assert not files(folder)
        assert store.stats().runs == 0
        put(store, ids)
        assert assert_right(store, ids).length == 500
        assert store.check() == []


def test_room_can_be_made_for_rows_of_others(folder):
    with opened(folder, 6 * MB) as store:
        fill(store, range(12))
        evicted = store.stats().evicted
        store.make_room(2 * MB)
        assert store.stats().evicted > evicted
        assert on_disk(folder) <= 4 * MB
        with pytest.raises(DiskFull):
            store.make_room(7 * MB)


def counts(store) -> list[int]:
    with store.database.read() as connection:
        return sorted(count for (count,) in connection.execute("SELECT count FROM found"))


def test_two_servers_count_together(folder):
    ids = tokens(300)
    with opened(folder, 8 << 20) as one, opened(folder, 8 << 20) as other:
        one.write_run(ids[:128], 0, kv(ids[:128]))
        one.write_run(ids, 128, kv(ids, 128))
        for store in (one, other, other):
            store.reused(store.find(ids, touch=False), 128)
            store.note_uses()
        assert counts(one) == [3]
        one.reused(one.find(ids, touch=False), 300)
        one.note_uses()
        assert counts(other) == [1, 4]
        one.clear()
        assert counts(other) == []


ROOT = Path(__file__).parents[2]
