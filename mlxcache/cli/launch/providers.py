"""Setups of Qwen Code, pi, Cline, Copilot CLI and Continue, which use chat completions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from packaging.version import Version

from mlxcache.cli.launch.setup import KEY_VARIABLE, Invocation, Service, Setup

_HOUR_MS = str(3_600_000)
"""An hour in milliseconds: a timeout for clients, as the first prompt can take minutes."""


def has_flag(arguments: Sequence[str], *flags: str) -> bool:
    """Return whether one of `arguments` begins with one of `flags`."""
    return any(argument.startswith(flags) for argument in arguments)


# -- Qwen Code ---------------------------------------------------------------------------------

OLDEST_QWEN = Version("0.24.4")
"""Oldest version of Qwen Code that was tested with this server."""

QWEN_SETTINGS = "QWEN_CODE_SYSTEM_SETTINGS_PATH"
"""Variable with the path of settings that override the user's and the project's."""

_QWEN_MACHINE = (Path("/Library/Application Support/QwenCode"), Path("/etc/qwen-code"))
"""Folders in which a machine's settings may be, on a Mac and on Linux."""


def configure_qwen(
    service: Service, invocation: Invocation, machine: Sequence[Path] = _QWEN_MACHINE
) -> Setup:
    """Return the setup of Qwen Code for `service`.

    The context length can only be set in a settings file. A temporary one is written, which this
    run of Qwen Code reads instead of the machine-wide settings file. It is not written if the
    user's environment has the variable `QWEN_SETTINGS`, which names such a file, or if one of the
    paths in `machine`, the possible folders of machine-wide settings, exists.
    """
    chosen = (("--auth-type", "openai"), ("--model", service.asked))
    given = invocation.arguments
    words = [  # a flag that is given twice makes Qwen Code fail
        pair
        for pair in chosen
        if not has_flag(given, pair[0]) and not (pair[0] == "--model" and "-m" in given)
    ]
    has_own = QWEN_SETTINGS in invocation.environ or any(one.exists() for one in machine)
    length = {"model": {"generationConfig": {"contextWindowSize": service.context}}}
    return Setup(
        variables={
            "OPENAI_BASE_URL": f"{service.url}/v1",
            "OPENAI_API_KEY": None,
            "OPENAI_MODEL": service.asked,
            "QWEN_CODE_API_TIMEOUT_MS": _HOUR_MS,
            "QWEN_STREAM_IDLE_TIMEOUT_MS": _HOUR_MS,
            "QWEN_STREAM_MAX_LIFETIME_MS": _HOUR_MS,
        },
        arguments=tuple(word for pair in words for word in pair),
        settings_variable=None if has_own else QWEN_SETTINGS,
        settings=length,
        by_hand="No variable tells Qwen Code the context length. In a settings file of it: "
        f"{json.dumps(length)}",
    )


# -- pi ----------------------------------------------------------------------------------------

OLDEST_PI = Version("0.87.1")
"""Oldest version of pi that was tested with this server."""

PI_PROVIDER = "PI_MLXCACHE_PROVIDER"
"""Variable with the provider as JSON, which `PI_EXTENSION` registers."""

PI_EXTENSION = Path(__file__).with_name("pi_provider.js")


def configure_pi(service: Service, _: Invocation) -> Setup:
    """Return the setup of pi for `service`: an extension that adds a provider for one run.

    Source: docs/custom-provider.md of pi's package.
    """
    model = {
        "id": service.asked,
        "name": service.model,
        "reasoning": False,
        "input": ["text"],
        "cost": dict.fromkeys(("input", "output", "cacheRead", "cacheWrite"), 0),
        "contextWindow": service.context,
        "maxTokens": service.output,
    }
    provider = {
        "baseUrl": f"{service.url}/v1",
        "api": "openai-completions",
        "apiKey": f"${KEY_VARIABLE}",
        "models": [model],
    }
    return Setup(
        variables={PI_PROVIDER: json.dumps(provider), KEY_VARIABLE: None},
        arguments=("-e", str(PI_EXTENSION), "--provider", "mlxcache", "--model", service.asked),
    )


# -- Cline -------------------------------------------------------------------------------------

OLDEST_CLINE = Version("3.0.65")
"""Oldest version of Cline's CLI that was tested with this server."""

CLINE_SETTINGS = "CLINE_PROVIDER_SETTINGS_PATH"
"""Variable with the path of the file that has Cline's providers and their keys."""

_NO_HUB = {
    "CLINE_SESSION_BACKEND_MODE": "local",
    "CLINE_HUB_DISCOVERY_PATH": "/dev/null/no-hub",  # cannot exist, so that no hub registers in it
}
"""Variables with which Cline runs a session in its own process and starts no hub."""

_CLINE_PROVIDER = "openai-compatible"


def configure_cline(service: Service, _: Invocation) -> Setup:
    """Return the setup of Cline for `service`: a file of providers that has only this server.

    By default Cline runs its sessions in a daemon, its hub, which outlives the client and has the
    environment of the client that started it. A hub that runs already would send the prompts to
    the user's own provider, and one that this client started would use a deleted file of providers,
    also for the user's next run. So the session runs in the client, and no hub is found or started.
    """
    provider = {
        "provider": _CLINE_PROVIDER,
        "apiKey": service.credential,
        "model": service.asked,
        "baseUrl": f"{service.url}/v1",
        "contextWindow": service.context,
        "maxTokens": service.output,
    }
    entry = {
        "settings": provider,
        "updatedAt": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "tokenSource": "manual",
    }
    return Setup(
        variables={"CLINE_NO_AUTO_UPDATE": "1", **_NO_HUB},
        settings_variable=CLINE_SETTINGS,
        settings={
            "version": 1,
            "lastUsedProvider": _CLINE_PROVIDER,
            "modes": {},
            "providers": {_CLINE_PROVIDER: entry},
        },
        by_hand="No variable points Cline at a server. This writes it to Cline's own settings: "
        f"cline auth -p {_CLINE_PROVIDER} -k KEY -m {service.asked} -b {service.url}/v1",
    )


# -- Copilot CLI -------------------------------------------------------------------------------

OLDEST_COPILOT = Version("1.0.102")
"""Oldest version of Copilot CLI that was tested with this server."""

_OTHER_CREDENTIALS = (
    "COPILOT_PROVIDER_API_KEY_COMMAND",
    "COPILOT_PROVIDER_BEARER_TOKEN",
    "COPILOT_PROVIDER_HEADERS",
    "COPILOT_PROVIDER_MODEL_ID",
    "COPILOT_PROVIDER_TRANSPORT",
    "COPILOT_PROVIDER_WIRE_MODEL",
)
"""Variables that would send another server's credentials, or ask for another model."""


def configure_copilot(service: Service, _: Invocation) -> Setup:
    """Return the setup of Copilot CLI for `service`. No account is needed.

    Source: `copilot help providers`.
    """
    return Setup(
        variables={
            "COPILOT_PROVIDER_BASE_URL": f"{service.url}/v1",
            "COPILOT_PROVIDER_TYPE": "openai",
            "COPILOT_PROVIDER_WIRE_API": "completions",
            "COPILOT_PROVIDER_API_KEY": None,
            "COPILOT_MODEL": service.asked,
            "COPILOT_PROVIDER_MAX_PROMPT_TOKENS": str(service.context - service.output),
            "COPILOT_PROVIDER_MAX_OUTPUT_TOKENS": str(service.output),
        },
        unset=_OTHER_CREDENTIALS,
    )


# -- Continue ----------------------------------------------------------------------------------

OLDEST_CONTINUE = Version("1.5.47")
"""Oldest version of Continue's CLI that was tested with this server."""

_CONTINUE_FLAG = "--config"


def configure_continue(service: Service, invocation: Invocation) -> Setup:
    """Return the setup of Continue's CLI for `service`: a configuration that has only this server.

    The configuration is not used if the user's own arguments have --config.
    The key is in a variable, which Continue puts in place of `${{ secrets.NAME }}`. Source:
    https://docs.continue.dev/reference.
    """
    model = {
        "name": "mlxcache",
        "provider": "openai",
        "model": service.asked,
        "apiBase": f"{service.url}/v1",
        "apiKey": f"${{{{ secrets.{KEY_VARIABLE} }}}}",
        "roles": ["chat", "edit", "apply", "summarize"],
        "capabilities": ["tool_use"],
        "contextLength": service.context,
        "defaultCompletionOptions": {
            "contextLength": service.context,
            "maxTokens": service.output,
        },
    }
    config = {"name": "mlxcache", "version": "1.0.0", "schema": "v1", "models": [model]}
    has_own = has_flag(invocation.arguments, _CONTINUE_FLAG)
    return Setup(
        variables={KEY_VARIABLE: None},
        settings_flag=None if has_own else _CONTINUE_FLAG,
        settings=config,
        by_hand="No variable points Continue at a server. Write this to a file, and add "
        f"{_CONTINUE_FLAG} FILE to the command: {json.dumps(config)}",
    )
