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
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from rich.console import Console
from rich.panel import Panel
from rich.text import Text

from mlxcache.api.app import create_app
from mlxcache.api.cache import warm
from mlxcache.api.http import ApiSettings
from mlxcache.api.record import Recorder
from mlxcache.cli import show
from mlxcache.cli.connect import base_url, launch_command, own_command
from mlxcache.cli.listen import listen
from mlxcache.cli.log import log_line, show_readings
from mlxcache.cli.output import loading_bar
from mlxcache.cli.protocol import Protocol
from mlxcache.config import Keys, Settings, format_size, read_keys
from mlxcache.config.models import Route
from mlxcache.engine.engine import Engine
from mlxcache.engine.models import Models
from mlxcache.errors import MlxcacheError, ModelError, StoreError
from mlxcache.model.demo import DEMO_NOTICE, REAL_MODEL
from mlxcache.owner import OWNER, owner_of
from mlxcache.ranks.group import Place
from mlxcache.store.lock import InUse, serving
from mlxcache.types import ModelInfo
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

    `place`: of this process among the ranks, if the model is divided; only rank 0 runs a server.
    Raises InUse if a command has locked the cache folder, and ModelError if the model cannot be
    loaded or the MLX thread died, so that a supervisor can restart it.
    """
    sys.setswitchinterval(SWITCH_S)
    _raise_descriptor_limit()
    _limit_accept_errors(asyncio.get_running_loop())
    keys = read_keys(settings)
    sockets = listen(settings.host, settings.port)
    url = base_url(settings.host, sockets[0].getsockname()[1])
    with announced(settings, url) as id, ExitStack() as stack:
        remote = None
        if settings.remote is not None:
            from mlxcache.remote.objects import open_configured  # noqa: PLC0415 - only with --remote

            opened = await asyncio.to_thread(open_configured, settings)
            remote = stack.enter_context(closing(opened))
        await _serve(settings, keys, console, sockets, url, id=id, remote=remote, place=place)


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
        several = len(settings.entries) > 1
        models = Models(
            settings,
            progress,
            lambda record: request_log.info("%s", log_line(record, several=several)),
            remote=remote,
            place=place,
        )
        engine = models.default
        api = _api_settings(settings, keys, recorder, id)
        app = create_app(models, api)
        server = _HttpServer(_http_config(app))
        serving = asyncio.create_task(server.serve(sockets))
        try:
            loaded = await _load(models, stop)
        except BaseException:
            await _end(server, serving, models)
            raise
    if loaded and engine.info is not None:
        print_welcome(
            console,
            url,
            engine.info,
            models.figures(),
            launch=launch_command(url, settings.cache_dir),
            routes=settings.route,
        )
        warming = asyncio.create_task(warm_files(models.of, settings.warm, api.owned_keys))
        showing = asyncio.create_task(show_readings(models.engines, console))
        waits = [asyncio.create_task(one.wait()) for one in (stop, engine.dead)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        warming.cancel()
        showing.cancel()
    failed = engine.dead.is_set()
    if failed:  # /health reports the failure while what the MLX thread held is written to disk
        await asyncio.gather(models.stop(STOP_S), asyncio.sleep(FAILED_S))
    await _end(server, serving, models, grace_s=FAILED_S if failed else STOP_S)
    figures = models.figures()
    if figures.get("requests", {}).get("total"):
        print_run_summary(console, figures)
    if recorder is not None:
        recorder.close()
    if engine.dead.is_set():
        raise ModelError(f"{engine.failure} Start the server again: it continues from disk.")


def _api_settings(
    settings: Settings, keys: Keys, recorder: Recorder | None, id: str
) -> ApiSettings:
    """Several API keys each own their sessions. A single key only restricts access."""
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
    """Load the default model; return False if `stop` was set first."""
    loading = asyncio.create_task(models.start())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopped}, return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    if loading.done():
        await loading
        return True
    loading.cancel()
    return False


# -- the HTTP server ---------------------------------------------------------------------------


class _HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, because `_on_signals` handles the signals."""
        yield

    def end(self, grace_s: int) -> None:
        """Accept no more requests, and close connections within `grace_s`; `serve` then returns."""
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
    """End the engines' replies and all connections, and wait for both to end."""
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
    """List the server in its cache folder, where commands find it, while the block runs.

    Yields the server's id there; "" with a logged warning if the folder cannot be written.
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
    """Compute the bodies of `POST /v1/cache/warm` in `files`, once for each of several API `keys`.

    `find` returns the engine of the model that a file names, or of the default model for None.
    Owners do not share KV. A file that cannot be read or computed is logged and skipped.
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


# -- what is printed at the start and the end --------------------------------------------------


def print_welcome(
    console: Console,
    url: str,
    info: ModelInfo,
    figures: Mapping[str, Any],
    *,
    launch: str,
    routes: Sequence[Route] = (),
) -> None:
    """Print the server's address, model, context and budgets, and the line that starts an agent.

    `figures` is the body of `GET /v1/cache`. The line is not wrapped and stands outside the frame,
    so that it can be copied.
    """
    facts = _facts(url, info, figures, routes)
    if console.is_terminal:
        console.print(Panel.fit(facts, title="mlxcache", padding=(0, 2)), soft_wrap=False)
    else:
        console.print(facts)
    if info.is_demo:
        real = f"For a real one: {own_command()} serve --model {REAL_MODEL}"
        console.print(Text(f"\n{DEMO_NOTICE}\n{real}", "yellow"))
    agent = "In another terminal, for a coding agent in your project"
    console.print(Text.assemble("\n", (agent, "bold"), f"\ncd YOUR-PROJECT\n{launch}"))
    others = " connect".join(launch.rsplit(" launch", 1))
    console.print(Text(f"\nOther clients: {others}\nDashboard: {url}/dashboard\nCtrl-C stops.\n"))


def _facts(url: str, info: ModelInfo, figures: Mapping[str, Any], routes: Sequence[Route]) -> Text:
    ram, disk = figures["ram"]["limit_bytes"], figures["disk"]
    context = f"{info.context_length:,} tokens"
    if info.context_length < info.max_context_length:
        context += f" (the model has {info.max_context_length:,})"
    if figures["bytes_per_token"]:
        full = info.context_length * figures["bytes_per_token"] + figures["bytes_per_checkpoint"]
        context += f", {format_size(full)} when full"
    several = figures.get("models", ())
    model = info.id + (f", drafted for by {info.draft}" if info.draft else "")
    own = [("Model", model)] if not several else _models(several, routes)
    beside = f"beside the model's {format_size(info.weights_bytes)}"
    lines = (
        ("Address", url),
        *own,
        ("Context", context),
        ("RAM", f"{format_size(ram)}, {'with the weights of all models' if several else beside}"),
        ("Disk", _disk(disk["used_bytes"], disk["limit_bytes"], disk.get("reason"))),
    )
    return Text("\n").join(Text.assemble((f"{name:<9}", "bold"), value) for name, value in lines)


def _models(models: Sequence[Mapping[str, Any]], routes: Sequence[Route]) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for one in models:
        names = [one["label"], *one["aliases"]]
        known = {name.lower() for name in names}
        names += [route.pattern for route in routes if route.name.lower() in known]
        when = ", and for all other names" if one["default"] else ", loaded at its first request"
        lines.append(("" if lines else "Models", ", ".join(names) + when))
    return lines


def _disk(used: int, limit: int, reason: str | None) -> str:
    lost = "computed prefixes are lost when the server ends"
    if reason is not None:
        kept = f"; the {format_size(used)} there are still read" if used else ""
        return f"off, {lost}{kept}. {reason}"
    if not limit:
        return f"off: {lost}"
    return f"{format_size(limit)}, {format_size(used)} of it used"


def print_run_summary(console: Console, figures: Mapping[str, Any]) -> None:
    requests, saved = figures["requests"], figures["saved"]
    tokens = {f"{name}_tokens": count for name, count in figures["tokens"].items()}
    kinds = [
        f"{requests[kind]:,} {kind}" for kind in ("cold", "warm", "restored") if requests[kind]
    ]
    lines = [("Requests", f"{requests['total']:,} ({', '.join(kinds)})")]
    lines.append(("Reused", show.format_reuse(tokens)))
    if saved["tokens"]:
        lines.append(("Time saved", show.format_saved(tokens["cached_tokens"], saved)))
    names = ("drafted", "accepted", "passes", "saved_s")
    guesses = [sum(figures["guesses"][name].values()) for name in names]
    if guesses[0]:
        lines.append(("Guesses", show.format_guesses(*guesses)))
    console.print(Text("\nThis run", "bold"))
    for name, value in lines:
        console.print(f"{name:<12} {value}")
