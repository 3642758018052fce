"""`mlxcache top`: from the command line to a picture that moves."""

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
from mlxcache.cli.top.seen import News, Seen, watch
from mlxcache.cli.top.view import view
from mlxcache.errors import MlxcacheError

TOLD_S = 5.0
"""How long a picture that is printed once waits for all of it: a busy model answers late."""

LEAST_S = 0.1


def top(
    *,
    once: Annotated[bool, typer.Option("--once", metavar="", help="Print it once.")] = False,
    as_json: Json = False,
    interval: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=LEAST_S, help="How often the picture is renewed."),
    ] = 1.0,
    url: Url = None,
    api_key: ApiKey = None,
    cache_dir: CacheDir = None,
) -> None:
    """Show budgets, requests and sessions of a running server as they change. Ctrl-C ends it.

    Where the output is no terminal, and with --json, it is told once.
    """
    with reporting():
        remote = find_server(url, api_key, cache_dir)
        out = Console(highlight=False, markup=False, emoji=False)
        if as_json or once or not out.is_terminal:
            _tell_once(remote, out, as_json=as_json)
        else:
            _show(remote, out, interval)


def _tell_once(remote: Remote, out: Console, *, as_json: bool) -> None:
    seen, news, end = Seen(), watch(remote), time.monotonic() + TOLD_S
    while not seen.whole and (left := end - time.monotonic()) > 0:
        _take(seen, news, left)
    if as_json:
        show.print_json(seen.as_object())
        return
    width = out.width if out.is_terminal else max(80, out.width)
    out.print(view(seen, remote.url, width=width, height=None, now=time.time()), width=width)


def _show(remote: Remote, out: Console, interval: float) -> None:
    """Renew the picture until Ctrl-C. Raises MlxcacheError where the server ends."""
    seen, news = Seen(), watch(remote)
    try:
        with Live(console=out, screen=True, auto_refresh=False) as live:
            while True:
                size = out.size
                picture = view(
                    seen, remote.url, width=size.width, height=size.height, now=time.time()
                )
                live.update(picture, refresh=True)
                end = time.monotonic() + (interval if seen.whole else LEAST_S)
                while (left := end - time.monotonic()) > 0:
                    _take(seen, news, left)
    except KeyboardInterrupt:
        return


def _take(seen: Seen, news: queue.SimpleQueue[News], seconds: float) -> None:
    """Wait for the next news, so many seconds at most. Raises MlxcacheError where no more comes."""
    try:
        one = news.get(timeout=seconds)
    except queue.Empty:
        return
    if isinstance(one, MlxcacheError):
        raise one
    seen.take(*one, time.monotonic())
