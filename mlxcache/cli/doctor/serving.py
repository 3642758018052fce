"""Checks of the port and of running servers."""

from __future__ import annotations

from typing import Any

import httpx

from mlxcache.cli import show
from mlxcache.cli.doctor.finding import Finding
from mlxcache.cli.listen import IN_USE, CannotListen, PortTaken, listen
from mlxcache.cli.own_command import own_command
from mlxcache.cli.remote import Remote, proxied
from mlxcache.config import Settings
from mlxcache.errors import MlxcacheError
from mlxcache.store.lock import servers

HEALTH_S = 2.0


def examine_port(settings: Settings) -> Finding:
    """Check that a server could listen on the host and port of the settings.

    The status is also `ok` if an mlxcache server listens there already. It is `fail` if another
    program does, or if the host is not an address of this machine.
    """
    if settings.port == 0:
        return Finding("port", "ok", "0: any free port")
    try:
        for one in listen(settings.host, settings.port):
            one.close()
    except PortTaken as error:
        if error.serves:
            return Finding("port", "ok", f"{settings.port}: mlxcache serves there")
        value = f"{settings.port} {IN_USE} {error.holder}"
        remedy = "stop it, or use another port: --port 0 picks a free one"
        return Finding("port", "fail", value, remedy)
    except CannotListen as error:
        return Finding("port", "fail", str(error), "set --host to an address of this machine")
    return Finding("port", "ok", f"{settings.port} of {settings.host} is free")


def examine_servers(settings: Settings, url: str) -> list[Finding]:
    """Check the health of the servers that use the cache folder, and of one at `url` if it runs.

    Returns a finding for each of them, or a single one if none runs. Blocks while they are asked.
    """
    known = [one.url for one in servers(settings.cache_dir)]
    urls = known if url in known else [*known, url]
    key = next(iter(settings.api_key), None)
    found = [_server(one, key, named=one in known) for one in urls]
    shown = [one for one in found if one is not None]
    return shown or [Finding("server", "ok", f"none runs: start one with {own_command()} serve")]


def _server(url: str, key: str | None, *, named: bool) -> Finding | None:
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
    models = _models(url, key)
    if len(models) > 1:
        states = (f"{one['id']} ({show.model_state(one)})" for one in models)
        value = f"{url} serves {', '.join(states)}"
    return Finding("server", "ok", value)


def _models(url: str, key: str | None) -> list[dict[str, Any]]:
    """Return the objects that the server at `url` lists in `GET /v1/models`.

    `key`: the API key to send, or None. Returns [] if the request fails, as with a wrong key.
    """
    try:
        return Remote(url, key).models()
    except MlxcacheError:
        return []
