"""The server's listening sockets, opened before the model loads."""

from __future__ import annotations

import errno
import socket

from mlxcache.errors import MlxcacheError

IN_USE = "is in use by another program"


class CannotListen(MlxcacheError):
    """The address is in use, does not belong to this machine, or is not allowed."""


def listen(host: str, port: int) -> list[socket.socket]:
    """Open sockets on every address of `host` on this machine; port 0 picks one port for all.

    Raises CannotListen, with the flag to change.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise CannotListen(f"--host {host} is not an address of this machine: {error}") from error
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    for family, kind, protocol, _, address in dict.fromkeys(found):
        try:
            sockets.append(_bound(socket.socket(family, kind, protocol), address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                _close(sockets)
                raise CannotListen(
                    f"port {port} of {host} {IN_USE}: stop it, or choose "
                    "another port with --port N (0 picks a free one)"
                ) from error
            failure = error  # e.g. ::1 for localhost without IPv6
            continue
        port = int(sockets[-1].getsockname()[1])
    if not sockets:
        reason = failure.strerror if failure else "no address"
        raise CannotListen(f"cannot listen on {host}, port {port}: {reason}") from failure
    return sockets


def _bound(sock: socket.socket, address: tuple[object, ...], port: int) -> socket.socket:
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((address[0], port))
        sock.setblocking(False)
    except OSError:
        sock.close()
        raise
    return sock


def _close(sockets: list[socket.socket]) -> None:
    for sock in sockets:
        sock.close()
