"""`mlxcache serve`: read the settings, then run a server."""

from __future__ import annotations

import asyncio
import os
import sys
from dataclasses import replace

import typer

from mlxcache.cli.options import Config, Flags, with_settings
from mlxcache.cli.output import configure_logging, console, reporting
from mlxcache.cli.ranks import RANK, close_input, run_ranks, watch_launcher
from mlxcache.cli.service import backing_off
from mlxcache.config import load_settings


@with_settings()
def serve(*, flags: Flags, config: Config = None) -> None:
    """Serve a model to coding agents, over the OpenAI and the Anthropic API.

    Without --model a small built-in demo is served. Every flag is also a variable (--max-tokens:
    MLXCACHE_MAX_TOKENS) and a key of config.toml.
    """
    with reporting():
        settings = load_settings(flags, os.environ, config)
        if RANK not in os.environ and (settings.hosts or settings.hostfile):
            raise typer.Exit(run_ranks(settings, sys.argv[1:]))
        if RANK in os.environ:
            close_input()
        out = console()
        configure_logging(out, settings.log_level)
        # Here and not above: MLX and the tokenizers take seconds to import, --help needs neither.
        from mlxcache.cli.server import run  # noqa: PLC0415
        from mlxcache.ranks.group import place_from  # noqa: PLC0415
        from mlxcache.ranks.setup import Rank  # noqa: PLC0415
        from mlxcache.store.mac_folder import prepare_cache_dir  # noqa: PLC0415
        from mlxcache.store.network_folder import require_local  # noqa: PLC0415

        if settings.disk != "off":
            require_local(settings.cache_dir)
        folder = prepare_cache_dir(settings.cache_dir)
        settings = replace(settings, cache_dir=folder)
        place = place_from(os.environ, pipeline=settings.pipeline)
        if place is not None and place.rank:
            Rank(place, folder).run()
            return
        if place is not None:
            settings.check_divisible()
            watch_launcher()
        with backing_off(folder, os.environ):
            asyncio.run(run(settings, out, place))
