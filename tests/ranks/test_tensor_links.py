"""Connections between ranks fail when the link is cut, instead of waiting for minutes."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator

import pytest

from mlxcache.ranks.tensor_links import IDLE_S, with_probes

IDLE: int = getattr(socket, "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def is_probed(connection: socket.socket) -> bool:
    """The operating system asks the other side of a connection that is silent."""
    on = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    return bool(on) and connection.getsockopt(socket.IPPROTO_TCP, IDLE) == IDLE_S


def test_connections_made_meanwhile_are_probed(listener: socket.socket):
    """And no other: a client of the server may be silent for longer."""
    with socket.create_connection(listener.getsockname()) as before:
        made = with_probes(lambda: socket.create_connection(listener.getsockname()))
        with made:
            assert is_probed(made)
            assert not is_probed(before)
            made.sendall(b"goes on")
