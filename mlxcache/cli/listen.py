"""The server's listening sockets, opened before the model loads."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress

import psutil

from mlxcache.cli.connect import base_url
from mlxcache.cli.remote import NoServer, Remote
from mlxcache.errors import MlxcacheError

IN_USE = "is in use by"
"""Words of the error that a port is taken, by which `launch` recognises it in a server's log."""

CONNECT_S = 1.0
"""Timeout to connect to an address of this machine; one that a firewall drops counts as free."""

Address = tuple[object, ...]
Probe = Callable[[socket.AddressFamily, Address], bool]


class CannotListen(MlxcacheError):
    """The address is in use, does not belong to this machine, or is not allowed."""


class PortTaken(CannotListen):
    """Another program listens on the port: `holder`, which is another mlxcache if `serves`."""

    def __init__(self, host: str, port: int):
        model = served_there(base_url(host, port))
        self.serves = model is not None
        self.holder = model or find_holder(port) or "another program"
        super().__init__(
            f"port {port} of {host} {IN_USE} {self.holder}: stop it, or choose "
            "another port with --port N (0 picks a free one)"
        )


def accepts(family: socket.AddressFamily, address: Address) -> bool:
    """Connect to `address`, and return True if a program accepts. Blocks up to `CONNECT_S`.

    False for an address that this machine does not have, and for one that does not answer.
    """
    host, port, *scope = address
    with socket.socket(family, socket.SOCK_STREAM) as probe, suppress(OSError):
        if host not in ("0.0.0.0", "::"):
            with socket.socket(family, socket.SOCK_STREAM) as own:
                own.bind((host, 0, *scope))  # fails for an address of another machine
        probe.settimeout(CONNECT_S)
        probe.connect((_LOOPBACK.get(str(host), host), port, *scope))
        # a port without a listener may be the one that the probe itself was given
        return bool(probe.getsockname() != probe.getpeername())
    return False


_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses that reach a listener on every address."""


def is_taken(host: str, port: int, probe: Probe = accepts) -> bool:
    """Return True if a program listens on `port` of any address of `host`. Raises CannotListen."""
    return any(probe(family, address) for family, _, address in _addresses(host, port))


def listen(host: str, port: int, probe: Probe = accepts) -> list[socket.socket]:
    """Open sockets on every address of `host` on this machine; port 0 picks one port for all.

    `probe` tells whether a program listens at an address. It is asked before binding: with
    SO_REUSEADDR, macOS lets 127.0.0.1 be bound beside a listener on all addresses, whose
    connections would then come here. Raises CannotListen, with the flag to change.
    """
    found = _addresses(host, port)
    sockets: list[socket.socket] = []
    failure: OSError | None = None
    if port and any(probe(family, address) for family, _, address in found):
        raise PortTaken(host, port)
    for family, protocol, address in found:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM, protocol)
            sockets.append(_bound(sock, address, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                _close(sockets)
                raise PortTaken(host, port) from error
            failure = error  # e.g. ::1 for localhost without IPv6
            continue
        port = int(sockets[-1].getsockname()[1])
    if not sockets:
        reason = failure.strerror if failure else "no address"
        raise CannotListen(f"cannot listen on {host}, port {port}: {reason}") from failure
    return sockets


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, int, Address]]:
    """Resolve `host` to its families, protocols and addresses. Raises CannotListen."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # no name, or one that cannot be a name
        raise CannotListen(f"--host {host} is not an address of this machine: {error}") from error
    return list(dict.fromkeys((family, protocol, to) for family, _, protocol, _, to in found))


def _bound(sock: socket.socket, address: Address, port: int) -> socket.socket:
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


# -- the program that has the port -------------------------------------------------------------


def served_there(url: str) -> str | None:
    """Describe the mlxcache server at `url` by its model; None if none answers there."""
    try:
        found = Remote(url).health()
    except NoServer:  # `url` is no address
        return None
    if found is None:
        return None
    return f"mlxcache, which serves {found['model']}" if found.get("model") else "mlxcache"


def find_holder(port: int) -> str | None:
    """Name and id of the process that listens on `port`; None if it is another user's.

    Reads one process after the other: on a Mac only root may list all connections at once.
    """
    for process in psutil.process_iter():
        try:
            found = process.net_connections("tcp")
            if any(one.status == psutil.CONN_LISTEN and one.laddr[1] == port for one in found):
                return f"{process.name()} (process {process.pid})"
        except (psutil.Error, OSError):  # it ended, or is another user's
            continue
    return None
