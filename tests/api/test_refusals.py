"""What is refused, in its exact words: a line of refusals.jsonl for each."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.fake import INFO, FakeEngine

CASES = [json.loads(line) for line in Path(__file__).with_name("refusals.jsonl").open()]
USER = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER},
    "/v1/completions": {},
    "/v1/messages": {"model": "m", "max_tokens": 9, "messages": USER},
    "/v1/responses": {"model": "m", "input": "hi"},
}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['path']} {case['body']}"[:80])
async def test_it_is_refused_and_named(
    client: httpx.AsyncClient, engine: FakeEngine, case: dict[str, Any]
) -> None:
    engine.info = replace(INFO, has_images=case.get("images", False))
    response = await client.post(case["path"], json=GOOD[case["path"]] | case["body"])
    assert response.status_code == 400
    assert response.json()["error"] == case["error"]
    assert engine.jobs == []
