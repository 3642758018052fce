"""A message that a client begins is continued warm, and warm when it comes back as one message."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from mlxcache.engine.engine import Engine
from mlxcache.types import Chat, Event, Finished, Job, Sampling, Text, Thinking
from tests.conftest import ToyMaker
from tests.engine.running import settled, started
from tests.scheduling.test_anticipation import MORE, words

Message = dict[str, Any]


def user(seed: str, count: int = 30) -> Message:
    return {"role": "user", "content": words(count, seed)}


class Talk:
    """A conversation of which a client begins some replies."""

    def __init__(self) -> None:
        self.messages: list[Message] = [{"role": "system", "content": words(60, "head")}]
        self.before = 0

    async def ask(
        self, engine: Engine, new: Message, begun: str = "", **fields: Any
    ) -> list[Event]:
        """One turn, of which no more than `MORE` tokens and the new message are fed."""
        self.messages.append(new)
        begins = [{"role": "assistant", "content": begun}] if begun else []
        chat = Chat((*self.messages, *begins), continue_final=bool(begun))
        prompt = await engine.render(chat, session="s")
        job = Job(f"req_{time.monotonic_ns()}", prompt, max_tokens=90, session="s", **fields)
        events = [event async for event in await engine.submit(job)]
        last = events[-1]
        assert isinstance(last, Finished)
        fed, size = last.prompt_tokens - last.cached_tokens, last.prompt_tokens - self.before
        if self.before:
            assert fed <= size + MORE, (fed, size)
        text = "".join(event.text for event in events if isinstance(event, Text))
        self.messages.append({"role": "assistant", "content": begun + text})
        self.before = last.prompt_tokens + last.generated_tokens
        return events


@pytest.mark.parametrize("family", ["llama", "qwen3_5", "gemma3"])
async def test_a_message_that_was_begun_is_warm_there_and_back(
    toy: ToyMaker, tmp_path: Path, family: str
) -> None:
    """Also after a restart, and without anticipation."""
    model = toy(family, emits={"<|im_end|>": 120})
    options = {"disk": "200MB", "no_anticipate": True}
    talk = Talk()
    async with started(model, tmp_path, **options) as engine:
        await talk.ask(engine, user("a"))
        await talk.ask(engine, user("b"), "Well, the file")
        await talk.ask(engine, user("c"))
        await talk.ask(engine, user("d"), "So: ", sampling=Sampling(1.0, seed=3))
    async with started(model, tmp_path, **options) as engine:
        await talk.ask(engine, user("e"))


async def test_where_the_template_drops_the_think_block_the_next_turn_is_anticipated(
    toy: ToyMaker, tmp_path: Path
) -> None:
    """A message that was begun does not think again, and nothing of it is fed at the next turn."""
    model = toy("llama", thinking=True, emits={"<|im_end|>": 120, "</think>": 6})
    talk = Talk()
    async with started(model, tmp_path) as engine:
        await talk.ask(engine, user("a"))
        await settled(engine)
        events = await talk.ask(engine, user("b"), "Well, the file")
        assert not any(isinstance(event, Thinking) for event in events)
        await settled(engine)
        await talk.ask(engine, user("c"))
