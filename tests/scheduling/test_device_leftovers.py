"""A device that fails in silence: what it leaves behind, and errors on the way to recovery."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.bench.device_faults import ERRORS, FailingDevice, failing
from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.ram import RamTier
from mlxcache.engine.engine import Engine
from mlxcache.model.lineage import Lineage
from mlxcache.model.mlx_lm_format import PromptCacheFile
from mlxcache.model.vision import Rows, Vision
from mlxcache.scheduling.task import Task
from mlxcache.sessions.files import PromptCacheExport
from mlxcache.tree.budget import Budget
from mlxcache.types import Finished, Image, Piece, Text, TokenLogprob, join_ids, token_ids
from tests.conftest import ToyMaker
from tests.engine.running import started
from tests.muse.toy import image
from tests.scheduled import Bench, PlainParser
from tests.scheduling.drafts import make_draft
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
    tokens,
)
from tests.scheduling.test_images import Client, Reference, settings_for, user
from tests.sessions.test_book import ask, prompt

# -- what a failed pass leaves behind --------------------------------------------------------------


async def test_rows_of_an_image_that_failed_are_computed_again(
    toy_muse: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept from chunk to chunk, and the error comes when the first has been fed."""
    once, now = Once(), list[int]()
    rows = Vision.rows

    def noted(vision: Vision, shown: Image) -> Rows:
        now.append(1)
        try:
            return rows(vision, shown)
        finally:
            now.pop()

    engine = Engine(settings_for(toy_muse, tmp_path))
    await engine.start()
    try:
        monkeypatch.setattr(Vision, "rows", noted)
        once.when = lambda: len(now) > 0
        with failing(FailingDevice(once, delay=1)):
            reply = await Client(engine).ask(user("Look: ", image(1, 560, 560), " Well?"))
    finally:
        await engine.stop()
    assert once.left == 0
    assert reply.tokens == Reference(toy_muse).greedy(reply.prompt)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
@pytest.mark.parametrize("after", [0, 6, 11])
def test_nan_of_a_failed_pass_fails_no_request(
    toy: ToyMaker, judges: Callable[[str], Judge], family: str, after: int
) -> None:
    """The model did not produce it: neither the reply nor the cached prefix is given up."""
    once, unlucky = failing_once(toy(family), delay=1, nan=True)
    bench, rng = unlucky.bench, np.random.default_rng(12)
    ids = tokens(rng, 200)
    once.when = lambda: decoding(bench, 1, after) if after else prefilling(bench, 64)
    task = bench.put(ids, tokens=12, marks=[100])
    unlucky.run([task])
    assert once.left == 0
    assert isinstance(last(task), Finished)
    judges(family).check_task(task)


def test_a_token_that_a_parser_cannot_read_is_drawn_again_if_its_pass_failed(
    toy: ToyMaker, judges: Callable[[str], Judge]
) -> None:
    once, unlucky = failing_once(toy("llama"), delay=1)
    bench = unlucky.bench
    prepare = bench.prepare_output

    class Strict(PlainParser):
        def feed(self, token: int) -> list[Piece]:
            if token in (1, 2):  # what is left by the fake
                raise OverflowError(token)
            return super().feed(token)

    bench.prepare_output = lambda task: replace(prepare(task), parser=Strict())  # type: ignore[method-assign]
    once.when = lambda: decoding(bench, 1, 6)
    task = bench.put(tokens(np.random.default_rng(13), 100), tokens=20)
    unlucky.run([task])
    assert once.left == 0
    assert isinstance(last(task), Finished)
    judges("llama").check_task(task)


def test_the_last_token_is_confirmed_where_nothing_is_cached(
    toy: ToyMaker, judges: Callable[[str], Judge]
) -> None:
    once, unlucky = failing_once(toy("llama"), delay=1)
    bench = unlucky.bench
    layout = replace(bench.kv.layout, unknown=("AnotherCache",))
    bench.use(KVCache.open(layout, Budget(1 << 30)))
    once.when = lambda: decoding(bench, 1, 10)  # the pass that draws the last of 12
    task = bench.put(tokens(np.random.default_rng(14), 100), tokens=12)
    unlucky.run([task])
    assert once.left == 0
    judges("llama").check_task(task)


def test_first_tokens_of_rows_that_joined_before_are_confirmed(
    toy: ToyMaker, judges: Callable[[str], Judge]
) -> None:
    """Joining their draws is a computation too, which must not be left to the next pass."""
    once, unlucky = failing_once(toy("llama"))
    bench, rng = unlucky.bench, np.random.default_rng(15)
    once.when = lambda: any(
        lane.batched and not all(task.out for task in lane.tasks)
        for lane in bench.scheduler.lanes.all
    )
    tasks = [bench.put(tokens(rng, 100), tokens=8) for _ in range(3)]
    unlucky.run(tasks)
    assert once.left == 0
    for task in tasks:
        judges("llama").check_task(task)


def test_the_first_log_probability_is_confirmed(toy: ToyMaker) -> None:
    """It is read from the draw by a computation of its own, after the wait for the draw."""
    once, reading = Once(), list[int]()
    unlucky = Unlucky(toy("llama"), FailingDevice(once), None)
    bench = unlucky.bench
    prepare = bench.prepare_output

    def logprob(logprobs: mx.array, tokens: Sequence[int]) -> list[TokenLogprob]:
        reading.append(1)
        (token,) = tokens
        value = logprobs[0, token] * 1
        mx.eval(value)
        reading.pop()
        return [TokenLogprob(str(token), token, value.item())]  # type: ignore[arg-type]

    bench.prepare_output = lambda task: replace(prepare(task), logprob=logprob)  # type: ignore[method-assign]
    ids = tokens(np.random.default_rng(16), 100)

    def read(task: Task) -> list[float]:
        events = task.events  # type: ignore[attr-defined]
        return [one.logprob for e in events if isinstance(e, Text) for one in e.logprobs]

    once.when = lambda: len(reading) > 0
    task = bench.put(ids, tokens=4, top_logprobs=0)
    unlucky.run([task])
    assert once.left == 0
    right = bench.twin().ask(ids, tokens=4, top_logprobs=0)
    assert read(task) == pytest.approx(read(right), abs=1e-3)


def test_a_prompt_cache_file_has_no_byte_that_is_not_confirmed(toy: ToyMaker) -> None:
    """Even of the last array, after which nothing is evaluated that would raise."""
    bench = Bench(toy("llama"))
    ids = bench.ask(tokens(np.random.default_rng(17), 100)).tokens()[:-1]
    lease = bench.kv.acquire(join_ids(ids, ids[-1:]), 1)
    assert lease is not None
    counted = FailingDevice(lambda number: False)
    with failing(counted):
        b"".join(PromptCacheFile(lease.lineage, "toy", ids))
    with (
        failing(FailingDevice(lambda number: number == counted.evaluations - 1, delay=1)),
        pytest.raises(RuntimeError, match="METAL"),
    ):
        b"".join(PromptCacheFile(lease.lineage, "toy", ids))


def test_an_export_waits_for_the_copies_that_its_lease_holds(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later error would be another's, and would not end the export."""
    bench = Bench(toy("llama"))
    ids = bench.ask(tokens(np.random.default_rng(18), 100)).tokens()
    on = FailingDevice(lambda number: False)
    with failing(on):
        monkeypatch.setattr(mx, "synchronize", raising)
        with pytest.raises(RuntimeError, match="METAL"):
            PromptCacheExport(bench.kv, bench.thread, ids, "toy")
    assert not bench.kv.ram.busy


def raising(*_: object) -> None:
    """A wait that meets an error of the device."""
    raise RuntimeError(ERRORS[0])


# -- errors on the way -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_an_error_while_a_lease_is_given_up_leaks_nothing(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    bench = Bench(toy(family))
    lease = bench.kv.acquire(token_ids(range(10, 200)), 10)
    assert lease is not None
    with monkeypatch.context() as patch:
        patch.setattr(Lineage, "sound", raising)
        with pytest.raises(RuntimeError, match="METAL"):
            bench.kv.abandon(lease)
    assert not bench.kv.ram.busy
    bench.check()


@pytest.mark.parametrize("kind", ["kv", "states"])
def test_an_error_while_room_is_made_leaks_no_lineage(
    toy: ToyMaker, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Eviction compacts buffers, and a wait for the disk copies: both use the device."""
    bench = Bench(toy("llama" if kind == "kv" else "qwen3_5"))
    ids = bench.ask(tokens(np.random.default_rng(19), 200), marks=[150]).tokens().tolist()
    reserve = RamTier.reserve

    def failed(ram: RamTier, of: str, size: int, *args: Any, **options: Any) -> bool:
        if of == kind and size > 0:
            raising()
        return reserve(ram, of, size, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(RamTier, "reserve", failed)
        with pytest.raises(RuntimeError, match="METAL"):
            bench.kv.acquire(token_ids([*ids, *ids, *ids]), 600)
    assert not bench.kv.ram.busy
    check_unlocked(bench)
    bench.check()


def test_buffers_of_which_only_some_were_enlarged_are_released(
    toy: ToyMaker, judges: Callable[[str], Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They take more memory than was reserved. `Unlucky.run` checks the budget."""
    once, grows, seen = Once(), growing(monkeypatch), list[int]()
    unlucky = Unlucky(toy("llama"), FailingDevice(once), None)
    bench, ids = unlucky.bench, tokens(np.random.default_rng(20), 100)
    unlucky.run([bench.put(ids)])

    def later() -> bool:
        seen.extend([1] * grows())
        return len(seen) == 4

    once.when = later
    task = bench.put([*ids, *tokens(np.random.default_rng(21), 900)])
    unlucky.run([task])
    assert once.left == 0
    judges("llama").check_task(task)


def test_a_device_that_dies_for_good_leaves_all_committed_work_on_disk(
    toy: ToyMaker, judges: Callable[[str], Judge], tmp_path: Path
) -> None:
    """Not even a wait returns: nothing is evaluated any more on the way to the disk."""
    once = Once()
    on = FailingDevice(once, dies=True)
    unlucky = Unlucky(toy("llama"), on, tmp_path)
    bench, rng = unlucky.bench, np.random.default_rng(22)
    ids = tokens(rng, 800)
    once.when = lambda: prefilling(bench, 640)
    task = bench.put(ids)
    unlucky.run([task])
    assert unlucky.died
    with failing(on):
        bench.scheduler.persist_all()
        assert bench.kv.disk is not None
        assert bench.kv.disk.close(10.0) == 0
    check_restored(judges("llama"), toy("llama"), tmp_path, ids, 640)


def test_an_error_as_the_server_stops_ends_every_request_all_the_same(toy: ToyMaker) -> None:
    once, unlucky = failing_once(toy("llama"))
    bench = unlucky.bench
    task = bench.put(tokens(np.random.default_rng(23), 100), tokens=100)
    once.when = lambda: decoding(bench, 1, 6)
    with failing(unlucky.on):
        bench.run(until=lambda: once.left == 0)
        bench.scheduler.end_all()
    end = last(task)
    assert isinstance(end, Finished)
    assert end.reason == "cancelled"
    bench.check()


def test_a_draft_counts_each_token_that_it_is_fed(toy: ToyMaker, tmp_path: Path) -> None:
    """Its buffers may be copied there and back within one step."""
    draft = make_draft(toy("llama"), tmp_path / "draft", "same")
    bench = Bench(toy("llama"), draft=draft)
    task = bench.put(tokens(np.random.default_rng(24), 50), tokens=30)
    bench.run(until=lambda: decoding(bench, 1, 2))
    lineage = task.held.lineage
    lineage.mark_confirmed()
    bench.tick()
    assert lineage.passes >= 3


async def test_a_request_that_leaves_after_an_error_is_a_turn_of_its_session(
    toy: ToyMaker, tmp_path: Path
) -> None:
    """It has no lease then, but was admitted and answered in part."""
    async with started(toy("llama"), tmp_path, disk="1GB") as engine:
        given = prompt(tokens(np.random.default_rng(25), 50))
        running = asyncio.create_task(ask(engine, given, tokens=2000, session="mine"))
        while not any(record.generated_tokens for record in engine.requests()):
            await engine.call(lambda runtime: None)
        found: list[Task] = await engine.call(lambda runtime: runtime.scheduler.active)

        def leave(runtime: Any) -> None:
            runtime.scheduler.thread.post(lambda: runtime.scheduler.cancel(found[0]))
            raise RuntimeError(ERRORS[0])

        with pytest.raises(RuntimeError, match="Insufficient Memory"):
            await engine.call(leave)
        assert (await running).reason == "cancelled"
        assert await engine.book.settled()
        assert len(await engine.sessions.list()) == 1
