"""`mlxcache serve`: read the settings, then run a server."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import typer

from mlxcache.cli.listen import PortTaken, is_taken
from mlxcache.cli.log import configure_logging
from mlxcache.cli.options import SERVICE, Config, Flags, with_settings
from mlxcache.cli.output import console
from mlxcache.cli.ranks import RANK, close_input, run_ranks, watch_launcher
from mlxcache.config import load_settings, machine_bytes, require_memory
from mlxcache.config.flags import argument
from mlxcache.config.models import find_folder
from mlxcache.disk_calls import sync
from mlxcache.private import create, make_folder

NOTE = "unclean-starts"
"""Name of a file in the cache folder: a byte for each start since the last clean end."""

FIRST_S, MOST_S = 30.0, 300.0
"""Seconds to wait after one unclean end; twice as long after each further one, up to the second."""

RECENT_S = 3600.0
"""Age in seconds from which starts are forgotten: the last one was not what ended the server."""

log = logging.getLogger("mlxcache.server")


Models = Annotated[list[str] | None, argument("MODEL", "As --model.")]


@with_settings()
def serve(models: Models = None, *, flags: Flags, config: Config = None) -> None:
    """Serve a model to coding agents, over the OpenAI and the Anthropic API.

    Without --model a small built-in demo is served. Every flag is also a variable (--max-tokens:
    MLXCACHE_MAX_TOKENS) and a key of config.toml.
    """
    if models:
        flags = {**flags, "model": [*models, *flags.get("model", ())]}
    settings = load_settings(flags, os.environ, config)
    require_memory(settings.ram, machine_bytes())
    if RANK not in os.environ and (settings.hosts or settings.hostfile):
        raise typer.Exit(run_ranks(settings, sys.argv[1:]))
    if RANK in os.environ:
        close_input()
    if settings.model is not None:
        find_folder(settings.model)  # before the imports below, which take seconds
    out = console()
    configure_logging(out, settings.log_level)
    from mlxcache.store.cache_folder import (  # noqa: PLC0415
        prepare_cache_dir,
        require_local,
        require_writable,
    )
    from mlxcache.store.folder import STORE  # noqa: PLC0415

    if settings.disk != "off":
        require_local(settings.cache_dir)
    folder = settings.cache_dir
    prepare_cache_dir(folder)
    if settings.model is None:
        require_writable(folder, "the demo model needs it")
    elif settings.disk != "off" and not (folder / STORE).is_dir():  # one that is there is read
        require_writable(folder, "computed KV goes there, unless you add --disk off")
    if RANK not in os.environ and settings.port and is_taken(settings.host, settings.port):
        raise PortTaken(settings.host, settings.port)
    # Here and not above: MLX and the tokenizers take seconds to import, --help needs neither.
    with _kept_descriptor_limit():
        from mlxcache.cli.server import run  # noqa: PLC0415
    from mlxcache.ranks.group import place_from  # noqa: PLC0415
    from mlxcache.ranks.setup import Rank  # noqa: PLC0415

    place = place_from(os.environ, pipeline=settings.pipeline)
    if place is not None and place.rank:
        Rank(place, folder).run()
        return
    if place is not None:
        settings.check_divisible()
        watch_launcher()
    with backing_off(folder, os.environ):
        asyncio.run(run(settings, out, place))


@contextmanager
def _kept_descriptor_limit() -> Iterator[None]:
    """Keep the limit of open files, which mlx-lm lowers for good when it is imported."""
    set_limit = resource.setrlimit
    resource.setrlimit = lambda kind, limits: None
    try:
        yield
    finally:
        resource.setrlimit = set_limit


@contextmanager
def backing_off(
    folder: Path, environ: Mapping[str, str], sleep: Callable[[float], None] = time.sleep
) -> Iterator[None]:
    """Wait if recent runs of the service did not end cleanly; note a clean end of the block.

    launchd starts the service at each login, so also after a kernel panic, and 10 seconds after a
    failure. If the server's own work brings the machine down, that must not become a loop. Does
    nothing without the variable `SERVICE` in `environ`.
    """
    if not environ.get(SERVICE):
        yield
        return
    note = folder / NOTE
    if unclean := _count_start(note):
        wait_s = min(FIRST_S * 2 ** min(unclean - 1, 9), MOST_S)
        log.warning(
            "start delayed by %.0f s: unclean ends of the service in a row: %d; "
            "mlxcache doctor tells whether the machine went down",
            *(wait_s, unclean),
        )
        sleep(wait_s)
    yield
    with suppress(OSError):  # nothing can be written, or nothing was
        note.unlink()


def _count_start(note: Path) -> int:
    """Add this start to those in the file `note`, durably; return how many there were recently."""
    try:
        make_folder(note.parent)
        starts = 0
        if note.exists() and time.time() - note.stat().st_mtime < RECENT_S:
            starts = note.stat().st_size
        with create(note) as file:
            file.write(b"." * (starts + 1))
            file.flush()
            sync(file.fileno())
    except OSError as error:
        log.warning("start not noted in %s: %s", note, error)
        return 0
    return starts
