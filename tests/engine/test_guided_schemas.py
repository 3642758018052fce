"""Random schemas through an engine, four replies at a time."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import jsonschema
from hypothesis import HealthCheck, given, settings

from mlxcache.errors import BadRequest
from tests.engine.guided import as_format, ask
from tests.engine.running import started
from tests.model.schemas import schemas

SCHEMAS = int(os.environ.get("MLXCACHE_SCHEMAS", "40")) // 5
"""Schemas that are asked for; `MLXCACHE_SCHEMAS=500` makes it 100."""


def drawn(count: int) -> list[dict[str, Any]]:
    """Random schemas."""
    found: list[dict[str, Any]] = []

    @settings(
        max_examples=count,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(schemas())
    def draw(schema: dict[str, Any]) -> None:
        found.append(schema)

    draw()
    return found


async def test_random_schemas_in_batches_of_four(toy_llama: Path, tmp_path: Path) -> None:
    """A toy's weights are random, so nothing but the schema makes its reply valid."""
    complete = refused = 0
    async with started(toy_llama, tmp_path) as engine:
        all_of_them = drawn(SCHEMAS)
        for at in range(0, len(all_of_them), 4):
            four = all_of_them[at : at + 4]
            forms = [as_format(schema) for schema in four]
            asked = (ask(engine, form, f"say {i}", tokens=100) for i, form in enumerate(forms))
            replies = await asyncio.gather(*asked, return_exceptions=True)
            for schema, reply in zip(four, replies, strict=True):
                if isinstance(reply, BadRequest):
                    refused += 1
                    continue
                assert not isinstance(reply, BaseException), reply
                if reply.end.reason == "stop":
                    complete += 1
                    jsonschema.validate(json.loads(reply.text), schema)
    print(f"{SCHEMAS} schemas, {refused} refused, {complete} replies complete")
    assert complete
