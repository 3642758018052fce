"""Output of `mlxcache sessions` while the first prompt is being computed."""

from __future__ import annotations

import json
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxcache.cli.main import app
from tests.cli.answering import answering

RUNS: dict[str, Any] = {"api": "chat", "progress": {"phase": "prefill"}}
OVER: dict[str, Any] = {"api": "chat", "progress": None}
WARMS: dict[str, Any] = {"api": "warm", "progress": {"phase": "prefill"}}


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([], "no sessions yet"),
        ([OVER, WARMS], "no sessions yet"),
        ([RUNS, WARMS], "The first session is being computed"),
        ([RUNS, OVER, RUNS], "The first sessions are being computed"),
    ],
)
def test_sessions_being_computed_are_announced(requests: list[dict[str, Any]], words: str):
    """Warm requests and finished requests do not count."""

    def answer(request: BaseHTTPRequestHandler) -> Any:
        data = requests if request.path == "/v1/requests" else []
        return {"object": "list", "data": data}

    with answering(answer) as url:
        result = CliRunner().invoke(app, ["sessions", "--url", url])
        assert result.exit_code == 0, result.output
        assert words in result.output
        listed = CliRunner().invoke(app, ["sessions", "--json", "--url", url])
        assert json.loads(listed.output) == {"object": "list", "data": []}
