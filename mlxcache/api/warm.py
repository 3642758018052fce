"""Computing a prefix ahead of use: a whole chat request, or tools and system prompt alone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxcache.api.http import new_request_id
from mlxcache.errors import BadRequest
from mlxcache.types import WARMING, Finished, Job, Prompt
from mlxcache.wire.chat_bodies import chats_to_warm
from mlxcache.wire.reply import finished_or_raise

if TYPE_CHECKING:
    from mlxcache.engine.engine import Engine


async def warm(engine: Engine, body: bytes, id: str | None = None) -> dict[str, Any]:
    """Compute the prefix that `body` describes, and say what that took.

    A chat request of either API is computed to where the reply begins, one without a message of a
    person up to where that would stand. What is no JSON object is a system prompt. Counts are in
    tokens. Raises BadRequest for a body that is neither, and what `Engine.submit` raises.
    """
    began = time.perf_counter()
    prompts = [await engine.render(chat) for chat in chats_to_warm(body)]
    prompt = prompts[0] if len(prompts) == 1 else _shared(*prompts)
    job = Job(id or new_request_id(), prompt, max_tokens=1, raw=True, api=WARMING)
    stream = await engine.submit(job)
    last: Finished | None = None
    try:
        async for event in stream:
            last = event if isinstance(event, Finished) else last
    finally:
        await stream.aclose()
    last = finished_or_raise(last)
    return {
        "object": "cache.warmed",
        "prompt_tokens": last.prompt_tokens,
        "cached_tokens": last.cached_tokens,
        "restored_tokens": last.restored_tokens,
        "fed_tokens": last.prompt_tokens - last.cached_tokens,
        "seconds": round(time.perf_counter() - began, 3),
    }


def _shared(one: Prompt, other: Prompt) -> Prompt:
    """What two prompts begin with in common. Raises BadRequest where that is nothing."""
    size = min(len(one.ids), len(other.ids))
    differ = np.flatnonzero(one.ids[:size] != other.ids[:size])
    length = int(differ[0]) if len(differ) else size
    if not length:
        raise BadRequest("There is nothing to warm: the prompt has no beginning of its own.")
    return Prompt(one.ids[:length], tuple(mark for mark in one.marks if mark < length))
