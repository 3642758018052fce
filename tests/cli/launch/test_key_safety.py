"""The API key is sent to mlxcache servers only: to no proxy, and to no other program."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from mlxcache.cli.launch.clients import Invocation, Service, Setup, proxy_bypass
from mlxcache.cli.launch.launching import setup_object, shell_lines
from mlxcache.cli.launch.processes import query_server
from mlxcache.cli.remote import NoServer, Remote, proxied
from tests.cli.answering import answering

KEY = "a-key-of-its-own"


class Program:
    """A program that answers every request; `requests` has their paths and keys."""

    def __init__(self, stack: ExitStack, *, ours: bool):
        self.requests: list[tuple[str, str | None]] = []
        self.url = stack.enter_context(answering(self._answer, ours=ours))

    def _answer(self, request: BaseHTTPRequestHandler) -> Any:
        self.requests.append((request.path, request.headers.get("Authorization")))
        return {"data": [{"id": "m", "context_length": 9}]}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def test_the_key_is_sent_only_after_the_server_has_identified_itself(stack: ExitStack) -> None:
    stranger, ours = Program(stack, ours=False), Program(stack, ours=True)
    assert Remote(stranger.url, KEY).health() is None
    with pytest.raises(NoServer):
        query_server(stranger.url, KEY)
    assert stranger.requests == [("/health", None)] * 2
    found = query_server(ours.url, KEY)
    assert found is not None
    assert found.model == "m"
    assert ours.requests == [("/health", None), ("/v1/models", f"Bearer {KEY}")]


def test_requests_to_this_machine_use_no_proxy(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proxies of the environment are used for other machines only."""
    proxy, ours = Program(stack, ours=True), Program(stack, ours=True)
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
