"""Guided replies to cold, warm and restored prompts, over families of each kind of cache."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mlxcache.engine.engine import Engine
from mlxcache.types import Chat, Finished, Job, OutputFormat, Piece, Sampling, ToolCall, ToolChoice
from tests.engine.guided import COLOUR, POINT, as_format
from tests.engine.running import started
from tests.toys.configs import FAMILIES
from tests.toys.toy import make_toy

QUICK = ("llama", "qwen3_5")
"""Layers with all positions, and with recurrent states."""

TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "description": name, "parameters": schema}}
    for name, schema in (
        ("place", POINT),
        ("paint", {**POINT, "properties": {"name": COLOUR, "at": {"type": "boolean"}}}),
    )
)

Asked = tuple[Sampling, dict[str, Any]]
SEEDED = Sampling(temperature=1.0, seed=7, top_p=0.95)
ASKED: dict[str, Asked] = {
    "schema, sampled": (SEEDED, {"format": as_format(POINT)}),
    "schema, greedy": (Sampling(), {"format": OutputFormat("regex", "[a-z]{2,9}[0-9]")}),
    "forced tool, sampled": (SEEDED, {"tool_choice": ToolChoice(required=True)}),
    "named tool, penalised": (
        Sampling(temperature=0.8, seed=8, repetition_penalty=1.1),
        {"tool_choice": ToolChoice(required=True, names=("paint",)), "parallel_tools": False},
    ),
}
HISTORY = [{"role": "user", "content": " ".join(f"line {i} of the file" for i in range(60))}]
"""Long enough for some blocks on disk."""

_ids: Iterator[int] = itertools.count()


async def ask(engine: Engine, asked: Asked) -> tuple[list[Piece], Finished]:
    sampling, how = asked
    tools = TOOLS if "tool_choice" in how else None
    prompt = await engine.render(Chat(HISTORY, tools=tools or ()))
    job = Job(f"m{next(_ids)}", prompt, sampling, max_tokens=300, tools=tools, **how)
    events = [event async for event in await engine.submit(job)]
    end = events[-1]
    assert isinstance(end, Finished)
    return [e for e in events if isinstance(e, Piece)], end


def said(pieces: list[Piece]) -> list[tuple[str, str]]:
    """Texts joined, and calls without their random ids."""
    text = "".join(getattr(piece, "text", "") for piece in pieces)
    calls = [(p.name, p.arguments) for p in pieces if isinstance(p, ToolCall)]
    return [("", text), *calls]


@pytest.mark.parametrize(
    "family",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES],
)
async def test_cold_warm_and_restored_replies_are_the_same(family: str, tmp_path: Path) -> None:
    """With a schema, a forced tool, seeds and samplers; calls are valid, and of the named tool."""
    layers = {"gemma4": 4, "llama4": 4}.get(family, 2)
    model = make_toy(tmp_path / "toy", family, layers=layers, window=32, emits={"<|im_end|>": 30})
    settings = {"disk": "200MB"}
    async with started(model, tmp_path / "cache", **settings) as engine:
        cold = [await ask(engine, asked) for asked in ASKED.values()]
        warm = await asyncio.gather(*(ask(engine, asked) for asked in ASKED.values()))
    async with started(model, tmp_path / "cache", **settings) as engine:
        restored = [await ask(engine, asked) for asked in ASKED.values()]
    for name, one, two, three in zip(ASKED, cold, warm, restored, strict=True):
        assert said(one[0]) == said(two[0]) == said(three[0]), name
        assert one[1].reason == two[1].reason == three[1].reason, name
        assert two[1].cached_tokens > 60, name
    assert cold[0][1].cached_tokens == 0
    assert restored[0][1].restored_tokens > 60
    for name, (pieces, end) in zip(ASKED, cold, strict=True):
        calls = [piece for piece in pieces if isinstance(piece, ToolCall)]
        assert bool(calls) == ("tool" in name) or end.reason == "length"
        for call in calls:
            schema = next(t["function"] for t in TOOLS if t["function"]["name"] == call.name)
            jsonschema.validate(json.loads(call.arguments), schema["parameters"])
            assert call.name == "paint" or "named" not in name
