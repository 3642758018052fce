"""A program that answers HTTP requests, such as those of commands to a server."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = Callable[[BaseHTTPRequestHandler], Any]
"""Returns what a request is answered with, as JSON; None if it was answered already."""


@contextmanager
def answering(answer: Answer, *, port: int = 0, ours: bool = True) -> Iterator[str]:
    """Answer requests, as an mlxcache server if the program is `ours`; yield its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = answer(self)
            if found is not None:
                body = json.dumps(found).encode()
                self.send_response(200)
                if ours:
                    self.send_header("X-Mlxcache-Request", "req_0")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
