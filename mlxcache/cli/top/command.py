"""The command `mlxcache top`: print a server's state once, or redraw it until Ctrl-C."""

from __future__ import annotations

import queue
import time
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from mlxcache.cli import show
from mlxcache.cli.output import reporting
from mlxcache.cli.remote import Remote
from mlxcache.cli.target import ApiKey, CacheDir, Json, Url, find_server
from mlxcache.cli.top.state import LiveState, Update, watch
from mlxcache.cli.top.view import render
from mlxcache.errors import MlxcacheError

ONCE_TIMEOUT_S = 5.0
"""Maximum seconds to wait for a complete state before printing it once."""

MIN_INTERVAL_S = 0.1


def top(
    *,
    once: Annotated[bool, typer.Option("--once", metavar="", help="Print once, and exit.")] = False,
    as_json: Json = False,
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=MIN_INTERVAL_S, help="Time between updates."),
    ] = 1.0,
    url: Url = None,
    api_key: ApiKey = None,
    cache_dir: CacheDir = None,
) -> None:
    """Show budgets, requests and sessions of a running server, live. Ctrl-C ends it.

    With --once or --json, or if the output is not a terminal, it prints them once and exits.
    """
    with reporting():
        remote = find_server(url, api_key, cache_dir)
        out = Console(highlight=False, markup=False, emoji=False)
        if as_json or once or not out.is_terminal:
            _print_once(remote, out, as_json=as_json)
        else:
            _redraw(remote, out, interval)


def _print_once(remote: Remote, out: Console, *, as_json: bool) -> None:
    state, updates, end = LiveState(), watch(remote), time.monotonic() + ONCE_TIMEOUT_S
    while not state.complete and (left := end - time.monotonic()) > 0:
        _apply_next(state, updates, left)
    if as_json:
        show.print_json(state.as_object())
        return
    width = out.width if out.is_terminal else max(80, out.width)
    out.print(render(state, remote.url, width=width, height=None, now=time.time()), width=width)


def _redraw(remote: Remote, out: Console, interval: float) -> None:
    """Show the state of the server `remote`, redrawn every `interval` seconds, until Ctrl-C.

    Raises MlxcacheError if the server ends.
    """
    state, updates = LiveState(), watch(remote)
    try:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                size = out.size
                picture = render(
                    state, remote.url, width=size.width, height=size.height, now=time.time()
                )
                live.update(picture, refresh=True)
                end = time.monotonic() + (interval if state.complete else MIN_INTERVAL_S)
                while (left := end - time.monotonic()) > 0:
                    _apply_next(state, updates, left)
    except KeyboardInterrupt:
        return


def _apply_next(state: LiveState, updates: queue.SimpleQueue[Update], seconds: float) -> None:
    """Apply the next update to `state`, waiting at most `seconds` for it.

    Raises the error that ended the updates, if that is next in the queue.
    """
    try:
        update = updates.get(timeout=seconds)
    except queue.Empty:
        return
    if isinstance(update, MlxcacheError):
        raise update
    state.apply(*update, time.monotonic())
