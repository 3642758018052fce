"""A conversation that alternates between two servers with one remote."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from mlxcache.engine.engine import Engine
from mlxcache.engine.runtime import ModelRuntime
from mlxcache.remote import fetch, tier
from mlxcache.remote.objects import Objects, open_remote
from tests.conftest import ToyMaker
from tests.engine.running import started
from tests.engine.test_turns import MORE, READ, TEXT, THOUGHT, WRITE, Live, of_family, scripts
from tests.prompt.families import FAMILIES

__all__ = ["scripts"]

DISK = {"disk": "1GB"}


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookups have time: a toy computes a prompt sooner than anything can be fetched."""
    monkeypatch.setattr(fetch, "COLD_SHARE", 1000.0)
    monkeypatch.setattr(fetch, "UNKNOWN_SHARE", 1000.0)
    monkeypatch.setattr(fetch, "WORTH", 1000.0)
    monkeypatch.setattr(tier, "REPLIES_SHARE", 1000.0)


@pytest.fixture
def remotes(bucket: str) -> Iterator[list[Objects]]:
    made = [open_remote(bucket, key=b"k" * 32) for _ in range(2)]
    yield made
    for one in made:
        one.close()


@asynccontextmanager
async def two(
    model: Path, folder: Path, remotes: list[Objects], ram: str = "300MB"
) -> AsyncIterator[list[Engine]]:
    async with (
        started(model, folder / "one", remote=remotes[0], ram=ram, **DISK) as one,
        started(model, folder / "other", remote=remotes[1], ram=ram, **DISK) as other,
    ):
        yield [one, other]


async def shared(engine: Engine) -> None:
    await engine.book.settled()
    still = 0
    async with asyncio.timeout(60):
        while still < 3:
            still = 0 if await engine.call(waits) else still + 1
            await asyncio.sleep(0.05)


def waits(runtime: ModelRuntime) -> bool:
    assert runtime.remote is not None
    assert runtime.kv.disk is not None
    behind = runtime.kv.disk.write_behind
    return bool(behind.pending_bytes or behind.pending_paths or runtime.remote.uploader.waiting)


class Alternating:
    """A conversation whose turns go to each of `engines` in turn."""

    def __init__(self, engines: list[Engine], name: str, api: str):
        self.engines, self.number = engines, 0
        self.talk = Live(engines[0], name, api)

    async def ask(self, *reply: Any, tokens: int = 900) -> Any:
        engine = self.engines[self.number % len(self.engines)]
        self.talk.engine = engine
        self.number += 1
        record = await self.talk.ask(*reply, tokens=tokens)
        await shared(engine)
        return record


ROWS = [
    ("qwen3", "llama", "chat"),
    ("gemma3", "gemma3", "chat"),
    ("qwen3.5", "qwen3_5", "messages"),
]


async def converse(turns: Alternating, several: bool) -> Any:
    """A conversation with calls and thinking; returns the record of its last turn."""
    talk = turns.talk
    talk.trim = lambda texts: [one.strip() for one in texts]
    await turns.ask(THOUGHT, f" {TEXT}\n", [READ])
    talk.results("It is so.")
    await turns.ask(THOUGHT, "", [READ, WRITE][: 1 + several])
    talk.results("And so.")
    await turns.ask(THOUGHT, TEXT, [])
    talk.user("And then? Go on with the other one, please.")
    await turns.ask(THOUGHT, "", [WRITE])
    talk.results("It is done.")
    await turns.ask(THOUGHT, TEXT, [])
    talk.user("Go on, please.")
    return await turns.ask(tokens=12)


@pytest.mark.slow
@pytest.mark.usefixtures("scripts", "patient")
@pytest.mark.parametrize("row", ROWS, ids="-".join)
async def test_turns_on_alternating_servers_feed_what_is_new(
    toy: ToyMaker, tmp_path: Path, remotes: list[Objects], row: tuple[str, str, str]
):
    name, layers, api = row
    folder = tmp_path / "model"
    folder.mkdir()
    model = of_family(toy(layers, vocab_size=1024), folder, name)
    async with two(model, tmp_path, remotes) as engines:
        turns = Alternating(engines, name, api)
        talk = turns.talk
        talk.user("Please read the file. " * 3)
        warm = await converse(turns, FAMILIES[name].several)
        print(name, layers, talk.warm, warm)
        assert max(talk.warm[1:]) <= MORE
        (one,), (other,) = [await engine.sessions.list() for engine in engines]
        assert (one.session.id, one.session.title) == (other.session.id, other.session.title)
        said = talk.pieces
        await talk.engine.call(lambda runtime: runtime.kv.clear())
        async with started(model, tmp_path / "cold", **DISK) as engine:
            talk.engine = engine
            cold = await talk.run(talk.prompt, 12)
            assert cold.cached_tokens == 0
            assert talk.pieces == said
