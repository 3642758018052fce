"""Claude Code, and anyclaude around it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mlxcache.cli.agents import claude_env, claude_folder, read_object
from mlxcache.cli.connect import anyclaude_variables, claude_code_variables
from mlxcache.cli.launch.client import Place, Service, Start

ELSEWHERE = (
    "ANTHROPIC_API_KEY",
    "CLAUDE_CODE_OAUTH_TOKEN",
    "CLAUDE_CODE_USE_BEDROCK",
    "CLAUDE_CODE_USE_FOUNDRY",
    "CLAUDE_CODE_USE_VERTEX",
)
"""Variables that have Claude Code ask another server, or send a key that is not this one's."""

_MODES = ("--permission-mode", "--dangerously-skip-permissions", "--allow-dangerously-skip")
_SETTINGS = "--settings"


def claude(service: Service, place: Place) -> Start:
    """How Claude Code is started on `service`.

    What its settings files say wins over the environment, so variables that they set too are
    given in a settings file of its own, which wins over them.
    """
    variables = claude_code_variables(service.url, service.model, service.context)
    own = list(_settings(place))
    set_there = {name for settings in own for name in _env(settings)}
    env = {
        name: service.credential if value is None else value for name, value in variables.items()
    } | dict.fromkeys(ELSEWHERE, "")
    overridden = {name: value for name, value in env.items() if name in set_there}
    return Start(
        variables=variables,
        without=ELSEWHERE,
        arguments=_mode(place, own),
        flag=_SETTINGS if overridden and not _given(place, _SETTINGS) else None,
        settings={"env": overridden},
    )


def anyclaude(service: Service, place: Place) -> Start:
    """How anyclaude is started on `service`."""
    return Start(
        variables=anyclaude_variables(service.url, service.context),
        without=("MLX_MODEL_PATH",),  # it would start a server of its own at this address
    )


def _mode(place: Place, own: list[Mapping[str, Any]]) -> tuple[str, ...]:
    """Asking before each action, unless the user chose a mode.

    Newer versions begin in auto mode otherwise, in which Anthropic's server is asked instead of
    the user, and that cannot be asked from here.
    """
    chosen = any(_permissions(settings).get("defaultMode") for settings in own)
    if chosen or _given(place, *_MODES):
        return ()
    return ("--permission-mode", "default")


def _given(place: Place, *flags: str) -> bool:
    return any(argument.startswith(flags) for argument in place.arguments)


def _permissions(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    found = settings.get("permissions")
    return found if isinstance(found, dict) else {}


def _settings(place: Place) -> Iterator[Mapping[str, Any]]:
    """The user's and the project's settings. Claude Code itself tells of a broken file."""
    folders = (claude_folder(place.environ, place.home), place.cwd / ".claude")
    for path in (*(one / "settings.json" for one in folders), folders[1] / "settings.local.json"):
        yield _read(path)


def _read(path: Path) -> Mapping[str, Any]:
    try:
        return read_object(path)
    except ValueError:
        return {}


def _env(settings: Mapping[str, Any]) -> Mapping[str, str]:
    try:
        return claude_env(settings)
    except ValueError:
        return {}
