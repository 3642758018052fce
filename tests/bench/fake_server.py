"""A server that answers each chat with `a`, `b` and `c`; run as `fake_server.py PORT [MODE]`.

MODE `deaf` listens and answers nothing but errors; `child` has a child process that must end too.
"""

import json
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECES = ("a", "b", "c")


class Handler(BaseHTTPRequestHandler):
    """`refuse` in the last message is a 503, `break` an error in the stream, `bare` no usage."""

    deaf = False

    def do_GET(self) -> None:
        if self.deaf or self.path == "/absent":
            self.send_error(404)
            return
        self._send(200, {"object": "list", "data": []})

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        body: dict[str, Any] = json.loads(self.rfile.read(length))
        said = body["messages"][-1]["content"]
        if self.deaf or said == "refuse":
            self._send(503, {"error": {"message": "busy"}}, {"Retry-After": "3"})
            return
        self.send_response(200)
        self.send_header("X-Mlxcache-Request", "request-1")
        self.end_headers()
        self.wfile.write(b": still thinking\n\n")
        for piece in PIECES[: body["max_tokens"]]:
            self._event({"choices": [{"delta": {"content": piece}}]})
        if said == "break":
            self._event({"error": {"message": "it broke"}})
        elif said != "bare":
            details = {"cached_tokens": 5}
            usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": details}
            self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, value: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(value).encode() + b"\n\n")
        self.wfile.flush()

    def _send(
        self, status: int, value: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        text = json.dumps(value).encode()
        self.send_response(status)
        for name, header in (headers or {}).items():
            self.send_header(name, header)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        print(format % args, flush=True)


if __name__ == "__main__":
    mode = sys.argv[2] if len(sys.argv) > 2 else ""
    Handler.deaf = mode == "deaf"
    if mode == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        print(f"child {child.pid}", flush=True)
    if mode == "dies":
        sys.exit("no such flag")
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
