"""While nobody asks for anything, what the next turn begins with is computed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from mlxcache.api.app import create_app
from mlxcache.engine.engine import Engine
from mlxcache.scheduling.anticipate import MAX_UNUSED
from mlxcache.scheduling.task import Task
from mlxcache.types import (
    Chat,
    Job,
    Piece,
    Prompt,
    RequestRecord,
    Text,
    Thinking,
    ToolCall,
    join_ids,
    token_ids,
)
from tests.api.fake import OneModel
from tests.conftest import ToyMaker
from tests.engine.running import settled, started
from tests.scheduled import Bench, admitted

Message = dict[str, Any]
WORDS = ("the", "file", "path", "tool", "agent", "cache", "prefix", "model", "value", "edit")
EMITS = {
    "llama": {"<|im_end|>": 120, "</think>": 6},
    "qwen3_5": {"<|im_end|>": 120, "</think>": 6},
}
FAMILIES = ("llama", "qwen3_5")
MORE = 64
"""Tokens that a turn may feed beside the client's new message."""


def words(count: int, seed: str) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(WORDS) for _ in range(count))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "Read",
            "description": words(90, "Read"),
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
        },
    }
]


class Talk:
    """A conversation whose client sends back what it was told, thinking included if `thoughts`."""

    def __init__(self, engine: Engine, *, api: str = "messages", tools: Sequence[Message] = ()):
        self.engine, self.api, self.tools = engine, api, tools
        self.messages: list[Message] = [{"role": "system", "content": words(60, "head")}]
        self.pieces: list[Piece] = []
        self.size = 0
        self.ids: list[str] = []

    async def ask(self, *messages: Message, tokens: int = 150) -> RequestRecord:
        """One turn; the reply goes into the history. `size`: tokens that `messages` render to."""
        self.messages = [*self.messages, *messages]
        prompt = await self.engine.render(Chat(tuple(self.messages), self.tools), session="s")
        self.size = prompt.marks[-1] - prompt.marks[-1 - len(messages)]
        id = f"req_{time.monotonic_ns()}"
        self.ids.append(id)
        job = Job(id, prompt, max_tokens=tokens, tools=tuple(self.tools), session="s", api=self.api)
        events = [event async for event in await self.engine.submit(job)]
        self.pieces = [e for e in events if isinstance(e, Text | Thinking | ToolCall)]
        self.messages.append(reply_of(self.pieces, thoughts=self.api == "messages"))
        record = await self.engine.request(id)
        assert record is not None
        return record

    async def user(self, count: int = 30, **more: Any) -> RequestRecord:
        return await self.ask(user(words(count, f"user {len(self.messages)}")), **more)


def reply_of(pieces: Sequence[Piece], *, thoughts: bool) -> Message:
    thinking = "".join(p.text for p in pieces if isinstance(p, Thinking))
    calls = [
        {"id": p.id, "type": "function",
         "function": {"name": p.name, "arguments": json.loads(p.arguments)}}
        for p in pieces if isinstance(p, ToolCall)
    ]  # fmt: skip
    message: Message = {
        "role": "assistant",
        "content": "".join(p.text for p in pieces if isinstance(p, Text)),
    }
    return (
        message
        | ({"reasoning_content": thinking} if thoughts and thinking else {})
        | ({"tool_calls": calls} if calls else {})
    )


@pytest.mark.parametrize(("family", "api"), [("llama", "chat"), ("qwen3_5", "messages")])
async def test_after_thinking_a_turn_feeds_its_new_message(
    toy: ToyMaker, tmp_path: Path, family: str, api: str
):
    """The template drops the thinking of replies that lie behind; without, the reply is fed too."""
    model = toy(family, thinking=True, emits=EMITS[family])
    more: dict[bool, list[int]] = {False: [], True: []}
    answers: dict[bool, list[Piece]] = {False: [], True: []}
    for off in (False, True):
        async with started(model, tmp_path, no_anticipate=off) as engine:
            talk = Talk(engine, api=api)
            for turn in range(3):
                record = await talk.user()
                answers[off] += talk.pieces
                if turn:
                    more[off].append(record.fed_tokens - talk.size)
                    assert record.cached_tokens + record.fed_tokens == record.prompt_tokens
                await settled(engine)
            figures = engine.figures()["anticipated"]
            assert off == (figures == {"tokens": 0, "used_tokens": 0})
            assert [r.id for r in engine.requests()] == talk.ids[::-1], "it is no client's request"
    assert max(more[False]) <= MORE
    assert max(more[True]) > MORE, "the replies are too short to tell"
    assert answers[False] == answers[True], "what was computed ahead is what would have been"


async def test_what_was_used_of_it_is_counted(toy: ToyMaker, tmp_path: Path):
    """A turn that comes uses all of it, one that does not nothing."""
    async with started(toy("llama", thinking=True, emits=EMITS["llama"]), tmp_path) as engine:
        talk = Talk(engine)
        await talk.user()
        await settled(engine)
        first = engine.figures()["anticipated"]
        assert first["tokens"] > MORE
        assert first["used_tokens"] == 0
        history = talk.messages
        talk.messages = history[:1]
        await talk.ask(user(words(40, "another")))  # the same head, another conversation
        assert engine.figures()["anticipated"]["used_tokens"] == 0
        talk.messages = history
        await talk.user()
        await settled(engine)
        assert 0 < engine.figures()["anticipated"]["used_tokens"] <= first["tokens"]


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
async def test_a_listing_of_models_restores_the_conversation_that_goes_on(
    toy: ToyMaker, tmp_path: Path, family: str, waits: bool
) -> None:
    """The first request after a restart finds it in RAM, or restores what is not read yet."""
    model = toy(family)
    async with started(model, tmp_path, disk="1GB") as engine:
        talk = Talk(engine)
        await talk.user(600, tokens=9)
        await engine.book.settled()
    async with started(model, tmp_path, disk="1GB") as engine:
        transport = httpx.ASGITransport(create_app(OneModel(engine)))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for request in ("GET /v1/models", "HEAD /"):
                assert (await client.request(*request.split(" "))).status_code in (200, 307)
        ids = await engine.book.newest_conversation()
        known = join_ids(ids, ids[:1])
        while waits and await engine.call(lambda core: core.kv.reusable(known)) < len(ids):
            pass  # each call lets the thread go on
        talk.engine = engine
        record = await talk.user(tokens=9)
        assert record.cached_tokens >= len(ids) - MORE > 600
        assert record.cached_tokens + record.fed_tokens == record.prompt_tokens
        assert not (waits and record.restored_tokens)
        assert engine.figures()["anticipated"] == {"tokens": 0, "used_tokens": 0}
        await engine.call(lambda core: core.scheduler.check_integrity())


async def test_a_cancelled_reply_is_not_gone_on_with(toy: ToyMaker, tmp_path: Path):
    """And after one that was cut in its first thoughts there is nothing to compute."""
    model = toy("llama", thinking=True, emits={"</think>": 100_000})
    async with started(model, tmp_path) as engine:
        talk = Talk(engine)
        await talk.user(tokens=40)
        assert not any(isinstance(piece, Text) for piece in talk.pieces)
        prompt = await engine.render(Chat([*talk.messages, user(words(30, "x"))]))
        stream = await engine.submit(Job("cut", prompt, max_tokens=5000))
        async for event in stream:
            if isinstance(event, Thinking):
                await stream.aclose()
        await settled(engine)
        assert engine.figures()["anticipated"]["tokens"] == 0


async def test_where_nobody_goes_on_it_ends(toy: ToyMaker, tmp_path: Path):
    """A script that asks and never comes back is soon left alone, until somebody does."""
    async with started(toy("llama", thinking=True, emits=EMITS["llama"]), tmp_path) as engine:
        tokens: list[int] = []
        while len(tokens) < MAX_UNUSED + 4:
            talk = Talk(engine)
            await talk.ask(user(words(20, f"{len(engine.requests())}")), tokens=60)
            if any(isinstance(piece, Text) and piece.text for piece in talk.pieces):
                await settled(engine)
                tokens.append(engine.figures()["anticipated"]["tokens"])
            if len(tokens) == MAX_UNUSED + 2:
                await talk.user(tokens=2)
        assert 0 < tokens[MAX_UNUSED - 1] == tokens[MAX_UNUSED + 1] < tokens[-1]


async def test_nothing_is_computed_ahead_in_a_session_that_was_removed(
    toy: ToyMaker, tmp_path: Path
):
    async with started(toy("llama", thinking=True, emits=EMITS["llama"]), tmp_path) as engine:
        talk = Talk(engine)
        await talk.user()
        await settled(engine)
        (listed,) = await engine.sessions.list()
        await engine.sessions.delete(listed.session.id)
        assert await engine.call(lambda core: core.kv.tree.tokens) == 0


async def test_a_stop_does_not_wait_for_it(toy: ToyMaker, tmp_path: Path):
    """It ends within a chunk, and what it held is released."""
    async with started(
        toy("llama", thinking=True, emits=EMITS["llama"]), tmp_path, prefill_chunk=16
    ) as engine:
        talk = Talk(engine)
        await talk.user()
        runtime = await engine.call(lambda runtime: runtime)
        await asyncio.to_thread(runtime.next_turns.flush)
        await engine.stop()
        assert not runtime.scheduler.thread.alive
        assert not runtime.kv.ram.busy


# -- on the MLX thread ---------------------------------------------------------------------------


def ids_of(rng: np.random.Generator, n: int) -> list[int]:
    return [int(t) for t in rng.integers(10, 400, n)]


def ahead(bench: Bench, task: Task, ids: Sequence[int]) -> None:
    """Have the turn that begins with `ids` anticipated after `task`."""
    prompt = Prompt(token_ids([*ids, 1]), (len(ids),))
    bench.scheduler.idle_prefill.add(prompt, task.tokens())


def work(bench: Bench) -> None:
    """Tick until nothing is left to compute ahead."""
    while bench.scheduler.idle_prefill.ready:
        bench.tick()
        bench.check()


def test_a_request_waits_for_one_chunk_at_most(bench: Bench, rng: np.random.Generator):
    """It goes on with what was computed by then."""
    head = ids_of(rng, 200)
    first = bench.ask(head, tokens=20)
    again = head + ids_of(rng, 600)
    fed: list[tuple[bool, int]] = []
    chunk = bench.scheduler.prefill.feed_chunk

    def counted(task: Task, seconds: float) -> None:
        began = task.held.lineage.length
        chunk(task, seconds)
        fed.append((task is asked, task.held.lineage.length - began))

    bench.scheduler.prefill.feed_chunk = counted  # type: ignore[method-assign]
    asked: Task | None = None
    ahead(bench, first, again)
    for _ in range(3):
        bench.tick()
        bench.check()
    assert len(fed) == 3, "one chunk a tick, so that what arrives is seen between two"
    asked = bench.put(again + ids_of(rng, 10))
    bench.run()
    assert [mine for mine, _ in fed] == [False] * 3 + [True] * (len(fed) - 3)
    known = 199 if bench.kv.layout.recurrent else 200  # the state before the reply
    assert admitted(asked).cached_tokens == known + sum(size for mine, size in fed if not mine)
    assert asked.out == bench.twin().ask(again + asked.ids[-10:].tolist()).out


def test_another_request_in_between_only_delays_it(bench: Bench, rng: np.random.Generator):
    head = ids_of(rng, 200)
    first = bench.ask(head, tokens=20)
    again = head + ids_of(rng, 400)
    ahead(bench, first, again)
    bench.tick()
    bench.ask(ids_of(rng, 150), tokens=5)
    work(bench)
    task = bench.ask([*again, *ids_of(rng, 10)])
    assert admitted(task).cached_tokens == len(again)
    assert bench.scheduler.idle_prefill.used == bench.scheduler.idle_prefill.tokens >= 400


def test_it_takes_nothing_from_others(bench: Bench, rng: np.random.Generator):
    """Where no room is free the reply as it was goes, which no turn will begin with again."""
    head = ids_of(rng, 200)
    others = [ids_of(rng, 200) for _ in range(3)]
    for other in others:
        bench.ask(other, tokens=5)
    first = bench.ask(head, tokens=80)
    again = head + ids_of(rng, 60)
    kept = [bench.kv.reusable(token_ids(other)) for other in others]
    budget, room = bench.kv.budget, bench.kv.ram
    state = 2 * bench.kv.layout.checkpoint_bytes
    budget.reserve("pending", budget.free - state)
    ahead(bench, first, again)
    work(bench)
    assert budget.used <= budget.limit
    assert [bench.kv.reusable(token_ids(other)) for other in others] == kept
    assert room.dropped == 0
    budget.release("pending", budget.by_kind()["pending"])
    task = bench.ask([*again, *ids_of(rng, 10)])
    assert admitted(task).cached_tokens == len(again)


def test_a_reply_that_somebody_went_on_with_stays(bench: Bench, rng: np.random.Generator):
    """Then there is no room, and nothing is computed ahead."""
    head = ids_of(rng, 200)
    first = bench.ask(head, tokens=80)
    bench.ask([*first.tokens().tolist(), *ids_of(rng, 50)])
    bench.ask([*first.tokens().tolist(), *ids_of(rng, 50)])
    budget, tokens = bench.kv.budget, bench.kv.tree.tokens
    budget.reserve("pending", budget.free)
    ahead(bench, first, head + ids_of(rng, 60))
    work(bench)
    assert bench.kv.tree.tokens == tokens
    assert bench.scheduler.idle_prefill.tokens == 0


def test_what_has_left_memory_is_not_computed_again(bench: Bench, rng: np.random.Generator):
    head = ids_of(rng, 300)
    first = bench.ask(head, tokens=20)
    bench.kv.ram.clear()
    ahead(bench, first, head + ids_of(rng, 60))
    work(bench)
    assert bench.scheduler.idle_prefill.tokens == 0


def test_one_that_fails_is_given_up(bench: Bench, rng: np.random.Generator, caplog):
    """The log tells; the next request finds all that was computed before."""
    head = ids_of(rng, 200)
    first = bench.ask(head, tokens=20)
    chunk = bench.scheduler.prefill.feed_chunk

    def fails(task: Task, seconds: float) -> None:
        raise RuntimeError("no kernel")

    bench.scheduler.prefill.feed_chunk = fails  # type: ignore[method-assign]
    ahead(bench, first, head + ids_of(rng, 60))
    work(bench)
    assert "computing the next turn in advance failed" in caplog.text
    bench.scheduler.prefill.feed_chunk = chunk  # type: ignore[method-assign]
    assert admitted(bench.ask(head + ids_of(rng, 30))).cached_tokens >= 190
