"""Listening sockets, and errors with the flag to change."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.server import BaseHTTPRequestHandler

import pytest

from mlxcache.cli import listen as listening
from mlxcache.cli.listen import CannotListen, PortTaken, accepts, find_holder, is_taken, listen
from tests.cli.answering import answering


def close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()


@contextmanager
def listener(host: str) -> Iterator[int]:
    """A port on which another program listens at `host`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with closing(socket.socket(family)) as taken:
        taken.bind((host, 0))
        taken.listen()
        yield int(taken.getsockname()[1])


def beside(sock: socket.socket, address: tuple[object, ...], port: int) -> socket.socket:
    """Bind as macOS does with SO_REUSEADDR: also beside a listener on all addresses."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    return sock


def test_port_zero_picks_a_free_one() -> None:
    """The same for every address of the host."""
    sockets = listen("localhost", 0)
    ports = {sock.getsockname()[1] for sock in sockets}
    close(sockets)
    assert len(ports) == 1
    assert ports.pop() > 0


def test_port_zero_needs_no_probe() -> None:
    """Port 0 cannot be connected to."""

    def probe(*_: object) -> bool:
        raise AssertionError("asked")

    close(listen("127.0.0.1", 0, probe))


def test_a_port_in_use_is_reported_with_the_flag_to_change() -> None:
    """As when a server is started twice; the program that has the port is named."""
    with listener("127.0.0.1") as port:
        own = rf"port {port} of 127.0.0.1 is in use by .*\(process {os.getpid()}\).*--port"
        with pytest.raises(PortTaken, match=own) as caught:
            listen("127.0.0.1", port)
        assert not caught.value.serves


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [("0.0.0.0", "127.0.0.1"), ("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "localhost")],
)
def test_a_listener_on_all_addresses_is_found_where_binding_would_succeed(
    theirs: str, ours: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """macOS binds 127.0.0.1 beside it, and would send its connections here."""
    monkeypatch.setattr(listening, "_bound", beside)
    with listener(theirs) as port:
        with pytest.raises(PortTaken, match=f"port {port} .* is in use by"):
            listen(ours, port)
        assert is_taken(ours, port)
    close(listen(ours, port))


def test_a_port_that_only_the_bind_finds_in_use_is_reported_too() -> None:
    """As where a firewall drops the connection."""
    with listener("127.0.0.1") as port, pytest.raises(PortTaken, match="--port N"):
        listen("127.0.0.1", port, lambda *_: False)


def test_no_other_machine_is_connected_to() -> None:
    """Its server would be taken for one of this machine."""
    assert not accepts(socket.AF_INET, ("203.0.113.7", 80))


@pytest.mark.parametrize(
    ("family", "host", "reached"),
    [(socket.AF_INET, "0.0.0.0", "127.0.0.1"), (socket.AF_INET6, "::", "::1")],
)
def test_all_addresses_are_asked_at_this_machines_own(
    family: socket.AddressFamily, host: str, reached: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every system connects to the address that stands for all."""
    asked = []

    class Noted(socket.socket):
        def connect(self, address: tuple[object, ...]) -> None:  # type: ignore[override]
            asked.append(address[0])
            raise ConnectionRefusedError

    monkeypatch.setattr(socket, "socket", Noted)
    assert not accepts(family, (host, 8081))
    assert asked == [reached]


def test_a_free_port_is_not_taken_for_the_probes_own() -> None:
    """A connection to a port of one's own, which Linux and macOS allow, is no listener."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]

    class OnThatPort(socket.socket):
        def connect(self, address: tuple[object, ...]) -> None:  # type: ignore[override]
            super().bind(("127.0.0.1", port))
            super().connect(address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", OnThatPort)
        assert not accepts(socket.AF_INET, ("127.0.0.1", port))


def test_an_mlxcache_that_has_the_port_is_named_with_its_model() -> None:
    """Its process would say less."""
    named = r"in use by mlxcache, which serves org/name"
    with (
        answering(lambda _: {"status": "ok", "model": "org/name"}) as url,
        pytest.raises(PortTaken, match=named) as caught,
    ):
        listen("127.0.0.1", int(url.rpartition(":")[2]))
    assert caught.value.serves


def test_a_port_without_a_listener_has_no_holder() -> None:
    """Nor is an error raised for processes of other users."""
    with listener("127.0.0.1") as port:
        assert f"(process {os.getpid()})" in str(find_holder(port))
    assert find_holder(port) is None


def test_a_program_whose_answer_has_no_end_is_not_waited_for() -> None:
    """A camera's video, for example: some listen on 8081 too, and answer every path."""
    over = threading.Event()

    def video(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.end_headers()
        with suppress(OSError):
            while not over.wait(0.01):
                request.wfile.write(b"frame")

    stop = threading.Timer(5.0, over.set)
    stop.start()
    with answering(video) as url:
        with pytest.raises(PortTaken, match=rf"\(process {os.getpid()}\)"):
            listen("127.0.0.1", int(url.rpartition(":")[2]))
        assert not over.is_set()
        stop.cancel()
        over.set()


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7", "a" * 64])
@pytest.mark.parametrize("port", [0, 8081])
def test_an_address_of_another_machine_is_refused(host: str, port: int) -> None:
    """An unknown name, and an address that this machine does not have."""
    with pytest.raises(CannotListen, match=host):
        listen(host, port)
