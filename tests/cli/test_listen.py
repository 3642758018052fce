"""The port is opened, or a sentence says what to type instead."""

import socket

import pytest

from mlxcache.cli.listen import CannotListen, listen


def close(sockets):
    for sock in sockets:
        sock.close()


def test_port_zero_picks_a_free_one():
    """And every address of the host gets the same."""
    sockets = listen("localhost", 0)
    ports = {sock.getsockname()[1] for sock in sockets}
    close(sockets)
    assert len(ports) == 1
    assert ports.pop() > 0


def test_a_port_in_use_is_told_with_the_way_out():
    """The commonest failure of all: another server, or this one twice."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(CannotListen, match=f"port {port} .* in use .*--port"):
            listen("127.0.0.1", port)


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.7"])
def test_an_address_of_another_machine_is_refused(host):
    """A name that means nothing, and an address that is not ours."""
    with pytest.raises(CannotListen, match=host):
        listen(host, 0)
