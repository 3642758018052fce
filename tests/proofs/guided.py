"""Pace of replies that follow a schema, beside that of free ones: alone, and four at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

from mlxcache.bench.context import Scale
from mlxcache.bench.findings import Findings
from mlxcache.bench.own_engine import Inside, drained, running_inside
from mlxcache.types import Job, OutputFormat, Prompt

TITLE = "Replies that follow a schema"
LEAST = 0.85
"""Least tokens per second with a schema, by those without."""

REPLY_TOKENS, PAIRS = 24, 4
"""Tokens of a reply, and pairs of a repetition: many short ones, as other work on the machine
changes its speed from second to second."""

RAM = "1GB"

_TEXT = {"type": "string"}
ITEMS: Sequence[dict[str, Any]] = (
    {
        "type": "object",
        "properties": {"name": _TEXT, "count": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["name", "count", "tags"],
        "additionalProperties": False,
    },
    {"type": "object", "properties": {"path": {"type": "string", "pattern": "^/[a-z/]+\\.py$"}}},
    {"anyOf": [{"type": "number"}, {"type": "array", "items": _TEXT}, {"enum": ["a", "b", None]}]},
    _TEXT,
)
"""Schemas of the items of each reply, which is an array too long for it to end."""

FORMATS = tuple(
    OutputFormat("json_schema", json.dumps({"type": "array", "items": item, "minItems": 1000}))
    for item in ITEMS
)

_numbers = count()


async def guided(model: Path, folder: Path, scale: Scale, found: Findings) -> None:
    """Decode short replies with and without a schema, in turn, PAIRS times in each repetition.

    Greedy; a grammar is compiled before it is timed. Raises ValueError, MlxcacheError, OSError.
    """
    async with running_inside(model, folder, RAM) as inside:
        began = time.perf_counter()
        await _pace(inside, FORMATS[:1])
        first_s = time.perf_counter() - began
        await _pace(inside, FORMATS)
        found.add(TITLE, "one", "first reply", "s", first_s)
        for run in range(PAIRS * scale.runs):
            for rows in (1, len(FORMATS)):
                free: Sequence[OutputFormat | None] = [None] * rows
                forms = (free, FORMATS[:rows])
                for form in forms if run % 2 else forms[::-1]:
                    name = "free" if form is free else "guided"
                    pace = await _pace(inside, form)
                    found.add(TITLE, f"{rows} at once", name, "tokens/s", pace)
    for rows in (1, len(FORMATS)):
        figures = found.tables[TITLE][f"{rows} at once"]
        pairs = zip(figures["guided"].samples, figures["free"].samples, strict=True)
        name = f"tokens/s of {rows} with a schema, by those without"
        found.hold(name, median(a / b for a, b in pairs), LEAST, least=True)


async def _pace(inside: Inside, forms: Sequence[OutputFormat | None]) -> float:
    """Tokens per second of one reply for each of `forms`, all at once, from their first tokens."""
    ids = [
        inside.tokens(16 * inside.core.layout.bytes_per_token, 700 + i) for i, _ in enumerate(forms)
    ]
    streams = [
        await inside.engine.submit(
            Job(
                f"pace-{next(_numbers)}",
                Prompt(one),
                max_tokens=REPLY_TOKENS,
                format=form,
                raw=True,
            )
        )
        for one, form in zip(ids, forms, strict=True)
    ]
    await asyncio.gather(*map(drained, streams))
    records = [stream.record for stream in streams]
    drawn = sum(record.generated_tokens - 1 for record in records)
    if drawn < len(forms) * (REPLY_TOKENS - 1):
        raise ValueError("a reply ended before its time")
    return drawn / max(record.timing["decode_s"] for record in records)
