"""Several owners on one engine: nothing of one's is reused for, or told to, another."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from mlxcache.engine.engine import Engine
from mlxcache.errors import NotFound
from mlxcache.owner import OWNER, own_ids, owner_of
from mlxcache.types import Chat, Finished, Job, Prompt, token_ids
from tests.conftest import ToyMaker
from tests.engine.running import started

ALICE, BOB = owner_of("alice"), owner_of("bob")
OWNERS = [ALICE, BOB, None]
IDS = token_ids(np.random.default_rng(1).integers(100, 400, 300).astype(np.int32))


@contextmanager
def acting(owner: str | None) -> Iterator[None]:
    """What is done inside is done for `owner`, as the middleware has it."""
    token = OWNER.set(owner)
    try:
        yield
    finally:
        OWNER.reset(token)


async def ask(engine: Engine, owner: str | None, id: str, label: str | None = None) -> Finished:
    """The same prompt whoever asks."""
    job = Job(id, Prompt(IDS, (40, 200)), max_tokens=4, raw=True, session=label)
    with acting(owner):
        stream = await engine.submit(job)
    async for event in stream:
        if isinstance(event, Finished):
            return event
    raise AssertionError("it did not finish")


async def ids_of(engine: Engine, owner: str | None) -> list[str]:
    with acting(owner):
        return [one.session.id for one in await engine.sessions.list()]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
async def test_no_owner_finds_anothers_prefix_in_ram_or_on_disk(
    toy: ToyMaker, tmp_path: Path, kind: str
) -> None:
    """A count of cached tokens would say that somebody else has sent these very words."""
    model = toy(kind)
    async with started(model, tmp_path, disk="1GB") as engine:
        for owner in OWNERS:
            assert (await ask(engine, owner, f"first-{owner}")).cached_tokens == 0
        for owner in OWNERS:
            assert (await ask(engine, owner, f"again-{owner}")).cached_tokens > 0
        await engine.book.settled()
    async with started(model, tmp_path, disk="1GB") as engine:
        stranger = await ask(engine, owner_of("carol"), "carol")
        assert (stranger.cached_tokens, stranger.restored_tokens) == (0, 0)
        for owner in OWNERS:
            found = await ask(engine, owner, f"restored-{owner}")
            assert found.restored_tokens > 0
            assert found.cached_tokens == found.restored_tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[tuple[Engine, dict[str | None, str]]]:
    """An engine on which each owner has one session, and the ids of these."""
    async with started(toy("llama"), tmp_path_factory.mktemp("owners"), disk="1GB") as engine:
        for owner in OWNERS:
            await ask(engine, owner, f"shared-{owner}", "work")
        found = {owner: await ids_of(engine, owner) for owner in OWNERS}
        await engine.book.settled()
        yield engine, {owner: ids[0] for owner, ids in found.items()}


ON_ITS_LOOP = pytest.mark.asyncio(loop_scope="module")
Shared = tuple[Engine, dict[str | None, str]]


@ON_ITS_LOOP
async def test_one_label_is_each_owners_own_session(shared: Shared) -> None:
    engine, sessions = shared
    assert len(set(sessions.values())) == 3
    for owner in OWNERS:
        assert await ids_of(engine, owner) == [sessions[owner]]


@ON_ITS_LOOP
async def test_anothers_session_is_not_there_whatever_is_asked(shared: Shared) -> None:
    """The answer is the one for an id that nobody has."""
    engine, sessions = shared
    book, of_alice = engine.sessions, sessions[ALICE]
    for owner in (BOB, None):
        with acting(owner):
            for refused in (
                book.get(of_alice),
                engine.book.info(of_alice),
                book.patch(of_alice, name="mine"),
                book.patch(of_alice, pinned=True),
                book.fork(of_alice),
                book.delete(of_alice),
                book.files.snapshot(of_alice),
                book.files.prompt_cache(of_alice),
            ):
                with pytest.raises(NotFound, match="No session has the id"):
                    await refused
    with acting(ALICE):
        kept = await book.get(of_alice)
    assert (kept.session.name, kept.session.pinned, kept.session.turns) == (None, False, 1)


@ON_ITS_LOOP
async def test_anothers_id_as_a_label_names_a_session_of_ones_own(shared: Shared) -> None:
    engine, sessions = shared
    await ask(engine, BOB, "by-id", sessions[ALICE])
    with acting(ALICE):
        assert (await engine.sessions.get(sessions[ALICE])).session.turns == 1


@ON_ITS_LOOP
async def test_requests_are_told_to_who_made_them(shared: Shared) -> None:
    engine, _ = shared
    for owner in OWNERS:
        with acting(owner):
            assert f"shared-{owner}" in {record.id for record in engine.requests()}
            assert all(record.owner == owner for record in engine.requests())
            assert await engine.request(f"shared-{owner}") is not None
            others = [await engine.request(f"shared-{other}") for other in {*OWNERS} - {owner}]
            assert others == [None, None]


@ON_ITS_LOOP
async def test_a_reason_for_a_loss_quotes_nobody_else(shared: Shared) -> None:
    engine, _ = shared
    secret = "the launch code is 4711 " * 30
    asks = {"role": "user", "content": "What is it?"}
    messages = [{"role": "system", "content": secret}, asks]
    changed = [{"role": "system", "content": secret.replace("4711", "4712", 1)}, asks]
    told: list[Any] = []
    for owner, said in ((ALICE, messages), (BOB, changed), (ALICE, changed)):
        with acting(owner):
            prompt = await engine.render(Chat(said), session="loss")
            job = Job(f"loss-{len(told)}", prompt, max_tokens=2, session="loss", api="chat")
            async for _ in await engine.submit(job):
                pass
            record = await engine.request(job.id)
            assert record is not None
            told.append(record.lost)
    assert told[1]["reason"] == "first_seen"
    assert "4711" not in str(told[1])
    assert told[2]["reason"] == "system_changed", "it is told where it is one's own"


@ON_ITS_LOOP
async def test_what_a_builder_remembers_is_its_owners(shared: Shared) -> None:
    """A result of a tool that its client cleared is put back from memory: from one's own."""
    engine, _ = shared

    def chat(result: str) -> Chat:
        call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": {}}}
        return Chat(
            [
                {"role": "user", "content": "read it"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": result},
                {"role": "user", "content": "and now?"},
            ]
        )

    cleared = chat("[Old tool result content cleared]")
    with acting(ALICE):
        await engine.render(chat("the launch code is 4711 " * 10))
        mine = await engine.render(cleared)
    with acting(BOB):
        theirs = await engine.render(cleared)
    assert "cleared_results" in mine.rules
    assert "cleared_results" not in theirs.rules


@ON_ITS_LOOP
async def test_a_session_may_be_handed_over_as_a_snapshot(shared: Shared, tmp_path: Path) -> None:
    """Who takes it in owns the copy; the file holds what the model is fed, and no owner."""
    engine, sessions = shared
    with acting(ALICE):
        export = await engine.sessions.files.snapshot(sessions[ALICE])
    path = tmp_path / "alice.safetensors"
    path.write_bytes(b"".join(export))
    assert ALICE.encode() not in path.read_bytes()
    carol = owner_of("carol")
    with acting(carol):
        made = await engine.sessions.files.restore(path, "from alice")
        leaf = (await engine.book.info(made.session.id)).leaves[0].ids
    assert leaf[: len(IDS)].tolist() == own_ids(IDS, carol).tolist()
    assert (await ask(engine, carol, "carol-goes-on")).restored_tokens > 0
    assert await ids_of(engine, carol) == [made.session.id] != [sessions[ALICE]]
    assert sessions[ALICE] in await ids_of(engine, ALICE)


@ON_ITS_LOOP
async def test_a_prompt_cache_of_mlx_lms_goes_out_and_in(shared: Shared, tmp_path: Path) -> None:
    engine, sessions = shared
    with acting(ALICE):
        export = await engine.sessions.files.prompt_cache(sessions[ALICE])
    path = tmp_path / "alice.safetensors"
    path.write_bytes(b"".join(export))
    dave = owner_of("dave")
    with acting(dave):
        await engine.sessions.files.restore(path)
    assert (await ask(engine, dave, "dave-goes-on")).cached_tokens == len(IDS) - 1


@ON_ITS_LOOP
async def test_to_clear_is_to_clear_ones_own(shared: Shared) -> None:
    engine, sessions = shared
    erin = owner_of("erin")
    await ask(engine, erin, "erin", "kept")
    await ask(engine, erin, "erin-2", "gone")
    with acting(erin):
        kept = next(o for o in await engine.sessions.list() if o.session.label == "kept")
        await engine.sessions.patch(kept.session.id, pinned=True)
        assert (await engine.sessions.clear())["sessions"] == 1
        assert (await engine.sessions.clear(pinned=True))["sessions"] == 1
    assert (await ask(engine, erin, "erin-3")).cached_tokens == 0
    assert (await ask(engine, ALICE, "alice-still")).cached_tokens > 0
    assert sessions[ALICE] in await ids_of(engine, ALICE)
