"""Several models in one process: first loads that fail, budgets after them, the end."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import numpy as np
import pytest

from mlxcache.config import Settings
from mlxcache.config.models import ModelEntry
from mlxcache.engine.engine import Engine
from mlxcache.engine.models import Models
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.errors import (
    BadRequest,
    DeadlineExceeded,
    Inconsistent,
    MlxcacheError,
    ModelError,
    NotReady,
    QueueFull,
    SnapshotRefused,
    StoreError,
    TooMany,
)
from mlxcache.model import load
from mlxcache.model.weights import Pace, Weights
from mlxcache.residency.residency import Rounds
from mlxcache.scheduling.scheduler import Scheduler
from mlxcache.types import Arrival, Job, Prompt, Text, Tokens, token_ids
from tests.conftest import ToyMaker


@pytest.fixture
def entries(toy: ToyMaker, tmp_path: Path) -> list[ModelEntry]:
    shutil.copytree(toy("llama", seed=7), tmp_path / "b")
    return [
        ModelEntry(str(toy("llama")), "a"),
        ModelEntry(str(tmp_path / "b"), "b"),
        ModelEntry(str(toy("llama", seed=9)), "c"),
    ]


@asynccontextmanager
async def running(entries: list[ModelEntry], folder: Path, **more: Any) -> AsyncIterator[Models]:
    settings = Settings(ram="300MB", disk="off", cache_dir=folder, models=tuple(entries))
    models = Models(replace(settings, **more))
    await models.start()
    try:
        yield models
    finally:
        await models.stop()


def memory_of(models: Models) -> tuple[int, dict[str, int]]:
    memory = models.figures()["memory"]
    return memory["used_bytes"], {k: n for k, n in memory["kinds"].items() if n}


async def reply(models: Models, name: str) -> int:
    engine = await models.of(name)
    prompt = await engine.render_text("Some text.")
    events = 0
    job = Job(f"req_{time.monotonic_ns()}", prompt, max_tokens=4, raw=True)
    async with await engine.submit(job) as stream:
        async for _ in stream:
            events += 1
    return events


async def saved(models: Models, name: str, folder: Path) -> Path:
    """A snapshot of a session of the model `name`."""
    await reply(models, name)
    listed = await models.sessions.list()
    id = next(one.session.id for one in listed if one.session.model == name)
    export = await models.sessions.files.snapshot(id)
    file = folder / f"{name}.safetensors"
    file.write_bytes(b"".join(export))
    return file


async def test_a_snapshot_goes_to_the_model_of_its_weights_whatever_its_name(
    entries: list[ModelEntry], tmp_path: Path
) -> None:
    """Also to one that was not loaded yet, which is not loaded for it."""
    async with running(entries[:2], tmp_path / "cache", disk="100MB") as models:
        file = await saved(models, "b", tmp_path)
    elsewhere = [entries[0], entries[2], ModelEntry(str(tmp_path / "b"), "renamed")]
    async with running(elsewhere, tmp_path / "other", disk="100MB") as models:
        made = await models.sessions.files.restore(file)
        assert (made.session.model, made.tier) == ("renamed", "disk")
        assert models.named("renamed").state != "ready"
        await models.of("renamed")
        (listed,) = await models.sessions.list()
        assert (listed.session.id, listed.session.model) == (made.session.id, "renamed")
    (tmp_path / "b" / "config.json").write_text('{"model_type": "unknown"}')
    here = r"those here are a \(\w{8}\), b \(cannot be loaded\), c \(\w{8}\)"
    async with running(entries, tmp_path / "none", disk="100MB") as models:
        with pytest.raises(SnapshotRefused, match=here):
            await models.sessions.files.restore(file)


@pytest.mark.parametrize("disk", ["off", "100MB"])
async def test_a_model_under_two_names_has_its_sessions_once(
    entries: list[ModelEntry], tmp_path: Path, disk: str
) -> None:
    """With what both have in RAM. Without a disk tier, each name has sessions of its own."""
    twice = [entries[0], ModelEntry(entries[0].model, "again")]
    async with running(twice, tmp_path / "cache", disk=disk) as models:
        sizes = []
        for name in ("a", "again"):
            await reply(models, name)
            sizes.append([one.ram.nbytes for one in await models.sessions.list()])
        if disk == "off":
            assert sizes == [[sizes[0][0]], [sizes[0][0]] * 2]
        else:
            assert sizes == [[sizes[0][0]], [2 * sizes[0][0]]]
        for listed in await models.sessions.list():
            await models.sessions.delete(listed.session.id)
        figures = models.figures()["models"]
        assert [one["kv_bytes"] for one in figures] == [0, 0]


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def short_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-5000])


def no_folder(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("damage", [no_tokenizer, short_weights, no_folder])
async def test_a_bad_folder_fails_requests_until_it_is_mended(
    entries: list[ModelEntry], tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "b", whole)
    async with running(entries, tmp_path / "cache") as models:
        assert await reply(models, "a")
        damage(tmp_path / "b")
        before = memory_of(models)
        for _ in range(2):
            asked = [asyncio.create_task(reply(models, "b")) for _ in range(3)]
            for task in asked:
                with pytest.raises(ModelError):
                    await task
            assert memory_of(models) == before
        assert await reply(models, "a")
        shutil.copytree(whole, tmp_path / "b", dirs_exist_ok=True)
        assert await reply(models, "b")
        assert models.named("b").state == "ready"


async def test_what_hinders_a_first_load_is_logged_at_the_start(
    entries: list[ModelEntry], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A model whose folder is missing or damaged; the others show what their weights take."""
    short_weights(tmp_path / "b")
    entries = [*entries, ModelEntry(str(tmp_path / "d"), "d")]
    with caplog.at_level("WARNING"):
        async with running(entries, tmp_path / "cache") as models:
            never = {one["label"]: one for one in models.describe()[1:]}
            assert {one["state"] for one in never.values()} == {"never"}
            assert never["c"]["weights_bytes"] > 500_000
            assert never["b"]["weights_bytes"] is never["d"]["weights_bytes"] is None
            with pytest.raises(ModelError):
                await reply(models, "d")
    said = [one.getMessage() for one in caplog.records if "cannot be loaded" in one.getMessage()]
    assert [one.split(":")[0] for one in said] == ["model b", "model d", "model d"]
    assert f"There is no folder {tmp_path / 'd'}." in said[1]


@pytest.mark.parametrize("step", ["_max_context", "_open_cache", "_open_book"])
async def test_memory_is_released_whatever_step_of_a_load_fails(
    entries: list[ModelEntry], tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise StoreError("It cannot be opened.")

    async with running(entries, tmp_path / "cache") as models:
        before = memory_of(models)
        with monkeypatch.context() as patch:
            patch.setattr(ModelRuntime, step, fails)
            with pytest.raises(MlxcacheError):
                await reply(models, "b")
        assert memory_of(models) == before
        assert await reply(models, "b")


async def test_requests_at_once_load_a_model_once(
    entries: list[ModelEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    whole = load.load

    def counted(spec: load.ModelSpec, **given: Any) -> load.Loaded:
        loads.append(str(spec.id))
        return whole(spec, **given)

    async with running(entries, tmp_path / "cache") as models:
        monkeypatch.setattr(load, "load", counted)
        assert all(await asyncio.gather(*(reply(models, "b") for _ in range(4))))
        assert len(loads) == 1


async def test_replies_go_on_while_another_model_is_loaded_for_the_first_time(
    entries: list[ModelEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are read in parts, with replies of the other model in between."""
    seen: list[tuple[int, dict[str, Any]]] = []
    read = Weights.read

    def noted(self: Weights) -> Iterator[int]:
        for done in read(self, Pace(100_000, 100_000)):
            seen.append((record.generated_tokens, models.describe()[1]))
            yield done

    async with running(entries, tmp_path / "cache") as models:
        monkeypatch.setattr(Weights, "read", noted)
        a = models.default
        job = Job("req_a", await a.render_text("Some text."), max_tokens=2000, raw=True)
        async with await a.submit(job) as stream:
            record = stream.record
            events = aiter(stream)
            while record.generated_tokens < 5:
                await anext(events)
            asked = asyncio.create_task(reply(models, "b"))
            while not asked.done():
                await anext(events)
            assert await asked
    written = [tokens for tokens, _ in seen]
    assert len(seen) > 3
    assert len(set(written)) > 3
    shares = [one["progress"] for _, one in seen]
    assert {one["state"] for _, one in seen} == {"loading"}
    assert shares[1:] == sorted(shares[1:])
    assert 0 < shares[1] < shares[-1] < 1


async def test_the_least_memory_of_several_models_includes_the_weights(
    entries: list[ModelEntry], tmp_path: Path
) -> None:
    """What the error names is enough."""
    weights = load.estimate_bytes(load.ModelSpec(str(entries[0].model)))
    ram = weights + 3_000_000
    with pytest.raises(ModelError, match=r"^--ram \d+ .* set at least \d+MB$") as raised:
        async with running(entries, tmp_path / "cache", ram=ram):
            pass
    least = int(str(raised.value).rpartition(" ")[2].removesuffix("MB")) * 10**6
    assert least > weights
    async with running(entries, tmp_path / "cache", ram=least) as models:
        assert await reply(models, "a")


async def test_a_model_takes_no_more_than_its_share(
    entries: list[ModelEntry], tmp_path: Path
) -> None:
    """Its weights and its KV together; what it needs more evicts its own KV alone."""
    entries[1:] = [replace(entries[1], ram="4%"), replace(entries[2], ram="1MB")]
    async with running(entries, tmp_path / "cache") as models:
        a, b = [await models.of(name) for name in ("a", "b")]
        assert b.info is not None
        length = b.info.context_length // 2
        assert await reply(models, "a")
        kept = await a.call(lambda runtime: runtime.kv.tree.tokens)
        most = await b.call(lambda runtime: runtime.kv.budget.limit)
        assert b.residence is not None
        assert most == 12_000_000 - b.residence["weights_bytes"]
        for n in range(4):
            ids = token_ids(np.random.default_rng(n).integers(10, 400, length, np.int32))
            job = Job(f"req_{n}", Prompt(ids), max_tokens=1, raw=True)
            async with await b.submit(job) as stream:
                assert [event async for event in stream]
            assert await b.call(lambda runtime: runtime.kv.budget.used) <= most
        assert await b.call(lambda runtime: runtime.kv.ram.dropped)
        assert await a.call(lambda runtime: runtime.kv.tree.tokens) == kept
        with pytest.raises(BadRequest, match=r"ram = 1MB of the model c .* set at least \d+MB$"):
            await reply(models, "c")


@pytest.mark.slow
async def test_a_long_prompt_gets_the_memory_of_a_model_that_always_has_requests(
    entries: list[ModelEntry], tmp_path: Path
) -> None:
    """That model goes on afterwards, and its replies are the same as before."""
    made: dict[int, list[str]] = {}

    async def ask(engine: Engine, ids: Tokens, name: str) -> list[str]:
        job = Job(name, Prompt(ids), max_tokens=4, raw=True)
        async with await engine.submit(job) as stream:
            return [event.text async for event in stream if isinstance(event, Text)]

    async def ask_on(engine: Engine, client: int) -> None:
        for number in count():
            rng = np.random.default_rng(number % 3 * 100 + client)
            ids = token_ids(rng.integers(10, 400, 50, np.int32))
            said = await ask(engine, ids, f"req_{client}_{number}")
            assert said == made.setdefault(number % 3 * 100 + client, said)

    async with running(entries[:2], tmp_path / "cache", ram="16MB", disk="100MB") as models:
        a, b = [await models.of(name) for name in ("a", "b")]
        assert a.info is not None
        length = int(0.95 * a.info.context_length)
        clients = [asyncio.create_task(ask_on(b, client)) for client in range(16)]
        await asyncio.sleep(1)
        for number in range(2):
            ids = token_ids(np.random.default_rng(number).integers(10, 400, length, np.int32))
            async with asyncio.timeout(180):
                await ask(a, ids, f"req_long_{number}")
            assert b.residence is not None
            assert b.residence["unloads"] == number + 1
            await ask(b, ids[:50], f"req_after_{number}")
        assert not any(client.done() for client in clients)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> tuple[Event, Event]:
    """Events: the load of a further model has begun; it may go on."""
    begun, may_go = Event(), Event()
    whole = load.load

    def waits(spec: load.ModelSpec, **given: Any) -> load.Loaded:
        if spec.id == "b":
            begun.set()
            assert may_go.wait(30)
        return whole(spec, **given)

    monkeypatch.setattr(load, "load", waits)
    return begun, may_go


async def test_a_stop_while_a_model_loads_ends_the_thread(
    entries: list[ModelEntry], tmp_path: Path, slow: tuple[Event, Event]
) -> None:
    begun, may_go = slow
    async with running(entries, tmp_path / "cache", disk="auto") as models:
        asked = asyncio.create_task(reply(models, "b"))
        await asyncio.to_thread(begun.wait, 30)
        asyncio.get_running_loop().call_later(0.3, may_go.set)
        began = time.monotonic()
        await models.stop(5.0)
        assert time.monotonic() - began < 4
        thread = models._rounds.thread
        thread.join(1)
        assert not thread.alive
        with pytest.raises((NotReady, asyncio.CancelledError)):
            await asked
        assert (await models.of("c")) is models.default  # nothing is loaded any more


async def test_a_stop_ends_a_start_whose_weights_are_being_read(
    entries: list[ModelEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, read = Event(), Weights.read

    def slowly(self: Weights) -> Iterator[int]:
        for done in read(self, Pace(1, 1)):
            begun.set()
            time.sleep(0.05)
            yield done

    monkeypatch.setattr(Weights, "read", slowly)
    models = Models(Settings(disk="off", cache_dir=tmp_path, models=tuple(entries[:1])))
    starting = asyncio.create_task(models.start())
    await asyncio.to_thread(begun.wait, 30)
    await models.stop()
    with pytest.raises(NotReady):
        await asyncio.wait_for(starting, 10)


async def test_a_stop_in_the_last_step_of_a_start_closes_the_runtime(
    entries: list[ModelEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step does not look for a stop again, and the stop has found no runtime."""
    loop, add, close, closed = asyncio.get_running_loop(), Rounds.add, ModelRuntime.close, Event()

    def stopped_meanwhile(rounds: Rounds, scheduler: Scheduler) -> None:
        asyncio.run_coroutine_threadsafe(models.stop(), loop).result(10)
        add(rounds, scheduler)

    def noted(runtime: ModelRuntime, *, died: bool) -> None:
        close(runtime, died=died)
        closed.set()

    monkeypatch.setattr(Rounds, "add", stopped_meanwhile)
    monkeypatch.setattr(ModelRuntime, "close", noted)
    models = Models(Settings(disk="off", cache_dir=tmp_path, models=tuple(entries[:1])))
    with pytest.raises(NotReady):
        await models.start()
    assert await asyncio.to_thread(closed.wait, 10)


async def test_requests_that_wait_for_a_first_load_are_listed_and_bounded(
    entries: list[ModelEntry], tmp_path: Path, slow: tuple[Event, Event]
) -> None:
    """As those that wait in a queue are; one that goes makes room for another."""
    begun, may_go = slow
    async with running(entries, tmp_path / "cache", queue=4) as models:

        def ask(n: int, session: str | None = None) -> asyncio.Task[Any]:
            return asyncio.create_task(models.of("b", Arrival(f"req_{n}", "chat", session)))

        asked = [ask(n, f"session {n // 2}") for n in range(4)]
        await asyncio.to_thread(begun.wait, 30)
        assert [(r.id, r.status, r.model) for r in models.requests()] == [
            (f"req_{n}", "queued", "b") for n in (3, 2, 1, 0)
        ]
        assert models.figures()["queue"]["waiting"] == 4
        assert models.describe()[1]["state"] == "loading"
        with pytest.raises(QueueFull, match="4 requests wait already until b is loaded") as full:
            await ask(9)
        assert full.value.retry_after >= 1
        asked[0].cancel()
        await asyncio.wait({asked[0]})
        with pytest.raises(TooMany, match="2 requests of this session"):
            await ask(8, "session 1")
        asked.append(ask(7))
        await asyncio.sleep(0)
        may_go.set()
        engine = models.named("b")
        assert await asyncio.gather(*asked[1:]) == 4 * [engine]
        # none is left but the one that went; a request makes its record when it is submitted
        assert [(r.id, r.status) for r in models.requests()] == [("req_0", "cancelled")]
        prompt = await engine.render_text("Some text.")
        job = Job("req_1", prompt, max_tokens=2, raw=True, loaded_s=2.5)
        async with await engine.submit(job) as stream:
            assert [event async for event in stream]
        timing = stream.record.timing
        assert timing["queue_s"] >= 2.5
        assert timing["first_token_s"] >= 2.5


async def test_a_load_that_nobody_waits_for_any_more_takes_no_memory(
    entries: list[ModelEntry], tmp_path: Path
) -> None:
    """It would unload other models as soon as they are idle. The next request loads it."""
    entries[0] = replace(entries[0], keep="always")
    async with running(entries, tmp_path / "cache") as models:
        memory = models._memory
        assert memory is not None
        free = memory.free
        memory.charge("other", free)
        asked = asyncio.create_task(models.of("b"))
        b = models.named("b")
        while not b.first_load.awaits_room:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        assert b.load_share is None
        asked.cancel()
        await asyncio.wait({asked})
        again = asyncio.create_task(models.of("b"))  # at once, while the load is given up
        await asyncio.sleep(0.05)
        again.cancel()
        await asyncio.wait({again})
        while b.first_load.state == "loading":  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
        memory.charge("other", -free)
        before = memory_of(models)
        assert models.describe()[1]["state"] == "never"
        await models.default.call(lambda runtime: None)
        assert memory_of(models) == before
        assert not models._rounds.residency.busy
        assert await reply(models, "b")


async def test_a_request_waits_for_a_load_no_longer_than_its_time_limit(
    entries: list[ModelEntry], tmp_path: Path, slow: tuple[Event, Event]
) -> None:
    _, may_go = slow
    async with running(entries, tmp_path / "cache") as models:
        with pytest.raises(DeadlineExceeded, match=r"0\.2 s: its model b is still being loaded"):
            await models.of("b", Arrival("req_1", "chat", timeout_s=0.2))
        assert models.requests()[0].status == "rejected"
        may_go.set()
        assert await reply(models, "b")


async def test_a_load_is_no_sign_of_a_stalled_device(
    entries: list[ModelEntry], tmp_path: Path, slow: tuple[Event, Event]
) -> None:
    begun, may_go = slow
    async with running(entries, tmp_path / "cache") as models:
        asked = asyncio.create_task(reply(models, "b"))
        await asyncio.to_thread(begun.wait, 30)
        await asyncio.sleep(0.1)
        assert models.default.silent_s == 0
        may_go.set()
        assert await asked


async def test_no_other_model_is_loaded_before_the_default_one(
    entries: list[ModelEntry], tmp_path: Path
) -> None:
    settings = Settings(
        ram="300MB", disk="off", cache_dir=tmp_path / "cache", models=tuple(entries)
    )
    models = Models(settings)
    assert (await models.of("b")) is models.default
    await models.start()
    assert (await models.of("b")) is models.named("b")
    await models.stop()


async def test_every_loaded_model_is_closed_when_the_thread_dies(
    entries: list[ModelEntry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those after a model that was never loaded."""
    closed: list[str] = []
    close = ModelRuntime.close

    def noted(self: ModelRuntime, *, died: bool) -> None:
        closed.append(self.info.id)
        close(self, died=died)

    monkeypatch.setattr(ModelRuntime, "close", noted)
    async with running(entries, tmp_path / "cache") as models:
        assert await reply(models, "c")

        def dies() -> None:
            raise Inconsistent("on purpose")

        models._rounds.thread.post(dies)
        await asyncio.wait_for(models.default.dead.wait(), 10)
        models._rounds.thread.join(10)
        assert sorted(set(closed)) == ["a", "c"]
        assert (await models.of("b")) is models.default
