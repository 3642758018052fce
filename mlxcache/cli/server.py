"""One process, one event loop: the port, the engine behind it, and a clean end.

The port answers from the first moment (503 while the model loads). The first Ctrl-C or SIGTERM
ends every reply, keeps what was computed, and closes; a second one ends at once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from rich.console import Console

from mlxcache.api.app import create_app
from mlxcache.api.http import ApiSettings
from mlxcache.api.record import Recorder
from mlxcache.cli import descriptors
from mlxcache.cli.connect import base_url
from mlxcache.cli.listen import listen
from mlxcache.cli.output import Loading, log_line
from mlxcache.cli.protocol import Protocol
from mlxcache.cli.sharing import sharing
from mlxcache.cli.show import print_run_summary
from mlxcache.cli.warming import warm_files
from mlxcache.cli.welcome import welcome
from mlxcache.config import Keys, Settings, read_keys
from mlxcache.engine.engine import Engine
from mlxcache.errors import ModelError
from mlxcache.types import RequestRecord

STOP_SECONDS = 7
"""How long the engine and the connections may take to end; the whole stays below ten seconds."""
FAREWELL_SECONDS = 1
"""How long a server whose MLX thread died answers at least, so that clients are told."""
KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep idle connections, so that none reuses one that has just been closed."""
SWITCH_SECONDS = 0.001
"""How long a thread of Python's may keep others waiting: 5 ms, the default, show in a warm turn."""

log = logging.getLogger("mlxcache.requests")
owners = logging.getLogger("mlxcache.server")


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `run`, which ends the engine's replies first."""
        yield


def _log_request(record: RequestRecord) -> None:
    log.info("%s", log_line(record))


async def run(settings: Settings, console: Console) -> None:
    """Serve until a signal. Raises CannotListen, ModelError or ConfigError if that cannot be.

    ModelError also where the MLX thread died: whoever watches this process then starts another.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    descriptors.raise_limit()
    descriptors.tell_rarely(asyncio.get_running_loop())
    keys = read_keys(settings)
    sockets = listen(settings.host, settings.port)
    url = base_url(settings.host, sockets[0].getsockname()[1])
    with sharing(settings, url):
        await _serve(settings, keys, console, sockets, url)


async def _serve(
    settings: Settings, keys: Keys, console: Console, sockets: list[socket.socket], url: str
) -> None:
    stop = asyncio.Event()
    recorder = Recorder(settings.record) if settings.record is not None else None
    _on_signals(stop, console)
    with Loading(console) as progress:
        engine = Engine(settings, progress, _log_request)
        api = _api(settings, keys, recorder)
        server = _Server(_config(create_app(engine, api)))
        serving = asyncio.create_task(server.serve(sockets))
        try:
            loaded = await _load(engine, stop)
        except BaseException:
            await _end(server, serving, engine)
            raise
    if loaded and engine.info is not None:
        welcome(console, url, engine.info, engine.figures(), has_key=bool(keys.values))
        warming = asyncio.create_task(warm_files(engine, settings.warm, api.owned_keys))
        await _first(stop, engine.dead)
        warming.cancel()
    if engine.dead.is_set():
        await _farewell(server, engine)
    await _end(server, serving, engine)
    figures = engine.figures()
    if figures.get("requests", {}).get("total"):
        print_run_summary(console, figures, engine.tally)
    if recorder is not None:
        recorder.close()
    if engine.dead.is_set():
        raise ModelError(f"{engine.failure} Start the server again: it goes on from disk.")


def _api(settings: Settings, keys: Keys, recorder: Recorder | None) -> ApiSettings:
    """How the API behaves. One key by itself is everybody's."""
    if keys.owned:
        named = f", {', '.join(keys.names)} among them" if keys.names else ""
        owners.info("%d keys, each with sessions of its own%s", len(keys.values), named)
    return ApiSettings(
        api_key=None if keys.owned else next(iter(keys.values), None),
        owned_keys=keys.values if keys.owned else (),
        origins=frozenset(settings.allow_origin),
        default_max_tokens=settings.max_tokens,
        any_host=settings.insecure,
        recorder=recorder,
    )


def _config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type] # uvicorn's own type is stricter than ASGI's
        http=Protocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=STOP_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


async def _load(engine: Engine, stop: asyncio.Event) -> bool:
    """Start `engine`; False if `stop` came first. Raises ModelError or ConfigError."""
    loading = asyncio.create_task(engine.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if loading.done():
        await loading
        return True
    loading.cancel()
    return False


async def _first(*events: asyncio.Event) -> None:
    """Wait for any of `events`."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


async def _farewell(server: uvicorn.Server, engine: Engine) -> None:
    """Say in /health what has happened while what the MLX thread held goes to disk."""
    server.config.timeout_graceful_shutdown = FAREWELL_SECONDS
    await asyncio.gather(engine.stop(STOP_SECONDS), asyncio.sleep(FAREWELL_SECONDS))


async def _end(server: uvicorn.Server, serving: asyncio.Task[None], engine: Engine) -> None:
    server.should_exit = True
    # What is cut off at the end, such as a request whose body never came, is cut off on purpose.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    await asyncio.gather(engine.stop(STOP_SECONDS), serving)


def _on_signals(stop: asyncio.Event, console: Console) -> None:
    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)  # asked for twice: nothing that could hang is waited for
        console.print("Stopping; once more to end at once.")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
