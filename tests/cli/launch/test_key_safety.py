"""The API key is sent to mlxcache servers only: to no proxy, and to no other program."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlxcache.cli.launch.clients import Invocation, Service, Setup, proxy_bypass
from mlxcache.cli.launch.launching import setup_object, shell_lines
from mlxcache.cli.launch.processes import query_server
from mlxcache.cli.remote import NoServer, Remote, proxied

KEY = "a-key-of-its-own"


class Program(ThreadingHTTPServer):
    """A program that answers every request; `requests` has their paths and keys."""

    def __init__(self, *, ours: bool):
        self.requests: list[tuple[str, str | None]] = []
        super().__init__(("127.0.0.1", 0), self._answer(ours))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def _answer(self, ours: bool) -> type[BaseHTTPRequestHandler]:
        requests = self.requests
        body = b'{"data": [{"id": "m", "context_length": 9}]}'

        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                requests.append((self.path, self.headers.get("Authorization")))
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                if ours:
                    self.send_header("X-Mlxcache-Request", "req_1")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing."""

        return Answer


@pytest.fixture
def program() -> Iterator[Callable[[bool], Program]]:
    made: list[Program] = []

    def make(ours: bool) -> Program:
        made.append(Program(ours=ours))
        threading.Thread(target=made[-1].serve_forever, args=(0.02,), daemon=True).start()
        return made[-1]

    yield make
    for one in made:
        one.shutdown()
        one.server_close()


def test_the_key_is_sent_only_after_the_server_has_identified_itself(
    program: Callable[[bool], Program],
) -> None:
    """`GET /health` is sent without the key."""
    stranger, ours = program(False), program(True)
    assert Remote(stranger.url, KEY).health() is None
    with pytest.raises(NoServer):
        query_server(stranger.url, KEY)
    assert stranger.requests == [("/health", None)] * 2
    found = query_server(ours.url, KEY)
    assert found is not None
    assert found.model == "m"
    assert ours.requests == [("/health", None), ("/v1/models", f"Bearer {KEY}")]


def test_requests_to_this_machine_use_no_proxy(
    program: Callable[[bool], Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies of the environment are used for other machines only."""
    proxy, ours = program(True), program(True)
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, proxy.url)
    assert Remote(ours.url, KEY).health() is not None
    assert Remote(ours.url, KEY).stats()["data"]
    assert query_server(ours.url, KEY) is not None
    assert proxy.requests == []
    assert proxied("http://gpu.example:8081")
    assert not any(map(proxied, ("http://localhost:8081", "http://[::1]:8081")))


@pytest.mark.parametrize(
    ("url", "environ", "expected"),
    [
        ("http://127.0.0.1:8081", {}, None),
        ("http://127.0.0.1:8081", {"https_proxy": "http://p"}, "127.0.0.1"),
        (
            "http://127.0.0.1:8081",
            {"HTTP_PROXY": "http://p", "no_proxy": ".corp"},
            ".corp,127.0.0.1",
        ),
        ("http://gpu.example:8081", {"HTTP_PROXY": "http://p"}, None),
    ],
)
def test_clients_use_no_proxy_to_this_machine(
    url: str, environ: dict[str, str], expected: str | None
) -> None:
    """`launch` sets NO_PROXY for the client if a proxy is set."""
    service, setup = Service(url, "m", 9), Setup(variables={"X": "1"})
    variables = setup.environment(service, environ)
    given = environ.get("NO_PROXY")
    assert variables.get("NO_PROXY", given) == (expected or given)
    assert proxy_bypass(service, environ) == (
        {"NO_PROXY": expected, "no_proxy": expected} if expected else {}
    )
    invocation = Invocation(Path("c"), (), environ, Path("/"), Path("/"))
    assert ("NO_PROXY" in setup_object(setup, service, invocation)["set"]) is bool(expected)
    assert ("export NO_PROXY=" in "\n".join(shell_lines(setup, service, environ))) is bool(expected)
