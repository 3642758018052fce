"""`mlxcache serve`: from flags to settings to a running server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from mlxcache.cli import options
from mlxcache.cli.output import configure_logging, console, reporting
from mlxcache.config import Settings, load_settings


def serve(
    ctx: typer.Context,
    *,
    model: options.Model = None,
    adapter: options.Adapter = None,
    draft_model: options.DraftModel = None,
    num_draft_tokens: options.NumDraftTokens = None,
    chat_template_args: options.TemplateArgs = None,
    trust_remote_code: options.TrustRemoteCode = None,
    ram: options.Ram = None,
    disk: options.Disk = None,
    context: options.Context = None,
    max_tokens: options.MaxTokens = None,
    concurrency: options.Concurrency = None,
    queue: options.Queue = None,
    request_timeout: options.RequestTimeout = None,
    prefill_chunk: options.PrefillChunk = None,
    kv_bits: options.KvBits = None,
    warm: options.Warm = None,
    no_anticipate: options.NoAnticipate = None,
    host: options.Host = None,
    port: options.Port = None,
    api_key: options.ApiKey = None,
    api_keys_file: options.ApiKeysFile = None,
    allow_origin: options.AllowOrigin = None,
    insecure: options.Insecure = None,
    cache_dir: options.CacheDir = None,
    log_level: options.LogLevel = None,
    record: options.Record = None,
    config: options.Config = None,
    canonicalise: options.Canonicalise = None,
    no_canonicalise: options.NoCanonicalise = None,
) -> None:
    """Serve a model to coding agents, over the OpenAI and the Anthropic API.

    Without --model a small built-in demo is served.
    Every flag is also a variable (--max-tokens: MLXCACHE_MAX_TOKENS) and a key of config.toml.
    """
    _serve(ctx.params, config)


def _serve(params: Mapping[str, Any], config: Path | None) -> None:
    with reporting():
        _run(load_settings(given(params), os.environ, config))


def given(params: Mapping[str, Any]) -> dict[str, object]:
    """The flags that are settings; a list of nothing is a flag that was not given."""
    lists = (list, tuple)
    found = {k: None if isinstance(v, lists) and not v else v for k, v in params.items()}
    return found | {"config": None}


def _run(settings: Settings) -> None:
    out = console()
    configure_logging(out, settings.log_level)
    # Here and not above: MLX and the tokenizers take seconds to import, --help needs neither.
    from mlxcache.cli.server import run  # noqa: PLC0415

    asyncio.run(run(settings, out))
