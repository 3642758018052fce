"""Notice of lost links between machines, by the operating system's own probes of TCP connections.

MLX's ring waits for a neighbour for as long as the connection exists, and a connection over a cut
cable exists for many minutes. A pass may rightly take long, so its duration shows nothing. But the
operating system of a busy or stopped neighbour still answers probes, and that of one behind a cut
cable does not: the connection then fails, and with it the pass.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

IDLE_S, EVERY_S, PROBES = 2, 1, 3
"""Seconds without data before the first probe, seconds between two probes, and the number of
probes without an answer after which the connection fails.
"""

LOST_S = 5
"""Seconds after which a connection fails if its data or probes are not acknowledged."""

RXT_CONNDROPTIME = 0x80
"""TCP_RXT_CONNDROPTIME of macOS, from netinet/tcp.h, which Python does not name."""


def with_probes(connect: Callable[[], T]) -> T:
    """Call `connect`, switch on TCP keepalive for the connections that it made, return its result.

    The options are those of `probe`. While `connect` runs, no other thread may open a TCP
    connection, because that one would get the options too. A connection for which the system
    refuses them stays as it is. Errors of `connect` are raised.
    """
    before = _descriptors()
    made = connect()
    for descriptor in _descriptors() - before:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                probe(one)
    return made


def probe(connection: socket.socket) -> None:
    """Switch on keepalive for a TCP connection, so that one over a cut cable is noticed.

    The operating system then sends probes while no data arrives. If neither they nor sent data are
    acknowledged for about `LOST_S`, it ends the connection, and reads and writes raise OSError.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _options().items():
        connection.setsockopt(socket.IPPROTO_TCP, name, value)


def _options() -> dict[int, int]:
    idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
    wanted = {idle: IDLE_S, "TCP_KEEPINTVL": EVERY_S, "TCP_KEEPCNT": PROBES}
    wanted["TCP_USER_TIMEOUT"] = 1000 * LOST_S
    found = {getattr(socket, name): value for name, value in wanted.items() if name in vars(socket)}
    if sys.platform == "darwin":
        found[RXT_CONNDROPTIME] = LOST_S
    return found


def _descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/dev/fd"):
        with suppress(OSError, ValueError):
            os.fstat(int(name))  # the folder itself was open, and is not any more
            found.add(int(name))
    return found
