"""A stable UUID in a reply is returned as the client's own UUID, in both APIs."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlxcache.api.app import create_app
from mlxcache.config import Settings
from mlxcache.engine.engine import Engine
from mlxcache.types import Chat, Prompt
from tests.api.fake import OneModel
from tests.conftest import ToyMaker

OWN = "aaf15967-cfc7-4d52-bfda-e1edd9858ef9"
ASKED: dict[str, Any] = {"messages": [{"role": "user", "content": "Name three trees."}]}
BODY = ASKED | {"model": "m", "max_tokens": 60, "temperature": 0}
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


@pytest.fixture
async def engine(toy: ToyMaker, tmp_path: Path) -> AsyncIterator[Engine]:
    running = Engine(Settings(model=str(toy("llama")), cache_dir=tmp_path, ram="200MB", disk="off"))
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
async def client(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(OneModel(engine)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as made:
        yield made


async def text_of(client: httpx.AsyncClient, path: str, *, stream: bool) -> str:
    response = await client.post(path, json=BODY | {"stream": stream})
    assert response.status_code == 200, response.text
    if not stream:
        reply = response.json()
        content = reply["content"] if path == MESSAGES else reply["choices"][0]["message"]
        return content[0]["text"] if path == MESSAGES else content["content"]
    texts = []
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line.removeprefix("data: "))
        choices = event.get("choices") or [event]
        delta = choices[0].get("delta") or {}
        texts.append(delta.get("text") or delta.get("content") or "")
    return "".join(texts)


async def test_a_name_is_put_back_in_every_kind_of_reply(engine, client, monkeypatch):
    """A piece of what the toy says, several tokens long, stands for a stable UUID here."""
    said = await text_of(client, CHAT, stream=False)
    name = said[9:29]
    assert said.count(name) == 1
    render = engine.render

    async def named(*args: Any, **more: Any) -> Prompt:
        return replace(await render(*args, **more), names={name: OWN}, rules=("uuid",))

    monkeypatch.setattr(engine, "render", named)
    for path in (CHAT, MESSAGES):
        for stream in (False, True):
            assert (await text_of(client, path, stream=stream)).lstrip() == (
                said.replace(name, OWN).lstrip()
            )
    assert engine.figures()["canonicalised"]["uuid"] == 4
    assert engine.requests()[0].canonicalised == ("uuid",)


async def test_a_system_prompt_with_a_uuid_is_named(engine: Engine) -> None:
    """The chat's UUIDs give the mapping for its reply."""
    system = {"role": "system", "content": f"Scratchpad: /tmp/claude/{OWN}/scratchpad"}
    prompt = await engine.render(Chat((system, *ASKED["messages"])))
    assert list(prompt.names.values()) == [OWN]
    assert (await engine.render(Chat((system, *ASKED["messages"])), stop=("e",))).names == {}
