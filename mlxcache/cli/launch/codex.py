"""Codex, in the versions that speak chat completions."""

from __future__ import annotations

import json
import re
import subprocess

from packaging.version import Version

from mlxcache.cli.connect import ANY_MODEL
from mlxcache.cli.launch.client import Place, Service, Start
from mlxcache.errors import MlxcacheError

LAST_WITH_CHAT = Version("0.94.0")
"""The newest version that speaks chat completions; later ones speak OpenAI's responses alone."""

INSTALL = f"npm install -g @openai/codex@{LAST_WITH_CHAT}"
KEY = "MLXCACHE_API_KEY"
_VERSION_S = 30.0
_IDLE_MS = 3_600_000
_PROVIDER = "model_providers.mlxcache"


def codex(service: Service, place: Place) -> Start:
    """How Codex is started on `service`; its own config.toml stays as it is.

    Raises MlxcacheError for a version that speaks /v1/responses alone.
    """
    found = version(place) if place.installed else LAST_WITH_CHAT
    if found > LAST_WITH_CHAT:
        raise MlxcacheError(
            f"Codex {found} speaks only OpenAI's responses API, which this server does not have. "
            f"Codex {LAST_WITH_CHAT} is the newest that works: {INSTALL}"
        )
    settings = {
        "model": ANY_MODEL,
        "model_provider": "mlxcache",
        "model_context_window": service.context,
        f"{_PROVIDER}.name": "mlxcache",
        f"{_PROVIDER}.base_url": f"{service.url}/v1",
        f"{_PROVIDER}.env_key": KEY,
        f"{_PROVIDER}.wire_api": "chat",
        f"{_PROVIDER}.stream_idle_timeout_ms": _IDLE_MS,
    }
    # A JSON text or number is also one of TOML's.
    words = (f"{name}={json.dumps(value)}" for name, value in settings.items())
    return Start(
        variables={KEY: None}, arguments=tuple(word for one in words for word in ("-c", one))
    )


def version(place: Place) -> Version:
    """The version of the program. Raises MlxcacheError."""
    try:
        done = subprocess.run(
            [place.program, "--version"],
            capture_output=True,
            text=True,
            timeout=_VERSION_S,
            env=dict(place.environ),
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MlxcacheError(f"{place.program} does not tell its version: {error}.") from error
    found = re.search(r"\d+\.\d+\.\d+", done.stdout)
    if found is None:
        raise MlxcacheError(f"{place.program} --version tells no version: {done.stdout.strip()!r}.")
    return Version(found[0])
