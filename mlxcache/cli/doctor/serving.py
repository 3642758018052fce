"""The port, and who answers there."""

from __future__ import annotations

import socket
from typing import Any

import httpx
import psutil

from mlxcache.cli.doctor.finding import Finding
from mlxcache.cli.listen import CannotListen, listen
from mlxcache.cli.remote import Remote, proxied
from mlxcache.config import Settings
from mlxcache.store.lock import servers

HEALTH_S = 2.0


def examine_port(settings: Settings, url: str) -> Finding:
    """Whether a server could listen there, or which one does."""
    if settings.port == 0:
        return Finding("port", "ok", "0: any that is free")
    try:
        for one in listen(settings.host, settings.port):
            one.close()
    except CannotListen as error:
        if not _taken(settings):
            return Finding("port", "fail", str(error), "choose an address of this machine: --host")
        return _occupied(settings.port, url)
    return Finding("port", "ok", f"{settings.port} of {settings.host} is free")


def _taken(settings: Settings) -> bool:
    with socket.socket() as probe:
        probe.settimeout(HEALTH_S)
        return probe.connect_ex((_reachable(settings.host), settings.port)) == 0


def _reachable(host: str) -> str:
    return "127.0.0.1" if host in ("0.0.0.0", "::", "localhost", "::1") else host


def _occupied(port: int, url: str) -> Finding:
    if Remote(url).answers():
        return Finding("port", "ok", f"{port}: mlxcache serves there")
    holder = _holder(port)
    value = f"{port} is in use by {holder or 'another program'}"
    return Finding("port", "fail", value, "stop it, or serve on another port: --port 0 picks one")


def _holder(port: int) -> str | None:
    """Which program listens on a port, if the system tells."""
    try:
        for one in psutil.net_connections("tcp"):
            listens = one.status == psutil.CONN_LISTEN
            if listens and getattr(one.laddr, "port", None) == port and one.pid:
                return f"{psutil.Process(one.pid).name()} (process {one.pid})"
    except (psutil.Error, OSError):  # a Mac tells root alone
        return None
    return None


def examine_servers(settings: Settings, url: str) -> list[Finding]:
    """The servers that run on the cache folder, or at `url`: each one's model and state."""
    known = [one.url for one in servers(settings.cache_dir)]
    urls = known if url in known else [*known, url]
    found = [_server(one, named=one in known) for one in urls]
    shown = [one for one in found if one is not None]
    return shown or [Finding("server", "ok", "none runs: mlxcache serve starts one")]


def _server(url: str, *, named: bool) -> Finding | None:
    try:
        response = httpx.get(f"{url}/health", timeout=HEALTH_S, trust_env=proxied(url))
    except httpx.HTTPError as error:
        if not named:
            return None
        value = f"{url} does not answer ({type(error).__name__})"
        return Finding("server", "warn", value, "wait, or stop it and start it again")
    if "X-Mlxcache-Request" not in response.headers:
        return None
    try:
        body: dict[str, Any] = response.json()
    except ValueError:
        body = {}
    state = body.get("status", response.status_code)
    value = f"{url} serves {body['model']}" if body.get("model") else f"{url}: {state}"
    if response.status_code != httpx.codes.OK:
        remedy = "its log says more; a model that loads answers 503 until it is there"
        return Finding("server", "warn", value, remedy)
    return Finding("server", "ok", value)
