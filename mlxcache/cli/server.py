"""Server process: port, engine, HTTP server, signals, and the shutdown of all of them.

Requests are answered at once, with 503 while the model loads. The first Ctrl-C or SIGTERM ends
every reply, keeps the computed KV, and exits within ten seconds. A second one exits immediately.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from rich.console import Console

from mlxcache.api.app import create_app
from mlxcache.api.cache import warm
from mlxcache.api.http import ApiSettings
from mlxcache.api.record import Recorder
from mlxcache.cli.connect import base_url
from mlxcache.cli.listen import listen
from mlxcache.cli.output import log_line
from mlxcache.cli.own_command import launch_command
from mlxcache.cli.progress import loading_bar
from mlxcache.cli.protocol import Protocol
from mlxcache.cli.reading import show_readings
from mlxcache.cli.show import print_run_summary
from mlxcache.cli.welcome import print_welcome
from mlxcache.config import Keys, Settings, read_keys
from mlxcache.engine.engine import Engine
from mlxcache.engine.models import Models
from mlxcache.errors import MlxcacheError, ModelError, StoreError
from mlxcache.owner import OWNER, owner_of
from mlxcache.ranks.group import Place
from mlxcache.store.lock import InUse, serving
from mlxcache.types import RequestRecord
from mlxcache.wire.chat_bodies import requested_model

if TYPE_CHECKING:
    from mlxcache.remote.objects import Objects

STOP_S = 7
"""Seconds for the engine and the connections to end, so that a stop takes less than ten."""

FAILED_S = 1
"""Minimum seconds for which a server with a dead MLX thread still reports this to clients."""

KEEP_ALIVE_S = 75
"""Seconds before idle connections are closed: longer than clients keep them."""

SWITCH_S = 0.001
"""Python's thread switch interval in seconds; its default, 5 ms, is noticeable in a warm turn."""

DESCRIPTORS = 16_384
"""Limit of open files to set, if allowed; a Mac's default, 256, is too low."""

ACCEPT_REPORT_S = 30.0
"""Minimum seconds between two log lines about connections that cannot be accepted."""

_NONE_LEFT = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

log = logging.getLogger("mlxcache.server")
request_log = logging.getLogger("mlxcache.requests")


async def run(settings: Settings, console: Console, place: Place | None = None) -> None:
    """Run a server until SIGINT or SIGTERM.

    `place`: the place of this process among the ranks if the model is divided among several
    processes; only rank 0 runs a server. None if it is not divided.

    Raises CannotListen if the address cannot be used, ConfigError for wrong settings, InUse if a
    command has locked the cache folder, and ModelError if the model cannot be loaded. A dead MLX
    thread also raises ModelError, so that a supervisor can restart the process.
    """
    sys.setswitchinterval(SWITCH_S)
    _raise_descriptor_limit()
    _limit_accept_errors(asyncio.get_running_loop())
    keys = read_keys(settings)
    sockets = listen(settings.host, settings.port)
    url = base_url(settings.host, sockets[0].getsockname()[1])
    with announced(settings, url) as id:
        remote = await asyncio.to_thread(_open_remote, settings)
        with closing(remote) if remote is not None else nullcontext():
            await _serve(settings, keys, console, sockets, url, id=id, remote=remote, place=place)


def _open_remote(settings: Settings) -> Objects | None:
    """Open the shared remote of the settings, or return None if they have none.

    May block for some seconds. Raises ConfigError if the remote or its key cannot be used.
    """
    if settings.remote is None:
        return None
    from mlxcache.remote.objects import open_configured  # noqa: PLC0415 - only with --remote

    return open_configured(settings)


async def _serve(
    settings: Settings,
    keys: Keys,
    console: Console,
    sockets: list[socket.socket],
    url: str,
    *,
    id: str,
    remote: Objects | None,
    place: Place | None,
) -> None:
    stop = asyncio.Event()
    recorder = Recorder(settings.record) if settings.record is not None else None
    _on_signals(stop, console)
    with loading_bar(console) as progress:
        log_request = partial(_log_request, len(settings.entries) > 1)
        models = Models(settings, progress, log_request, remote=remote, place=place)
        engine, several = models.default, len(models.engines) > 1
        api = _api_settings(settings, keys, recorder, id)
        app = create_app(engine, api, models if several else None)
        server = _HttpServer(_http_config(app))
        serving = asyncio.create_task(server.serve(sockets))
        try:
            loaded = await _load(models, stop)
        except BaseException:
            await _end(server, serving, models)
            raise
    if loaded and engine.info is not None:
        launch = launch_command(url, settings.cache_dir)
        figures = models.figures()
        print_welcome(
            console,
            url,
            engine.info,
            figures,
            launch=launch,
            has_key=bool(keys.values),
            routes=settings.route,
        )
        warming = asyncio.create_task(warm_files(models.of, settings.warm, api.owned_keys))
        showing = asyncio.create_task(show_readings(models.engines, console))
        await _first_of(stop, engine.dead)
        warming.cancel()
        showing.cancel()
    failed = engine.dead.is_set()
    if failed:  # /health reports the failure while what the MLX thread held is written to disk
        await asyncio.gather(models.stop(STOP_S), asyncio.sleep(FAILED_S))
    await _end(server, serving, models, grace_s=FAILED_S if failed else STOP_S)
    figures = models.figures()
    if figures.get("requests", {}).get("total"):
        print_run_summary(console, figures, engine.tally)
    if recorder is not None:
        recorder.close()
    if engine.dead.is_set():
        raise ModelError(f"{engine.failure} Start the server again: it continues from disk.")


def _log_request(several: bool, record: RequestRecord) -> None:
    """Log a finished request, with its model's name if the server has `several` models."""
    request_log.info("%s", log_line(record, several=several))


def _api_settings(
    settings: Settings, keys: Keys, recorder: Recorder | None, id: str
) -> ApiSettings:
    """Derive the API's settings from the server's.

    Several API keys each own their sessions. A single key only restricts access.
    """
    if keys.owned:
        named = f"; named keys: {', '.join(keys.names)}" if keys.names else ""
        log.info("%d API keys read, each with its own sessions%s", len(keys.values), named)
    return ApiSettings(
        api_key=None if keys.owned else next(iter(keys.values), None),
        owned_keys=keys.values if keys.owned else (),
        origins=frozenset(settings.allow_origin),
        default_max_tokens=settings.max_tokens,
        any_host=settings.insecure,
        recorder=recorder,
        id=id,
    )


async def _load(models: Models, stop: asyncio.Event) -> bool:
    """Start `models`, which loads the default one; return False if `stop` was set first.

    Else returns True when the model is loaded. Raises ModelError if it cannot be loaded, and
    ConfigError for wrong settings.
    """
    loading = asyncio.create_task(models.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if loading.done():
        await loading
        return True
    loading.cancel()
    return False


async def _first_of(*events: asyncio.Event) -> None:
    """Wait until any of `events` is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


# -- the HTTP server ---------------------------------------------------------------------------


class _HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, because `_on_signals` handles the signals."""
        yield

    def end(self, grace_s: int) -> None:
        """Begin to end the server: it accepts no more requests, and closes its connections.

        Connections are closed when their replies have ended, at the latest after `grace_s` seconds.
        Returns at once; `serve` returns when all are closed.
        """
        self.config.timeout_graceful_shutdown = grace_s
        self.should_exit = True


def _http_config(app: object) -> uvicorn.Config:
    return uvicorn.Config(
        app,  # type: ignore[arg-type] # uvicorn's own type is stricter than ASGI's
        http=Protocol,
        log_config=None,
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )


async def _end(
    server: _HttpServer, serving: asyncio.Task[None], models: Models, grace_s: int = STOP_S
) -> None:
    """End the engines' replies and all connections, and wait for both to end.

    `serving` is the task that runs `server`. Connections are closed within `grace_s` seconds, and
    the engines of `models` are waited for at most `STOP_S` seconds.
    """
    server.end(grace_s)
    # connections are cut off on purpose now, also those whose request never came completely
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    await asyncio.gather(models.stop(STOP_S), serving)


def _on_signals(stop: asyncio.Event, console: Console) -> None:
    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)  # the second signal: do not wait for anything that may hang
        console.print("Stopping. Send the signal again to exit at once.")
        stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)


# -- files and folders -------------------------------------------------------------------------


@contextmanager
def announced(settings: Settings, url: str) -> Iterator[str]:
    """List the server and its address `url` in its cache folder while the block runs.

    Commands find the server by this. Yields the server's id there. If the folder cannot be written,
    only a warning is logged, and the id is "". Raises InUse if a command that changes the folder's
    files has locked it, unless the disk tier is off.
    """
    with ExitStack() as stack:
        id = ""
        try:
            default = settings.model or "the demo"
            used = (path for one in settings.entries for path in (one.model, one.draft_model))
            models = [path for path in used if path is not None]
            names = [name for one in settings.entries for name in one.names]
            id = stack.enter_context(serving(settings.cache_dir, url, default, models, names))
        except StoreError as error:
            if isinstance(error, InUse) and settings.disk != "off":
                raise
            log.warning("server not listed in its cache folder, so commands need --url: %s", error)
        yield id


async def warm_files(
    find: Callable[[str | None], Awaitable[Engine]], files: Sequence[Path], keys: Sequence[str] = ()
) -> None:
    """Compute the prompts in `files` ahead of their first use.

    Each file holds a body of `POST /v1/cache/warm`. `find(name)` returns the engine of the model
    that a file names, or of the default model for None. If the server has several API keys, given
    as `keys`, each prompt is computed once per key, since owners do not share KV. A file that
    cannot be read or computed is logged and skipped.
    """
    for key, file in product(keys or (None,), files):
        OWNER.set(owner_of(key) if key is not None else None)
        try:
            body = await asyncio.to_thread(file.read_bytes)
            done = await warm(await find(requested_model(body)), body)
        except MlxcacheError as error:
            log.warning("%s not warmed: %s", file, error)
        except OSError as error:
            log.warning("%s not warmed: cannot be read: %s", file, error.strerror)
        else:
            log.info(
                "%s warmed: %d tokens, %d of them computed in %.1f s",
                *(file, done["prompt_tokens"], done["fed_tokens"], done["seconds"]),
            )


def _raise_descriptor_limit() -> None:
    """Raise this process's limit of open files to `DESCRIPTORS`, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # the old limit stays
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _limit_accept_errors(loop: asyncio.AbstractEventLoop) -> None:
    """Log connections that `loop` cannot accept in one line per `ACCEPT_REPORT_S` seconds.

    Otherwise asyncio would log a traceback for every attempt, many times per second.
    """
    reported_at = float("-inf")

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal reported_at
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in _NONE_LEFT):
            loop.default_exception_handler(context)
        elif time.monotonic() - reported_at > ACCEPT_REPORT_S:
            reported_at = time.monotonic()
            log.error("no new connection can be accepted now: %s", error.strerror)

    loop.set_exception_handler(handle)
