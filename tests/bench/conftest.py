"""A fake server in this process, for what only needs a wire."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from mlxcache.bench.client import Client
from tests.bench.fake_server import Handler


class _Quiet(Handler):
    def log_message(self, format: str, *args: object) -> None:
        """Nothing: pytest has its own output."""


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a fake server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Quiet)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield Client(server.server_address[1], "any", timeout=5.0)
    server.shutdown()
    thread.join()
    server.server_close()
