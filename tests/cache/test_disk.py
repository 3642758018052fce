"""The disk tier under a real model: what is written behind, what a new process restores."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache import disk_calls
from mlxcache.cache.disk import DiskTier
from mlxcache.cache.restore import DiskLookup
from mlxcache.engine.figures import Disk, Figures, with_disk
from mlxcache.errors import DiskFull, StoreError
from mlxcache.model import serialise
from mlxcache.model.kv import arrays_of
from mlxcache.model.lineage import Lineage
from mlxcache.scheduling.task import Task
from mlxcache.store.store import Store
from mlxcache.types import token_ids
from tests.scheduled import Bench
from tests.scheduling.drafts import make_draft
from tests.scheduling.faults import uncomputable
from tests.toys.toy import make_toy

FAMILIES = (
    "llama", "gemma3", "gpt_oss", "qwen3_5", "mamba2", "llama4", "deepseek_v3", "deepseek_v41",
)  # fmt: skip
ROOM = 1 << 20


@pytest.fixture(scope="module", params=[*FAMILIES, "drafted", "quantised"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "drafted":
        model = make_toy(folder / "model")
        return Bench(model, draft=make_draft(model, folder / "draft", "alike"))
    if request.param == "quantised":
        return Bench(make_toy(folder / "model", head_dim=64), kv_bits=4)
    return Bench(make_toy(folder / "model", request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(make_toy(tmp_path_factory.mktemp("llama") / "model", "llama"))


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., DiskTier]]:
    """Gives a bench an empty RAM tier over the test's folder, as a new process has it."""
    disks: list[DiskTier] = []

    def begin(bench: Bench, ram: int = 1 << 30, limit: int = 1 << 30) -> DiskTier:
        disk = bench.open_disk(tmp_path / "store", ram=ram, limit=limit, pending=ROOM)
        disks.append(disk)
        return disk

    yield begin
    for disk in disks:
        disk.close(0.0)


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(3, 250, length).tolist()


def settled(disk: DiskTier) -> DiskTier:
    """The disk once all is written."""
    assert disk.write_behind.drain(20.0) == 0
    assert not disk.write_behind.busy
    return disk


def talk(bench: Bench, rng: np.random.Generator, turns: int) -> list[Task]:
    """A conversation of `turns`; each prompt has a mark where its reply begins."""
    tasks: list[Task] = []
    ids: list[int] = []
    for turn in range(turns):
        new = prompt(rng, 300 if turn == 0 else 90)
        ids = [*ids, *new]
        tasks.append(bench.ask(ids, marks=(100, len(ids) - 3)))
        ids = [*ids, *tasks[-1].out]
    return tasks


def test_the_next_turn_is_warm_after_a_restart(
    bench: Bench, start: Callable[..., DiskTier], rng: np.random.Generator
) -> None:
    disk = start(bench)
    last = talk(bench, rng, 3)[-1]
    settled(disk)
    disk = start(bench)
    ids = [*last.ids.tolist(), *last.out, *prompt(rng, 50)]
    task = bench.ask(ids, marks=(100, len(ids) - 3))
    assert task.out == bench.twin().ask(ids).out
    assert task.record.restored_tokens == task.record.cached_tokens
    assert task.record.cached_tokens >= len(last.ids) - 3
    assert task.record.cached_tokens + task.record.fed_tokens >= len(ids) - 1
    again = bench.ask([*ids, *task.out, 7, 8, 9])
    assert again.record.restored_tokens == 0
    assert again.record.cached_tokens >= len(ids) - 3


def test_what_left_ram_comes_back_from_disk(
    bench: Bench, start: Callable[..., DiskTier], rng: np.random.Generator
) -> None:
    layout = bench.kv.layout
    ram = ROOM + 1500 * layout.bytes_per_token + 12 * layout.checkpoint_bytes
    disk = start(bench, ram=ram)
    prompts = [prompt(rng, 400) for _ in range(5)]
    outs = []
    for ids in prompts:
        outs.append(bench.ask(ids, marks=(100, 397)).out)
        settled(disk)
    twin = bench.twin()
    for ids, out in zip(prompts, outs, strict=True):
        more = [*ids, *out, *prompt(rng, 40)]
        task = bench.ask(more, marks=(100, len(more) - 3))
        settled(disk)
        assert task.record.cached_tokens >= 397
        assert task.out == twin.ask(more).out
    assert bench.kv.ram.spilled > 0
    assert bench.kv.ram.dropped == 0


@pytest.mark.parametrize("bench", ["qwen3_5", "llama4", "deepseek_v41"], indirect=True)
def test_where_a_prompt_parts_from_what_only_the_disk_has_the_next_one_starts(
    bench: Bench, start: Callable[..., DiskTier], rng: np.random.Generator
) -> None:
    """What was fed again up to there is not written again."""
    disk = start(bench)
    ids = prompt(rng, 600)
    bench.ask(ids, marks=(100, 597), tokens=4)
    assert settled(disk).store.stats().written_tokens >= 604
    disk = start(bench)
    for n, restored in enumerate((100, 437, 437)):
        if n == 2:
            settled(disk)
            disk = start(bench)
        branch = [*ids[:437], n + 5, *prompt(rng, 60)]
        task = bench.ask(branch, marks=(100, len(branch) - 3), tokens=4)
        assert task.record.cached_tokens == restored
        assert (task.record.restored_tokens > 0) == (n != 1)
        assert task.out == bench.twin().ask(branch, tokens=4).out
        written = settled(disk).store.stats().written_tokens
        assert written <= (n % 2 + 1) * (len(branch) + 4 - 384)


def test_damaged_files_are_a_miss_and_never_a_wrong_token(
    bench: Bench, start: Callable[..., DiskTier], rng: np.random.Generator, tmp_path: Path
) -> None:
    disk = start(bench)
    last = talk(bench, rng, 3)[-1]
    settled(disk)
    ids = [*last.ids.tolist(), *last.out, *prompt(rng, 50)]
    files = sorted((tmp_path / "store").rglob("*.safetensors"))
    assert files
    for file in files if bench.kv.layout.opaque else files[::2]:
        data = bytearray(file.read_bytes())
        payload = 8 + int.from_bytes(data[:8], "little")
        data[payload + 5] ^= 0x40
        file.write_bytes(data)
    disk = start(bench)
    task = bench.ask(ids, marks=(100, len(ids) - 3))
    assert task.out == bench.twin().ask(ids).out
    assert disk.store.stats().corrupt >= 1
    assert task.record.cached_tokens <= len(ids)


def looked_up(disk: DiskTier, ids: list[int], known: int = 0) -> DiskLookup:
    """A lookup that has verified all its files."""
    lookup = disk.restorer.look_up(token_ids(ids), known)
    while not lookup.failed and not (lookup.found and lookup.verified >= lookup.target):
        time.sleep(0.001)
    return lookup


def test_what_a_restore_needs_is_read_ahead_once(
    llama: Bench,
    start: Callable[..., DiskTier],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not the files whose tokens are in RAM."""
    disk = start(llama)
    last = talk(llama, rng, 6)[-1]
    settled(disk)
    advised: list[int] = []

    def note(fd: int) -> None:
        advised.append(os.fstat(fd).st_ino)

    monkeypatch.setattr(disk_calls, "read_ahead", note)
    for known in (0, 400):
        lookup, needed = looked_up(disk, last.ids.tolist(), known), list[int]()
        for piece in lookup.pieces:
            needed += [piece.path.stat().st_ino] if piece.end > known else []
        assert advised == needed
        assert 1 < len(needed) == len(lookup.pieces) - (known > 0)
        advised.clear()


def test_verified_files_are_loaded_in_one_evaluation_if_they_fit(
    llama: Bench, start: Callable[..., DiskTier], rng: np.random.Generator
) -> None:
    """As on a GPU; and one file at a time as on a CPU, with the same KV."""
    disk = start(llama)
    last = talk(llama, rng, 6)[-1]
    settled(disk)
    lookup = looked_up(disk, last.ids.tolist())
    lineages, loads = [], []
    for copied in (0, lookup.pieces[0].nbytes + lookup.pieces[1].nbytes, 1 << 30):
        lineage = Lineage(llama.kv.layout, copied)
        lineage.grow(lookup.target)
        loads.append(1)
        while not disk.restorer.load(lookup, lineage):
            loads[-1] += 1
        lineages.append([np.array(a) for slot in lineage.linear for a in arrays_of(slot)])
    assert len(lookup.pieces) == loads[0] > loads[1] > loads[2] == 1
    for others in lineages[1:]:
        assert all(map(np.array_equal, lineages[0], others))


def test_a_request_that_is_cancelled_while_it_is_restored_harms_nothing(
    bench: Bench, start: Callable[..., DiskTier], rng: np.random.Generator
) -> None:
    disk = start(bench)
    last = talk(bench, rng, 2)[-1]
    settled(disk)
    ids = [*last.ids.tolist(), *last.out, *prompt(rng, 50)]
    for ticks in range(6):
        start(bench)
        task = bench.put(ids, marks=(100, len(ids) - 3))
        for _ in range(ticks):
            bench.tick()
        bench.scheduler.cancel(task)
        if not task.admitted:  # nothing was computed, and nothing reused
            assert (task.record.fed_tokens, task.record.cached_tokens) == (0, 0)
        bench.run()
        bench.check()
        assert bench.ask(ids, marks=(100, len(ids) - 3)).out == bench.twin().ask(ids).out


@pytest.mark.slow
def test_a_file_that_fails_while_it_is_read_is_computed_again(
    llama: Bench, start, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second file of a prefix, whose first one is in the lineage by then."""
    ids = prompt(rng, 5000)
    disk = start(llama)
    llama.ask(ids)
    settled(disk)
    start(llama)
    load, loads = serialise.load_run, 0

    def fail_second(*args: Any) -> list[list[mx.array]]:
        nonlocal loads
        loads += 1
        found = load(*args)
        if loads == 2:
            found[-1][-1] = found[-1][-1] + uncomputable().astype(found[-1][-1].dtype)
        return found

    monkeypatch.setattr(serialise, "load_run", fail_second)
    task = llama.ask(ids)
    assert loads == 2
    assert task.out == llama.cold(ids)


def test_a_long_prompt_is_on_disk_before_its_reply_ends(
    llama: Bench, start: Callable[..., DiskTier], rng: np.random.Generator
) -> None:
    disk = start(llama)
    ids = prompt(rng, 3000)
    task = llama.put(ids, tokens=50)
    llama.run(until=lambda: len(task.out) > 0)
    settled(disk)
    assert disk.store.find(token_ids(ids)).length >= 2000
    llama.run()


def test_a_disk_that_is_full_costs_nothing_but_the_disk(
    llama: Bench,
    start: Callable[..., DiskTier],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What it refused is written once it works again, without another request."""

    def full(*args: object) -> None:
        raise DiskFull("no space left on the device")

    disk = start(llama)
    monkeypatch.setattr(disk.store, "write_run", full)
    with caplog.at_level(logging.WARNING):
        tasks = talk(llama, rng, 3)
        left = disk.write_behind.drain(5.0)
        llama.ask([*tasks[-1].ids.tolist(), 5, 6])
    assert [t.record.cached_tokens > 0 for t in tasks] == [False, True, True]
    # shared tokens count once; beside the last prompt there are ends of earlier replies
    assert len(tasks[-1].ids) <= left < sum(len(task.ids) for task in tasks)
    assert sum("suspended" in record.message for record in caplog.records) == 1
    assert disk.write_behind.backoff.failing
    assert not disk.write_behind.busy
    monkeypatch.undo()
    last = tasks[-1]
    while disk.store.find(last.ids).length < len(last.ids):
        llama.tick()  # the disk's timer wakes it
    settled(disk)
    assert not disk.write_behind.backoff.failing


def test_figures_that_cannot_be_read_say_why(
    llama: Bench, start: Callable[..., DiskTier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not those of an empty folder that works."""

    def unreadable() -> None:
        raise StoreError("the index cannot be read")

    disk = start(llama)
    monkeypatch.setattr(disk.store, "stats", unreadable)
    found = with_disk(Figures(), disk).disk
    assert isinstance(found, Disk)
    assert (found.state, found.reason) == ("suspended", "the index cannot be read")


def test_a_lookup_that_fails_says_what_it_was_for(
    llama: Bench,
    start: Callable[..., DiskTier],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One for a prompt, one before a write; the request is served, and written later."""

    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no lookup")

    disk = start(llama)
    ids = prompt(rng, 300)
    with monkeypatch.context() as patch:
        patch.setattr(disk.store, "find", broken)
        task = llama.ask(ids)
        disk.write_behind.drain(2.0)
    assert task.out == llama.cold(ids)
    assert "disk lookup failed, computing the prefix: prompt of 300 tokens" in caplog.text
    path = len(ids) + len(task.out)
    assert f"disk lookup before a write failed for a path of {path} tokens" in caplog.text
    while disk.store.find(task.ids).length < len(ids):
        llama.tick()  # the disk's timer wakes it


def test_a_slow_disk_holds_dirty_segments_in_ram_and_drops_none(
    llama: Bench,
    start: Callable[..., DiskTier],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = start(llama, ram=ROOM + 1600 * llama.kv.layout.bytes_per_token)
    write = disk.store.write_run

    def slowly(*args: Any) -> None:
        time.sleep(0.2)
        write(*args)

    monkeypatch.setattr(disk.store, "write_run", slowly)
    prompts = [prompt(rng, 400) for _ in range(8)]
    for ids in prompts:
        llama.ask(ids)
    settled(disk)
    for ids in prompts:
        assert disk.store.find(token_ids(ids)).length == len(ids)
    assert llama.kv.ram.dropped == 0


def hanging(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Has the disk end no write until the event is set."""
    free, write = threading.Event(), disk.store.write_run

    def hang(*args: object) -> None:
        free.wait(60.0)
        write(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(disk.store, "write_run", hang)
    return free


def test_a_disk_that_hangs_cuts_no_reply(
    llama: Bench,
    start: Callable[..., DiskTier],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = start(llama, ram=ROOM + 1600 * llama.kv.layout.bytes_per_token)
    free = hanging(disk, monkeypatch)
    try:
        llama.ask(prompt(rng, 900))
        ids = prompt(rng, 300)
        task = llama.ask(ids, tokens=700)
        assert len(task.out) == 700
        assert disk.write_behind.backoff.failing
    finally:
        free.set()
    llama.ask([*ids, *task.out, 3, 4])
    settled(disk)
    assert disk.store.find(task.ids).length == len(ids)


def test_replies_go_on_while_a_request_waits_for_room_that_the_disk_holds_up(
    llama: Bench,
    start: Callable[..., DiskTier],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = start(llama, ram=ROOM + 2000 * llama.kv.layout.bytes_per_token)
    free = hanging(disk, monkeypatch)
    try:
        llama.ask(prompt(rng, 800))
        task = llama.put(prompt(rng, 300), tokens=300)
        llama.run(until=lambda: len(task.out) > 5)
        assert not disk.write_behind.backoff.failing
        other = llama.put(prompt(rng, 800), tokens=5)
        began = time.monotonic()
        llama.run(until=lambda: len(task.out) > 10)
        assert time.monotonic() - began < 30  # the write would hang until it is freed
        assert not other.out
    finally:
        free.set()
    llama.run()
    assert len(other.out) == 5


def test_nothing_spins_while_two_requests_wait_for_one_file(
    llama: Bench,
    start: Callable[..., DiskTier],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = start(llama)
    ids = prompt(rng, 600)
    llama.ask(ids)
    settled(disk)
    disk = start(llama)
    free, verify, ticks = threading.Event(), disk.store.verify, 0

    def held(*args: object, **kwargs: object) -> None:
        free.wait(60.0)
        verify(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(disk.store, "verify", held)
    tasks = [llama.put([*ids, one]) for one in (5, 6)]
    timer = threading.Timer(0.5, free.set)
    timer.start()
    while not free.is_set():
        llama.tick()
        ticks += 1
    llama.run()
    assert ticks < 20
    assert [task.record.cached_tokens for task in tasks] == [600, 600]


def test_what_was_removed_from_disk_is_written_again_with_its_checkpoints(
    bench: Bench, start: Callable[..., DiskTier], rng: np.random.Generator
) -> None:
    disk = start(bench)
    ids = prompt(rng, 400)
    bench.ask(ids, marks=(100, 397))
    settled(disk).store.clear()
    bench.kv.ram.clear()
    bench.ask(ids, marks=(100, 397))
    settled(disk)
    start(bench)
    assert bench.ask([*ids, 5, 6]).record.restored_tokens >= 397


def test_what_a_stop_leaves_unwritten_is_counted_while_the_writer_has_it(
    llama: Bench,
    start: Callable[..., DiskTier],
    rng: np.random.Generator,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    disk = start(llama)
    free = hanging(disk, monkeypatch)
    try:
        ids = prompt(rng, 300)
        task = llama.ask(ids)
        assert disk.write_behind.drain(0.1) == len(ids) + len(task.out)
    finally:
        free.set()
    settled(disk)


def test_what_another_server_removed_is_written_again_by_the_next_turn(
    bench: Bench, start: Callable[..., DiskTier], rng: np.random.Generator, tmp_path: Path
) -> None:
    """Tokens and checkpoints, also the one that others share, while RAM has them all."""
    disk = start(bench)
    last = talk(bench, rng, 2)[-1]
    settled(disk)
    other = Store.open(tmp_path / "store", "another model", None)
    other.clear()
    other.close()
    ids = [*last.ids.tolist(), *last.out, *prompt(rng, 90)]
    task = bench.ask(ids, marks=(100, len(ids) - 3))
    assert task.record.restored_tokens == 0
    settled(disk)
    for whole in ([*ids, *task.out], ids[:150]):
        start(bench)
        again = bench.ask([*whole, *prompt(rng, 90)], marks=(100, len(whole) - 3))
        assert again.record.restored_tokens >= (len(ids) - 3 if len(whole) > 150 else 100)
