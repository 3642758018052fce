"""OpenCode."""

from __future__ import annotations

import json
from typing import Any

from mlxcache.cli.connect import ANY_MODEL
from mlxcache.cli.launch.client import Place, Service, Start

VARIABLE = "OPENCODE_CONFIG_CONTENT"
"""Settings that win over those of files. Source: https://opencode.ai/docs/config."""

PROVIDER = "mlxcache"
_MOST_OUTPUT = 16_384


def opencode(service: Service, place: Place) -> Start:
    """How OpenCode is started on `service`, with the user's settings otherwise as they are."""
    own = _object(place.environ.get(VARIABLE))
    providers = own.get("provider")
    merged = {
        **own,
        "provider": {**(providers if isinstance(providers, dict) else {}), PROVIDER: _of(service)},
        "model": f"{PROVIDER}/{ANY_MODEL}",
        "small_model": f"{PROVIDER}/{ANY_MODEL}",
    }
    return Start(variables={VARIABLE: json.dumps(merged), "MLXCACHE_API_KEY": None})


def _of(service: Service) -> dict[str, Any]:
    # A quarter of a short context: else nothing would be left for the conversation.
    limit = {"context": service.context, "output": min(_MOST_OUTPUT, service.context // 4)}
    return {
        "npm": "@ai-sdk/openai-compatible",
        "name": "mlxcache",
        "options": {
            "baseURL": f"{service.url}/v1",
            "apiKey": "{env:MLXCACHE_API_KEY}",
            "timeout": False,  # a first prompt may take longer than the five minutes it would wait
        },
        "models": {ANY_MODEL: {"name": service.model, "limit": limit}},
    }


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
