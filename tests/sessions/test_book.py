"""Sessions of a real engine: booked, measured in both tiers, forked, removed, carried over."""

from __future__ import annotations

import asyncio
import json
import os
import time
from contextlib import suppress

import mlx.core as mx
import numpy as np
import pytest

from mlxcache.engine.engine import Engine
from mlxcache.errors import (
    BadRequest,
    NotFound,
    SnapshotRefused,
    StoreError,
    Unsupported,
)
from mlxcache.sessions import journal as booking
from mlxcache.store.leaves import LeafRow
from mlxcache.store.listing import Listed
from mlxcache.store.sessions import Sessions, Turn
from mlxcache.store.store import MOST_LEAVES_READ
from mlxcache.types import WARMING, Finished, Job, Prompt, Tokens, token_ids
from tests.engine.running import started
from tests.tree.check import check_tree

HEAD = 40


def text(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(100, 400, tokens).tolist()


def prompt(*parts: list[int], head: int = HEAD) -> Prompt:
    """A prompt of a head and messages, each of which begins at a mark."""
    ids = text(0, head)
    marks = []
    for part in parts:
        marks.append(len(ids))
        ids = ids + part
    return Prompt(token_ids(ids), tuple(mark for mark in marks if mark))


async def ask(engine: Engine, given: Prompt, tokens: int = 8, **more: object) -> Finished:
    job = Job(f"req_{time.monotonic_ns()}", given, max_tokens=tokens, raw=True, **more)  # type: ignore[arg-type]
    async for event in await engine.submit(job):
        if isinstance(event, Finished):
            return event
    raise AssertionError("it did not finish")


@pytest.fixture(params=["llama", "qwen3_5"])
async def engine(request, toy, tmp_path):
    """One with and one without layers that cannot be sliced."""
    async with started(toy(request.param), tmp_path, disk="1GB") as running:
        yield running


async def test_a_request_without_a_label_is_listed_with_its_session(engine: Engine):
    """Two conversations at once, each with two turns; a label is listed as it came."""
    for turn in range(2):
        for seed in (1, 2):
            talk = [text(10 * seed + n, 60) for n in range(2 + turn)]
            await ask(engine, prompt(*talk), title=f"Talk {seed}")
    await ask(engine, prompt(text(3, 60), text(4, 10)), session="mine", title="Talk 3")
    for record in engine.requests():
        assert (await engine.request(record.id)) is not None  # waits until it is written
    titles = {one.session.id: one.session.title for one in await engine.sessions.list()}
    assert len(titles) == 3
    listed = [record.session or "" for record in reversed(engine.requests())]
    assert [titles.get(id) for id in listed] == ["Talk 1", "Talk 2", "Talk 1", "Talk 2", None]
    assert listed[-1] == "mine"


async def main_ids(engine: Engine, one: Listed) -> list[int]:
    return (await engine.book.info(one.session.id)).leaves[0].ids.tolist()


async def durable(engine: Engine, id: str) -> int:
    assert await engine.book.settled()
    return (await engine.sessions.get(id)).as_object()["durable_tokens"]


async def test_a_turn_is_in_the_list_when_its_reply_is_over(engine: Engine):
    """With its figures in both tiers; all of it is durable soon."""
    given = prompt(text(1, 200), text(2, 10))
    await ask(engine, given, session="mine", client="cli/1", title="Fix it")
    [listed] = await engine.sessions.list()
    found = listed.as_object(leaves=True)
    assert found["tokens"] in (len(given.ids) + 7, len(given.ids) + 8)
    assert found["ram_bytes"] > 0
    assert (found["label"], found["title"], found["client"]) == ("mine", "Fix it", "cli/1")
    assert (found["turns"], found["agents"], engine.figures()["sessions"]) == (1, 0, 1)
    assert await durable(engine, found["id"]) == found["tokens"]
    found = (await engine.sessions.get(found["id"])).as_object(leaves=True)
    assert found["tier"] == "both"
    assert found["leaves"][0]["ram_tokens"] == found["tokens"]
    assert found["disk_bytes"] > 0


async def test_a_list_reads_the_tokens_of_no_session_that_is_as_it_was(engine, monkeypatch):
    """Of twelve sessions with one system prompt only the one with a new turn is read again."""
    given = [prompt(text(1, 200), text(n, 200)) for n in range(2, 14)]
    for n, one in enumerate(given):
        await ask(engine, one, session=f"s{n}")
    assert await engine.book.settled()
    first = await engine.sessions.list()
    read: list[str] = []
    ids_of = Sessions.ids_of

    def noting(self: Sessions, leaf: LeafRow) -> Tokens:
        read.append(leaf.session)
        return ids_of(self, leaf)

    monkeypatch.setattr(Sessions, "ids_of", noting)
    assert await engine.sessions.list() == first
    assert read == []
    await ask(engine, prompt(text(1, 200), text(4, 200), text(20, 30)), session="s2")
    assert await engine.book.settled()
    newest, *others = await engine.sessions.list()
    assert set(read) == {newest.session.id}
    assert newest.tier == "both"
    assert others == [one for one in first if one.session.id != newest.session.id]


async def test_the_files_of_a_turn_are_known_before_it_is_listed(toy, tmp_path, monkeypatch):
    """A few seconds after it, so that the first list reads no token ids for the disk."""
    monkeypatch.setattr(booking, "FILES_S", 0.05)

    def unread(leaf: LeafRow) -> Tokens:
        raise StoreError(f"{leaf} is read")

    async with started(toy("llama"), tmp_path, disk="1GB") as engine:
        store = engine.book.store
        assert store is not None
        for _ in range(2):  # the second time, all files are there already
            for n in range(3):
                await ask(engine, prompt(text(n, 80)), session=f"s{n}")
            assert await engine.book.settled()
        listed = Sessions(store.database).listed(await engine.sessions.rows())
        end = time.monotonic() + 20
        while True:
            with suppress(StoreError):
                found = store.on_disk(listed, unread)
                break
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
        assert [one.disk.tokens[0] > 100 for one in found] == [True] * 3


async def test_a_session_that_changes_while_it_is_listed_is_listed_as_it_is_then(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask(engine, prompt(text(1, 100)), session="mine")
    ids_of, turns = Sessions.ids_of, iter([True])

    def after_a_turn(self, leaf):
        if next(turns, False):
            self.record_turn(Turn(engine.book.namespace, "m", longer, 250, 140, HEAD, 9e9, "mine"))
        return ids_of(self, leaf)

    longer = token_ids([*text(0, HEAD), *text(1, 100), *text(2, 120)])
    monkeypatch.setattr(Sessions, "ids_of", after_a_turn)
    [listed] = await engine.sessions.list()
    assert (listed.session.turns, listed.leaves[0].tokens) == (2, len(longer))


async def test_what_is_warmed_or_refused_is_no_turn(engine: Engine):
    """Nor what is asked again in another words."""
    await ask(engine, prompt(text(1, 100)), api=WARMING)
    assert await engine.sessions.list() == []


async def test_a_cancelled_request_is_a_turn_of_its_session(engine: Engine):
    """What it computed is kept, so it is shown."""
    stream = await engine.submit(Job("req_1", prompt(text(1, 100), text(2, 5)), session="s"))
    async for event in stream:
        if not isinstance(event, Finished):
            await stream.aclose()
    [listed] = await engine.sessions.list()
    assert listed.session.turns == 1


async def test_sessions_outlive_the_process(toy, tmp_path):
    """Under the same id, on disk and not in RAM; the next turn belongs to it."""
    model, given = toy("llama"), prompt(text(1, 300), text(2, 10))
    async with started(model, tmp_path, disk="1GB") as engine:
        await ask(engine, given, session="mine")
        [before] = await engine.sessions.list()
        await engine.sessions.patch(before.session.id, name="kept", pinned=True)
    async with started(model, tmp_path, disk="1GB") as engine:
        [after] = await engine.sessions.list()
        assert after.session.id == before.session.id
        assert (after.session.name, after.session.pinned) == ("kept", True)
        assert (after.ram.nbytes, after.tier) == (0, "disk")
        assert after.disk.tokens == (before.leaves[0].tokens,)
        again = prompt(text(1, 300), text(2, 10), text(3, 20))
        last = await ask(engine, again, session="mine")
        assert last.restored_tokens >= 300
        [now] = await engine.sessions.list()
        assert (now.session.id, now.session.turns) == (before.session.id, 2)


@pytest.mark.parametrize("most", [MOST_LEAVES_READ, 0])
async def test_removing_a_session_cuts_what_nobody_else_needs(engine: Engine, monkeypatch, most):
    """From RAM and from disk, there by whole files; what others share stays, and so do forks."""
    monkeypatch.setattr("mlxcache.store.store.MOST_LEAVES_READ", most)
    begin, two = prompt(text(1, 256)), prompt(text(2, 256))
    await ask(engine, begin, session="one")
    one = prompt(text(1, 256), text(3, 256))
    await ask(engine, one, session="one")
    await ask(engine, two, session="two")
    first, second = (x.session.id for x in await engine.sessions.list())
    assert await durable(engine, first) > 256
    fork = await engine.sessions.fork(second, tokens=150)
    await engine.sessions.delete(second)
    left = {x.session.id: x for x in await engine.sessions.list()}
    assert set(left) == {first, fork.session.id}
    assert left[first].tier == "both"
    assert left[first].disk.tokens == (left[first].leaves[0].tokens,)

    assert await engine.call(lambda runtime: runtime.kv.match(one.ids)) == 150
    await engine.sessions.delete(fork.session.id)
    assert await engine.call(lambda runtime: runtime.kv.match(one.ids)) == HEAD
    store = engine.book.store
    assert store is not None
    assert HEAD <= store.find(one.ids, touch=False).length <= len(begin.ids)
    heads = store.find(two.ids, touch=False).checkpoints
    assert [saved.position for saved in heads][:1] in ([], [HEAD])
    assert bool(heads) == await engine.call(lambda core: core.layout.opaque)
    await engine.sessions.delete(first)
    assert await engine.call(lambda runtime: runtime.kv.match(two.ids)) == 0
    assert most == 0 or store.stats().runs == store.stats().checkpoints == 0
    with pytest.raises(NotFound):
        await engine.sessions.delete(first)
    await engine.call(lambda core: check_tree(core.kv.tree))


async def test_what_was_removed_is_written_again_when_it_comes_again(engine: Engine):
    for _ in range(2):
        await ask(engine, prompt(text(1, 256)), session="one")
        [listed] = await engine.sessions.list()
        assert await durable(engine, listed.session.id) == listed.leaves[0].tokens
        await engine.sessions.delete(listed.session.id)


async def test_clearing_empties_both_tiers(engine: Engine):
    """And spares what is pinned on disk, unless told."""
    for seed in (1, 2):
        await ask(engine, prompt(text(seed, 256)), session=str(seed))
    pinned = (await engine.sessions.list())[0].session.id
    await durable(engine, pinned)
    await engine.sessions.patch(pinned, pinned=True)
    done = await engine.sessions.clear()
    assert done["sessions"] == 1
    assert done["freed_bytes"] > 0
    [left] = await engine.sessions.list()
    assert (left.session.id, left.ram.nbytes) == (pinned, 0)
    assert left.disk.tokens == (left.leaves[0].tokens,)
    assert (await engine.sessions.clear(pinned=True))["sessions"] == 1
    assert await engine.sessions.list() == []
    assert engine.book.store.stats().runs == 0  # type: ignore[union-attr]
    assert (await ask(engine, prompt(text(1, 256)))).cached_tokens == 0


async def test_a_snapshot_goes_on_in_another_folder(toy, tmp_path):
    """Under its own id, and under a new one where that is taken; other models refuse it."""
    model, given = toy("llama"), prompt(text(1, 300), text(2, 10))
    file = tmp_path / "snapshot"
    async with started(model, tmp_path / "a", disk="1GB") as engine:
        await ask(engine, given, session="mine", title="T")
        [listed] = await engine.sessions.list()
        made = await engine.sessions.files.snapshot(listed.session.id)
        file.write_bytes(b"".join(await asyncio.to_thread(list, made)))
        assert file.stat().st_size == made.nbytes
        again = await engine.sessions.files.restore(file, "copy")
        assert again.session.id != listed.session.id
        assert (again.session.name, again.session.label) == ("copy", None)
    async with started(model, tmp_path / "b", disk="1GB") as engine:
        there = await engine.sessions.files.restore(file)
        assert there.session.id == listed.session.id
        assert (there.session.label, there.session.title) == ("mine", "T")
        last = await ask(engine, prompt(text(1, 300), text(2, 10), text(3, 9)), session="mine")
        assert last.restored_tokens >= 300
        assert (await engine.sessions.get(there.session.id)).session.turns == 2
    async with started(toy("qwen3_5"), tmp_path / "b", disk="1GB") as engine:
        assert [x.session.id for x in await engine.sessions.list()] == [listed.session.id]
        with pytest.raises(SnapshotRefused):
            await engine.sessions.files.restore(file)


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_5"])
async def test_mlx_lm_continues_a_session_from_its_prompt_cache(toy, tmp_path, family):
    """With the tokens that this engine says; the session itself goes on as before."""
    from mlx_lm import load
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import load_prompt_cache

    model, file = toy(family), tmp_path / "cache.safetensors"
    more = text(3, 20)
    async with started(model, tmp_path / "a", disk="1GB") as engine:
        await ask(engine, prompt(text(1, 200), text(2, 10)), session="mine")
        [listed] = await engine.sessions.list()
        made = await engine.sessions.files.prompt_cache(listed.session.id)
        file.write_bytes(b"".join(await asyncio.to_thread(list, made)))
        assert file.stat().st_size == made.nbytes
        ids = await main_ids(engine, listed)
        stream = await engine.submit(
            Job("r", Prompt(token_ids(ids + more)), max_tokens=10, raw=True)
        )
        async for _ in stream:
            pass
        newest = (await engine.sessions.list())[0]
        ours = (await main_ids(engine, newest))[len(ids + more) :]
        assert await engine.call(lambda core: len(core.kv.ram.busy)) == 0
        await engine.call(lambda core: check_tree(core.kv.tree))
    loaded, _ = load(str(model))
    steps = generate_step(
        mx.array(more), loaded, max_tokens=10, prompt_cache=load_prompt_cache(str(file))
    )
    assert [int(token) for token, _ in steps][: len(ours)] == ours
    assert len(ours) >= 9


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
async def test_a_prompt_cache_of_mlx_lm_is_gone_on_with(toy, tmp_path, family):
    """Warm where the model agrees with it, computed where it does not, refused without a prompt."""
    from mlx_lm import load
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache, save_prompt_cache

    model, file = toy(family), tmp_path / "cache.safetensors"
    loaded, _ = load(str(model))
    ids, other = text(1, 300), text(2, 300)
    cache = make_prompt_cache(loaded)
    for _ in generate_step(mx.array(ids), loaded, max_tokens=0, prompt_cache=cache):
        pass
    save_prompt_cache(str(file), cache, {"model": str(model), "tokenizer_config": "{}"})
    async with started(model, tmp_path / "a", disk="off") as engine:
        restore = engine.sessions.files.restore
        with pytest.raises(BadRequest, match="--prompt"):
            await restore(file)
        made = await restore(file, "mine", json.dumps(ids))
        assert await main_ids(engine, made) == ids
        assert (made.session.name, made.session.turns) == ("mine", 0)
        assert made.ram.tokens == (300,)
        last = await ask(engine, Prompt(token_ids(ids + text(3, 10)), (100,)))
        assert last.cached_tokens == 300
        [now] = await engine.sessions.list()
        reply = (await main_ids(engine, now))[310:]
        wrong = await restore(file, "other", json.dumps(other))
        assert wrong.ram.tokens == (300,)
        await engine.call(lambda core: check_tree(core.kv.tree))
    async with started(model, tmp_path / "b", disk="off") as engine:
        await ask(engine, Prompt(token_ids(ids + text(3, 10)), (100,)))
        [cold] = await engine.sessions.list()
        assert (await main_ids(engine, cold))[310:] == reply
        await ask(engine, Prompt(token_ids(other + text(3, 10)), (100,)))


async def test_a_prompt_cache_that_nobody_reads_holds_nothing(toy, tmp_path):
    """Also where the reader leaves in the middle."""
    async with started(toy("llama"), tmp_path, disk="1GB") as engine:
        await ask(engine, prompt(text(1, 200)), session="mine")
        [listed] = await engine.sessions.list()
        for parts in (0, 1):
            made = await engine.sessions.files.prompt_cache(listed.session.id)
            reading = iter(made)
            if parts:
                await asyncio.to_thread(next, reading)
            assert await engine.call(lambda core: len(core.kv.ram.busy)) == 1
            del made, reading
            async with asyncio.timeout(5):  # another thread may refer to them for a moment
                while await engine.call(lambda core: len(core.kv.ram.busy)) > 0:
                    pass


async def test_without_a_disk_there_are_sessions_and_no_snapshots(toy, tmp_path):
    """Nothing of them reaches the folder."""
    async with started(toy("llama"), tmp_path, disk="off") as engine:
        await ask(engine, prompt(text(1, 100)), session="mine")
        [listed] = await engine.sessions.list()
        assert (listed.tier, listed.disk.nbytes) == ("ram", 0)
        await engine.sessions.patch(listed.session.id, pinned=True)
        with pytest.raises(Unsupported):
            await engine.sessions.files.snapshot(listed.session.id)
        await engine.sessions.delete(listed.session.id)
        assert (await ask(engine, prompt(text(1, 100)))).cached_tokens == 0
    assert not list(tmp_path.rglob("*.sqlite"))


async def test_a_pinned_session_stays_pinned_as_it_grows(toy, tmp_path, monkeypatch):
    """Also after a restart."""
    monkeypatch.setattr(booking, "FILES_S", 0.05)
    model = toy("llama")
    async with started(model, tmp_path, disk="1GB") as engine:
        await ask(engine, prompt(text(1, 256)), session="mine")
        [listed] = await engine.sessions.list()
        await durable(engine, listed.session.id)
        await engine.sessions.patch(listed.session.id, pinned=True)
        store = engine.book.store
        assert store is not None
        before = store.stats().pinned_bytes
        assert before > 0
        await ask(engine, prompt(text(1, 256), text(2, 256)), session="mine")
        await durable(engine, listed.session.id)
        await ask(engine, prompt(text(1, 256), text(2, 256)), session="mine")
        end = time.monotonic() + 5
        while store.stats().pinned_bytes <= before:
            assert time.monotonic() < end
            await asyncio.sleep(0.02)
    async with started(model, tmp_path, disk="1GB") as engine:
        store = engine.book.store
        assert store is not None
        assert store.stats().pinned_bytes > before
        await engine.sessions.patch(listed.session.id, pinned=False)
        assert store.stats().pinned_bytes == 0


@pytest.mark.slow
async def test_rows_of_sessions_keep_the_cap(toy, tmp_path):
    """Token ids take room on disk too: files go for them, or they are not kept."""
    folder, limit = tmp_path / "store", 5_000_000
    async with started(toy("llama"), tmp_path, disk=str(limit)) as engine:
        for seed in range(12):
            await ask(engine, prompt(text(seed, 300)), session=str(seed))
            await engine.book.settled()
            files = [path for path in folder.rglob("*") if path.is_file()]
            assert sum(path.stat().st_blocks * 512 for path in files) <= limit
        assert engine.book.store is not None
        assert engine.book.store.stats().evicted > 0
        assert len(await engine.sessions.list()) == 12


async def test_what_a_killed_server_was_receiving_is_swept_away(toy, tmp_path):
    """What another one receives now is left alone."""
    incoming = tmp_path / "incoming"
    incoming.mkdir()
    for name in (f"restore-{2**22 + 1}-x", f"restore-{os.getpid()}-x", "else"):
        (incoming / name).write_bytes(b"x")
    async with started(toy("llama"), tmp_path, disk="1GB"):
        assert sorted(os.listdir(incoming)) == ["else", f"restore-{os.getpid()}-x"]
