"""Families' turns in a running engine: what each feeds, and that its reply is the cold one's.

The model's weights are random, so which tokens a reply has is given; they are computed, cached, put
in again and anticipated like any others. The last reply is the model's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mlxcache.engine import engine as engine_module
from mlxcache.engine.engine import Engine
from mlxcache.types import Job, Piece, Prompt, RequestRecord, Text, Thinking, ToolCall
from mlxcache.wire.chat_bodies import request_to_chat
from tests.conftest import ToyMaker
from tests.engine.running import settled, started
from tests.prompt import families
from tests.prompt.families import FAMILIES
from tests.prompt.turns import Client
from tests.scripted import ScriptedRuntime

THOUGHT = "The user wants a file. I look at it first, then I say what's in it.\nOne moment. "
TEXT = 'I\'ll look at it:  two blanks, naïve {"a": 1}, and then some more words. ' * 2
READ = ("Read", {"path": "/tmp/a b.py", "limit": 20, "t": "line\n" * 4})
WRITE = ("Write", {"path": "b", "text": "x = 1\n" * 4})
MORE = 64
ROWS = [
    ("qwen3.5", "qwen3_5", "messages"),
    ("gpt-oss", "gpt_oss", "chat"),
    pytest.param("glm", "llama", "chat", marks=pytest.mark.slow),
    pytest.param("deepseek", "llama", "messages", marks=pytest.mark.slow),
    pytest.param("gemma3", "gemma3", "chat", marks=pytest.mark.slow),
]
"""A template, a model whose layers are as the family's, and an API."""


def of_family(model: Path, folder: Path, name: str) -> Path:
    """A copy of a toy with a family's tokenizer and template."""
    for file in model.iterdir():
        if not file.name.startswith("tokenizer"):
            (folder / file.name).write_bytes(file.read_bytes())
    tokenizer = families.tokenizer(name)
    tokenizer._tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["eos_token_id"] = sorted(tokenizer.eos_token_ids)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


class Live(Client):
    """A conversation with an engine. `pieces`: the last reply's; `prompt`: the last prompt."""

    def __init__(self, engine: Engine, name: str, api: str):
        super().__init__(api, thoughts=api == "messages")
        self.engine, self.writes = engine, FAMILIES[name].writes
        self.encode = families.tokenizer(name).encode
        self.number = 0
        self.warm: list[int] = []

    async def ask(self, *reply: Any, tokens: int = 900) -> RequestRecord:
        """One turn, in which the model writes a family's `reply`, or what it likes.

        `warm` gets the tokens that were fed beside what is new.
        """
        chat = request_to_chat(self.body)
        self.prompt = await self.engine.render(chat, session="s")
        ScriptedRuntime.lines = [("", self.writes(*reply))] if reply else []
        record = await self.run(self.prompt, tokens)
        self.takes(self.pieces)
        new = sum(len(self.encode(text, add_special_tokens=False)) for text in self.news)
        self.warm.append(record.fed_tokens - new)
        await settled(self.engine)
        return record

    async def run(self, prompt: Prompt, tokens: int) -> RequestRecord:
        self.number += 1
        id = f"req_{self.number}"
        tools = tuple(request_to_chat(self.body).tools)
        job = Job(id, prompt, max_tokens=tokens, tools=tools, session="s", api=self.api)
        events = [event async for event in await self.engine.submit(job)]
        self.pieces: Sequence[Piece] = [
            e for e in events if isinstance(e, Text | Thinking | ToolCall)
        ]
        record = await self.engine.request(id)
        assert record is not None
        return record


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines' replies are given."""
    monkeypatch.setattr(engine_module, "ModelRuntime", ScriptedRuntime)
    monkeypatch.setattr(ScriptedRuntime, "lines", ())


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(("name", "layers", "api"), ROWS)
async def test_turns_feed_what_is_new_and_answer_as_when_cold(
    toy: ToyMaker, tmp_path: Path, name: str, layers: str, api: str
):
    """After calls, after thinking, and after a reply that was cut before it said anything."""
    folder = tmp_path / "model"
    folder.mkdir()
    model = of_family(toy(layers, vocab_size=1024), folder, name)
    family = FAMILIES[name]
    async with started(model, tmp_path / "cache") as engine:
        talk = Live(engine, name, api)
        talk.user("Please read the file. " * 3)
        await talk.ask(THOUGHT, TEXT if name != "gpt-oss" else "", [READ])
        talk.results("It is so.")
        await talk.ask(THOUGHT, "", [READ, WRITE][: 1 + family.several])
        talk.results("And so.")
        await talk.ask(THOUGHT, TEXT, [])
        talk.user("And then? Go on with the other one, please.")
        await talk.ask(THOUGHT, "", [WRITE])
        talk.results("It is done.")
        await talk.ask(THOUGHT, TEXT, [], tokens=40)
        talk.user("Go on, please.")
        warm = await talk.ask(tokens=12)
        assert max(talk.warm[1:]) <= MORE
        said = talk.pieces
        await engine.call(lambda runtime: runtime.kv.clear())
        cold = await talk.run(talk.prompt, 12)
        assert (cold.cached_tokens, cold.fed_tokens) == (0, warm.cached_tokens + warm.fed_tokens)
        assert talk.pieces == said
