"""`warm` computes exactly the prefix that conversations share, and closes its stream."""

import json
from typing import Any

import pytest

from mlxcache.api.cache import warm
from mlxcache.errors import GenerationFailed
from mlxcache.types import Finished, Prompt, token_ids
from tests.api.fake import FakeEngine, reply

USER = {"role": "user", "content": "Hi"}


async def test_a_head_is_computed_up_to_where_messages_differ():
    """Only the prefix that every conversation shares."""
    engine: Any = FakeEngine()
    prompts = iter(([5, 6, 7, 8, 1, 9], [5, 6, 7, 8, 2, 9]))

    async def render(chat, *, session=None):
        return Prompt(token_ids(next(prompts)), (4, 6))

    engine.render = render
    done = await warm(engine, b"Be brief.")
    (job,) = engine.jobs
    assert job.prompt.ids.tolist() == [5, 6, 7, 8]
    assert job.prompt.marks == ()
    assert done["prompt_tokens"] == 4
    assert engine.streams[0].closed.is_set()


async def test_a_failure_is_raised_and_the_stream_closed():
    """As for other requests."""
    engine: Any = FakeEngine()
    engine.script = [*reply("x")[:-1], Finished("error", 3, 0, 0, 0)]
    with pytest.raises(GenerationFailed):
        await warm(engine, json.dumps({"messages": [USER]}).encode())
    assert engine.streams[0].closed.is_set()
