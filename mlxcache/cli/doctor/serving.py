"""Checks of the port, and of the servers that run."""

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
    """Check that the port is free, or that an mlxcache server listens on it."""
    if settings.port == 0:
        return Finding("port", "ok", "0: any free port")
    try:
        for one in listen(settings.host, settings.port):
            one.close()
    except CannotListen as error:
        if not _taken(settings):
            return Finding("port", "fail", str(error), "set --host to an address of this machine")
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
    return Finding("port", "fail", value, "stop it, or use another port: --port 0 picks a free one")


def _holder(port: int) -> str | None:
    """Name and id of the process that listens on a port; None if unknown."""
    try:
        for one in psutil.net_connections("tcp"):
            listens = one.status == psutil.CONN_LISTEN
            if listens and getattr(one.laddr, "port", None) == port and one.pid:
                return f"{psutil.Process(one.pid).name()} (process {one.pid})"
    except (psutil.Error, OSError):  # on a Mac only root may list connections
        return None
    return None


def examine_servers(settings: Settings, url: str) -> list[Finding]:
    """Check the state of the servers that use the cache folder, and of the one at `url`."""
    known = [one.url for one in servers(settings.cache_dir)]
    urls = known if url in known else [*known, url]
    found = [_server(one, named=one in known) for one in urls]
    shown = [one for one in found if one is not None]
    return shown or [Finding("server", "ok", "none runs: start one with mlxcache serve")]


def _server(url: str, *, named: bool) -> Finding | None:
    try:
        response = httpx.get(f"{url}/health", timeout=HEALTH_S, trust_env=proxied(url))
    except httpx.HTTPError as error:
        if not named:
            return None
        value = f"{url} does not answer ({type(error).__name__})"
        return Finding("server", "warn", value, "wait, or restart it")
    if "X-Mlxcache-Request" not in response.headers:
        return None
    try:
        body: dict[str, Any] = response.json()
    except ValueError:
        body = {}
    state = body.get("status", response.status_code)
    value = f"{url} serves {body['model']}" if body.get("model") else f"{url}: {state}"
    if response.status_code != httpx.codes.OK:
        remedy = "see its log; the status is 503 while the model loads"
        return Finding("server", "warn", value, remedy)
    return Finding("server", "ok", value)
