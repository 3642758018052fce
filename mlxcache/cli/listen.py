"""Open the server's listening sockets before the model loads, and find out who holds a port."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from contextlib import suppress

import psutil

from mlxcache.cli.connect import base_url
from mlxcache.errors import MlxcacheError

IN_USE = "is in use by"
"""Text in the error for a taken port, by which `launch` recognises that error in a server's log."""

CONNECT_S = 1.0
"""Timeout in seconds to connect to an address, which counts as free without an answer."""

Address = tuple[object, ...]
Probe = Callable[[socket.AddressFamily, Address], bool]


class CannotListen(MlxcacheError):
    """Error raised if the server cannot listen at an address."""


class PortTaken(CannotListen):
    """Error raised if another program, described by `holder`, is listening on the port.

    `serves` is True if it is an mlxcache server.
    """

    def __init__(self, host: str, port: int):
        model = served_there(base_url(host, port))
        self.serves = model is not None
        self.holder = model or find_holder(port) or "another program"
        super().__init__(
            f"port {port} of {host} {IN_USE} {self.holder}: stop it, or choose "
            "another port with --port N (0 picks a free one)"
        )


def accepts(family: socket.AddressFamily, address: Address) -> bool:
    """Return whether a program accepts connections at `address`. Blocks up to `CONNECT_S`."""
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


def is_taken(host: str, port: int, probe: Probe = accepts) -> bool:
    return any(probe(family, address) for family, _, address in _addresses(host, port))


def listen(host: str, port: int, probe: Probe = accepts) -> list[socket.socket]:
    """Open a socket on every address of `host` that this machine has, or raise CannotListen.

    With port 0, the system picks one port for all of them. `probe` is called before binding,
    because with SO_REUSEADDR macOS lets a program bind 127.0.0.1 although another listens on all
    addresses, and take its connections.
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
                for one in sockets:
                    one.close()
                raise PortTaken(host, port) from error
            failure = error  # e.g. ::1 for localhost without IPv6
            continue
        port = int(sockets[-1].getsockname()[1])
    if not sockets:
        reason = failure.strerror if failure else "no address"
        raise CannotListen(f"cannot listen on {host}, port {port}: {reason}") from failure
    return sockets


def _addresses(host: str, port: int) -> list[tuple[socket.AddressFamily, int, Address]]:
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


# -- the program that has the port -------------------------------------------------------------


def served_there(url: str) -> str | None:
    from mlxcache.cli.remote import NoServer, Remote  # noqa: PLC0415 - takes 50 ms

    try:
        found = Remote(url).health()
    except NoServer:  # `url` is no address
        return None
    if found is None:
        return None
    return f"mlxcache, which serves {found['model']}" if found.get("model") else "mlxcache"


def find_holder(port: int) -> str | None:
    """Describe the program of this user that listens on `port`: "python3 (process 4711)".

    Processes are examined one by one, because on macOS only root may list all connections at once.
    """
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it ended
            if listens(process, port):
                return f"{process.name()} (process {process.pid})"
    return None


def listens(process: psutil.Process, port: int | None) -> bool:
    with suppress(psutil.Error, OSError):  # it ended, or the system does not allow the query
        found = process.net_connections("tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr[1] == port for one in found)
    return False
