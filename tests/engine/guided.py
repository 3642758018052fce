"""Requests whose replies follow a grammar, and what is expected of the replies."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from mlxcache.engine.engine import Engine
from mlxcache.types import Chat, Finished, Job, OutputFormat, Sampling, Text, Thinking, TokenLogprob

POINT: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "at": {"type": "integer"}},
    "required": ["name", "at"],
    "additionalProperties": False,
}
NUMBERS: dict[str, Any] = {
    "type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 4
}  # fmt: skip
COLOUR: dict[str, Any] = {"enum": ["red", "green", "a longer name of a colour", None, 7]}
TREE: dict[str, Any] = {
    "anyOf": [
        {"type": "boolean"},
        {
            "type": "object",
            "properties": {"sides": {"type": "array", "items": {"$ref": "#"}, "maxItems": 2}},
            "required": ["sides"],
            "additionalProperties": False,
        },
    ]
}
SCHEMAS = (POINT, NUMBERS, COLOUR, TREE)

_ids = itertools.count()


def as_format(schema: dict[str, Any]) -> OutputFormat:
    """The format of replies that are valid against `schema`."""
    return OutputFormat("json_schema", json.dumps(schema))


@dataclass(frozen=True)
class Reply:
    """What a client is sent of one reply."""

    text: str
    thinking: str
    logprobs: tuple[TokenLogprob, ...]
    end: Finished


async def ask(
    engine: Engine,
    form: OutputFormat | None,
    text: str = "hello",
    *,
    seed: int = 1,
    temperature: float = 1.0,
    tokens: int = 400,
    thinking: bool | None = None,
    **more: Any,
) -> Reply:
    """The whole reply to one message."""
    args = {} if thinking is None else {"enable_thinking": thinking}
    prompt = await engine.render(Chat([{"role": "user", "content": text}], template_args=args))
    sampling = more.pop("sampling", None) or Sampling(temperature=temperature, seed=seed)
    job = Job(f"g{next(_ids)}", prompt, sampling, max_tokens=tokens, format=form, **more)
    events = [event async for event in await engine.submit(job)]
    texts = [event for event in events if isinstance(event, Text)]
    end = events[-1]
    assert isinstance(end, Finished)
    return Reply(
        "".join(piece.text for piece in texts),
        "".join(event.text for event in events if isinstance(event, Thinking)),
        tuple(entry for piece in texts for entry in piece.logprobs),
        end,
    )
