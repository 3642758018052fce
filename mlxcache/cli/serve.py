"""`mlxcache serve`: read the settings, then run a server."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace

from mlxcache.cli.options import Config, Flags, with_settings
from mlxcache.cli.output import configure_logging, console, reporting
from mlxcache.config import load_settings


@with_settings()
def serve(*, flags: Flags, config: Config = None) -> None:
    """Serve a model to coding agents, over the OpenAI and the Anthropic API.

    Without --model a small built-in demo is served. Every flag is also a variable (--max-tokens:
    MLXCACHE_MAX_TOKENS) and a key of config.toml.
    """
    with reporting():
        settings = load_settings(flags, os.environ, config)
        out = console()
        configure_logging(out, settings.log_level)
        # Here and not above: MLX and the tokenizers take seconds to import, --help needs neither.
        from mlxcache.cli.server import run  # noqa: PLC0415
        from mlxcache.store.mac_folder import prepare_cache_dir  # noqa: PLC0415
        from mlxcache.store.network_folder import require_local  # noqa: PLC0415

        if settings.disk != "off":
            require_local(settings.cache_dir)
        folder = prepare_cache_dir(settings.cache_dir)
        asyncio.run(run(replace(settings, cache_dir=folder), out))
