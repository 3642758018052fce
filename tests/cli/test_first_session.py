"""Output of `mlxcache sessions` while the first prompt is being computed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest
from typer.testing import CliRunner

from mlxcache.cli.main import app


class Handler(BaseHTTPRequestHandler):
    """A server without sessions that lists `requests`."""

    requests: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("X-Mlxcache-Request", "req_0")
        self.end_headers()
        data = self.requests if self.path == "/v1/requests" else []
        self.wfile.write(json.dumps({"object": "list", "data": data}).encode())

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


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
def test_sessions_being_computed_are_announced(
    url: str, monkeypatch: pytest.MonkeyPatch, requests: list[dict[str, Any]], words: str
):
    """Warm requests and finished requests do not count."""
    monkeypatch.setattr(Handler, "requests", requests)
    result = CliRunner().invoke(app, ["sessions", "--url", url])
    assert result.exit_code == 0, result.output
    assert words in result.output
    listed = CliRunner().invoke(app, ["sessions", "--json", "--url", url])
    assert json.loads(listed.output) == {"object": "list", "data": []}
