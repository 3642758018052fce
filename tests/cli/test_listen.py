"""Listening sockets, and errors with the flag to change."""

import socket

import pytest

from mlxcache.cli.listen import CannotListen, listen


def close(sockets):
    for sock in sockets:
        sock.close()


def test_port_zero_picks_a_free_one():
    """The same for every address of the host."""
    sockets = listen("localhost", 0)
    ports = {sock.getsockname()[1] for sock in sockets}
    close(sockets)
    assert len(ports) == 1
    assert ports.pop() > 0


def test_a_port_in_use_is_reported_with_the_flag_to_change():
    """As when a server is started twice."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port} .* in use .*--port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_of_another_machine_is_refused(host):
    """An unknown name, and an address that this machine does not have."""
    with pytest.raises(CannotListen, match=host):
        listen(host, 0)
