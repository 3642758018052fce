"""A device that fails in silence: no wrong token is sent or kept, and every request is answered."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcache.bench.device_faults import ERRORS, FailingDevice, failing
from mlxcache.errors import DeadlineExceeded, GenerationFailed
from mlxcache.model import serialise
from mlxcache.scheduling.task import Task
from mlxcache.types import Finished, Prompt, Sampling, token_ids
from tests.conftest import ToyMaker
from tests.engine.running import started
from tests.scheduled import Bench
from tests.scheduling.drafts import Kind, make_draft
from tests.scheduling.failing_device import (
    Judge,
    Once,
    Unlucky,
    check_restored,
    check_unlocked,
    decoding,
    failing_once,
    growing,
    last,
    prefilling,
    text,
    tokens,
)
from tests.scheduling.guesses import Foretold
from tests.sessions.test_book import ask, prompt

FAMILIES = ("llama", "gemma3", "qwen3_5", "deepseek_v3", "deepseek_v41")
RUNS = int(os.environ.get("MLXCACHE_DEVICE_RUNS", "0"))


SAMPLINGS = (
    Sampling(),
    Sampling(),
    Sampling(temperature=0.8, seed=11),
    Sampling(temperature=1.1, seed=12, top_p=0.9, presence_penalty=0.5),
    Sampling(repetition_penalty=1.2, frequency_penalty=0.3),
)


def live(
    path: Path,
    judge: Judge,
    seed: int,
    folder: Path,
    speculation: Foretold | None = None,
    **options: Any,
) -> int:
    """One random life; returns the failures of the device. Later requests use what was kept.

    `speculation`: is told the replies of a device that works.
    """
    rng = np.random.default_rng(seed)
    picked = {int(n) for n in rng.integers(1, rng.choice([20, 60, 200]), rng.integers(1, 5))}
    if rng.random() < 0.2:  # several in a row
        start = int(rng.integers(1, 80))
        picked |= set(range(start, start + int(rng.integers(2, 9))))
    on = FailingDevice(
        picked.__contains__,
        delay=int(rng.integers(0, 2)),
        in_place=bool(rng.integers(0, 2)),
        message=ERRORS[rng.integers(len(ERRORS))],
        nan=seed % 3 == 2,
    )
    disk = bool(rng.integers(0, 2))
    chunk = int(rng.choice([16, 64]))
    guesses = speculation.alone if speculation is not None else None
    unlucky = Unlucky(path, on, folder if disk else None, chunk, guesses, **options)
    samplings = SAMPLINGS if "kv_bits" not in options else SAMPLINGS[:1]
    chats = [tokens(rng, int(rng.integers(5, 150)))]
    tasks: list[Task] = []
    for _ in range(3):
        now = []
        for _ in range(int(rng.choice([1, 1, 2, 4]))):
            chat = chats[rng.integers(len(chats))]
            ids = [*chat[: int(rng.integers(1, len(chat) + 1))], *tokens(rng, 20)]
            marks = sorted({int(m) for m in rng.integers(1, len(ids) + 1, 2)})
            sampling = samplings[rng.integers(len(samplings))]
            count = int(rng.choice([1, 3, 12, 40]))
            now.append(unlucky.bench.put(ids, tokens=count, marks=marks, sampling=sampling))
            if speculation is not None:
                reply = judge.bench.twin().ask(ids, tokens=count, sampling=sampling).out
                speculation.foretell(len(ids), reply)
        if rng.random() < 0.4:
            leaver = now[rng.integers(len(now))]
            why = DeadlineExceeded("too slow") if rng.random() < 0.5 else None
            unlucky.ends.append((unlucky.ticks + int(rng.integers(1, 40)), leaver, why))
        unlucky.run(now)
        tasks += now
        chats += [[*task.job.prompt.ids.tolist(), *text(task)] for task in now]
        if unlucky.died:
            break
    for task in tasks:
        judge.check_task(task)
    kept = [*map(tuple, chats)]
    if not unlucky.died:
        again(unlucky.bench, judge, kept)
    if disk:
        unlucky.bench.kv.close(10.0)
    if not unlucky.died:
        check_unlocked(unlucky.bench)
    if disk:
        fresh = Bench(path, **options)
        fresh.open_disk(folder)
        again(fresh, judge, kept)
        fresh.kv.close(1.0)
    return on.failures


def again(bench: Bench, judge: Judge, chats: Sequence[Sequence[int]]) -> None:
    """On a device that works: what the cache kept of each conversation gives the right reply."""
    for chat in chats[-4:]:
        ids = [*chat, 7, 8, 9]
        judge.check(ids, bench.ask(ids, tokens=6).out, Sampling())


@pytest.mark.parametrize("seed", range(RUNS // len(FAMILIES) or 8))
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_life_on_a_failing_device(
    toy: ToyMaker, judges: Callable[[str], Judge], tmp_path: Path, family: str, seed: int
) -> None:
    """`MLXCACHE_DEVICE_RUNS=500` runs so many in all."""
    live(toy(family), judges(family), seed, tmp_path)


@pytest.mark.parametrize("seed", range(RUNS // len(FAMILIES) or 4))
@pytest.mark.parametrize("kind", ["same", "alike", "other"])
def test_a_random_life_with_a_draft_model(
    toy: ToyMaker, judges: Callable[[str], Judge], tmp_path: Path, kind: Kind, seed: int
) -> None:
    draft = make_draft(toy("llama"), tmp_path / "draft", kind)
    live(toy("llama"), judges("llama"), seed, tmp_path / "store", draft=draft)


@pytest.mark.parametrize("seed", range(RUNS // len(FAMILIES) or 6))
def test_a_random_life_with_quantised_kv(toy: ToyMaker, tmp_path: Path, seed: int) -> None:
    judge = Judge(toy("llama", head_dim=32), kv_bits=8)
    live(toy("llama", head_dim=32), judge, seed, tmp_path, kv_bits=8)


# -- each place ------------------------------------------------------------------------------------


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("place", ["prefill", "decode", "batch", "growth"])
def test_a_pass_that_fails_in_silence_is_computed_again(
    toy: ToyMaker,
    judges: Callable[[str], Judge],
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    delay: int,
) -> None:
    """The client gets the very reply, and so does the next turn, from the cache."""
    once = Once()
    unlucky = Unlucky(toy("llama"), on := FailingDevice(once, delay=delay), None)
    bench, rng = unlucky.bench, np.random.default_rng(3)
    once.when = {
        "prefill": lambda: prefilling(bench, 64),
        "decode": lambda: decoding(bench, 1, 6),
        "batch": lambda: decoding(bench, 4, 6),
        "growth": growing(monkeypatch),
    }[place]
    count = 500 if place == "growth" else 40
    tasks = [bench.put(tokens(rng, 200), tokens=count) for _ in range(4 if place == "batch" else 1)]
    unlucky.run(tasks)
    assert on.failures == 1
    for task in tasks:
        assert isinstance(last(task), Finished)
        judges("llama").check_task(task)
    again(bench, judges("llama"), [[*t.job.prompt.ids.tolist(), *t.out] for t in tasks])


def test_an_error_met_by_a_copy_for_the_disk_does_not_suspend_the_disk(
    toy: ToyMaker,
    judges: Callable[[str], Judge],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The KV may be wrong, not the disk: replies begin again, and the copy is made later."""
    unlucky = Unlucky(toy("llama"), FailingDevice(lambda number: False), tmp_path)
    bench, rng = unlucky.bench, np.random.default_rng(4)
    copied = serialise.copied_run
    raised: list[int] = []

    def fail_once(*args: Any) -> Any:
        if not raised:
            raised.append(1)
            raise RuntimeError(ERRORS[0])
        return copied(*args)

    monkeypatch.setattr(serialise, "copied_run", fail_once)
    task = bench.put(tokens(rng, 1500), tokens=20)
    unlucky.run([task])
    assert raised
    assert task.restarts == 1
    judges("llama").check_task(task)
    assert bench.kv.disk is not None
    assert bench.kv.disk.write_behind.works
    assert bench.kv.close(10.0) == 0


def test_a_restore_that_fails_in_silence_is_made_again(
    toy: ToyMaker, judges: Callable[[str], Judge], tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    ids = tokens(rng, 600)
    before = Bench(toy("llama"))
    before.open_disk(tmp_path)
    before.ask(ids)
    before.kv.close(10.0)
    once, unlucky = failing_once(toy("llama"), tmp_path)
    once.when = lambda: prefilling(unlucky.bench, 0, restoring=True)
    task = unlucky.bench.put([*ids, 5, 6, 7])
    unlucky.run([task])
    assert once.left == 0
    assert task.record.restored_tokens == 600
    judges("llama").check_task(task)
    unlucky.bench.kv.close(1.0)


def test_an_anticipated_turn_that_fails_is_dropped(
    toy: ToyMaker, judges: Callable[[str], Judge]
) -> None:
    once, unlucky = failing_once(toy("llama"))
    bench, rng = unlucky.bench, np.random.default_rng(6)
    ids = tokens(rng, 100)
    unlucky.run([bench.put(ids)])
    turn = token_ids([*ids, *tokens(rng, 200)])
    idle = bench.scheduler.idle_prefill
    idle.add(Prompt(turn), turn[:100])
    once.when = lambda: len(bench.kv.ram.busy) > 0
    with failing(unlucky.on):
        while idle.ready:
            bench.tick()
    bench.check()
    assert once.left == 0
    assert not bench.kv.ram.busy
    task = bench.put([*turn.tolist(), 3, 4])
    unlucky.run([task])
    judges("llama").check_task(task)


def test_a_chunk_that_the_system_ended_is_fed_in_quarters_from_then_on(
    toy: ToyMaker,
    judges: Callable[[str], Judge],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Near its position and beyond, for every prompt; before it, chunks stay as they were."""
    once, unlucky = failing_once(toy("llama"), chunk=256, message=ERRORS[1])
    bench, rng = unlucky.bench, np.random.default_rng(7)
    fed: list[tuple[int, int]] = []
    note_pass = FailingDevice.note_pass

    def noted(on: FailingDevice, caches: Any, before: list[int]) -> None:
        fed.append((before[0], caches[0].offset - before[0]))
        note_pass(on, caches, before)

    monkeypatch.setattr(FailingDevice, "note_pass", noted)
    once.when = lambda: prefilling(bench, 1024)
    for _ in range(2):
        task = bench.put(tokens(rng, 2000), tokens=1)
        unlucky.run([task])
        judges("llama").check_task(task)
        assert max(size for at, size in fed if at < 1024) == 256
        assert {size for at, size in fed if at >= 1280 and size > 1} <= {64, 15, 16, 31, 47, 63}
        fed.clear()
    assert "chunks at or after this position now have at most 64 tokens" in caplog.text


def test_the_third_error_in_a_row_ends_the_scheduler_with_all_work_on_disk(
    toy: ToyMaker, judges: Callable[[str], Judge], tmp_path: Path
) -> None:
    once = Once(times=100)
    unlucky = Unlucky(toy("llama"), FailingDevice(once, message=ERRORS[2]), tmp_path)
    bench, rng = unlucky.bench, np.random.default_rng(8)
    ids = tokens(rng, 800)
    once.when = lambda: prefilling(bench, 640) or once.left < 100
    task = bench.put(ids)
    unlucky.run([task])
    assert unlucky.died
    assert not task.out
    assert bench.kv.close(10.0) == 0
    check_restored(judges("llama"), toy("llama"), tmp_path, ids, 640)


async def test_an_engine_on_a_dead_device_says_so_and_its_sessions_go_on_elsewhere(
    toy: ToyMaker, tmp_path: Path
) -> None:
    """Also where a call from another thread met the error first."""
    always = Once(times=1 << 30)
    on = FailingDevice(always)
    model, talk = toy("llama"), tokens(np.random.default_rng(9), 300)
    with failing(on):
        async with started(model, tmp_path, disk="1GB", no_anticipate=True) as engine:
            await ask(engine, prompt(talk), session="mine")
            assert await engine.book.settled()
            always.when = lambda: True
            with pytest.raises(GenerationFailed, match="died"):
                await ask(engine, prompt(talk, tokens(np.random.default_rng(10), 200)))
            await asyncio.wait_for(engine.dead.wait(), 10)
            assert engine.failure is not None
            assert "Command buffer" in engine.failure
    async with started(model, tmp_path, disk="1GB") as engine:
        done = await ask(engine, prompt(talk, [7, 8, 9]), session="mine")
        assert done.restored_tokens >= 300


async def test_an_error_met_by_a_call_is_met_by_the_requests_too(
    toy: ToyMaker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """MLX raises it once: the scheduler would never hear of it."""

    def fail(runtime: object) -> None:
        raise RuntimeError(ERRORS[0])

    async with started(toy("llama"), tmp_path) as engine:
        running = asyncio.create_task(
            ask(engine, prompt(tokens(np.random.default_rng(11), 50)), tokens=300)
        )
        while not any(record.generated_tokens for record in engine.requests()):
            await engine.call(lambda runtime: None)
        with pytest.raises(RuntimeError, match="Insufficient Memory"):
            await engine.call(fail)
        assert (await running).generated_tokens == 300
    assert "device error (1 in a row)" in caplog.text
