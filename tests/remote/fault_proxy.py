"""HTTP proxy in front of an S3 server that is stopped, frozen, slow, wrong or refuses writes."""

from __future__ import annotations

import http.client
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

Fault = Literal["none", "gone", "frozen", "slow", "garbage", "damaged", "read-only", "busy"]

_PART = 16 * 1024


class FaultProxy:
    def __init__(self, host: str, port: int):
        self.upstream = (host, port)
        self.fault: Fault = "none"
        self.rate = 1e6
        self.requests: list[tuple[str, str]] = []
        self._thawed = threading.Event()
        self._server = _Server(self)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def set(self, fault: Fault, rate: float = 1e6) -> None:
        self.fault, self.rate = fault, rate
        self._thawed.set()
        self._thawed = threading.Event()

    def freeze(self) -> None:
        self._thawed.wait(60)

    def close(self) -> None:
        self._thawed.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, proxy: FaultProxy):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.proxy = proxy


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

    def _forward(self) -> None:
        fault = self.server.proxy.fault
        self.server.proxy.requests.append((self.command, self.path))
        if fault in ("gone", "frozen", "garbage"):
            self.close_connection = True
            if fault == "frozen":
                self.server.proxy.freeze()
            elif fault == "garbage":
                self.wfile.write(b"\x00\xff\x13 no HTTP \r\n\r\n" * 20)
            return
        body = self._read(int(self.headers.get("content-length", 0)))
        if fault == "busy":
            self._answer(503, [], b"<Error><Code>SlowDown</Code></Error>")
            return
        if fault == "read-only" and self.command in ("PUT", "POST", "DELETE"):
            self._answer(403, [], b"<Error><Code>AccessDenied</Code></Error>")
            return
        upstream = http.client.HTTPConnection(*self.server.proxy.upstream, timeout=30)
        upstream.request(self.command, self.path, body, dict(self.headers.items()))
        answer = upstream.getresponse()
        content = answer.read()
        upstream.close()
        if fault == "damaged" and self.command == "GET" and content:
            content = content[:-1] + bytes((content[-1] ^ 1,))
        self._answer(answer.status, answer.getheaders(), content)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _forward

    def _read(self, length: int) -> bytes:
        parts = []
        while length:
            part = self.rfile.read(min(_PART, length))
            if not part:
                break
            parts.append(part)
            length -= len(part)
            if self.server.proxy.fault == "slow":
                time.sleep(len(part) / self.server.proxy.rate)
        return b"".join(parts)

    def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes) -> None:
        left_out = ("connection", "transfer-encoding", "content-length", "date", "server")
        self.send_response(status)
        known = {name.lower(): value for name, value in headers}
        length = known.get("content-length", "0") if self.command == "HEAD" else len(content)
        for name, value in headers:
            if name.lower() not in left_out:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return
        for start in range(0, len(content), _PART):
            part = content[start : start + _PART]
            self.wfile.write(part)
            if self.server.proxy.fault == "slow":
                time.sleep(len(part) / self.server.proxy.rate)

    def handle(self) -> None:
        try:
            super().handle()
        except (ConnectionError, TimeoutError):
            return  # the client went away
