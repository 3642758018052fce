"""What a client needs, as text for a shell or for a program."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from mlxcache.cli.connect import quoted
from mlxcache.cli.launch.client import Place, Service, Start, direct

KEY_VARIABLE = "MLXCACHE_API_KEY"


def lines(start: Start, service: Service, environ: Mapping[str, str]) -> list[str]:
    """Lines for `eval` in a POSIX shell; each ends by itself, so that they may be joined.

    A key that is in MLXCACHE_API_KEY is taken from there. Any other stands in the line.
    """
    in_variable = service.key is not None and environ.get(KEY_VARIABLE) == service.key
    found = [f"unset {' '.join(start.without)};"] if start.without else []
    for name, value in {**direct(service, environ), **start.variables}.items():
        if value is None and not in_variable:
            value = service.credential  # noqa: PLW2901 - the same thing, known by now
        found.append(f"export {name}={quoted(value, has_key=in_variable)};")
    return found


def command(start: Start, place: Place) -> str:
    """The command that goes with the variables."""
    return shlex.join([place.program.name, *start.arguments, *place.arguments])


def as_object(start: Start, service: Service, place: Place) -> dict[str, Any]:
    """The same for programs."""
    return {
        "object": "launch",
        "command": [place.program.name, *start.arguments, *place.arguments],
        "set": {
            name: service.credential if value is None else value
            for name, value in {**direct(service, place.environ), **start.variables}.items()
        },
        "unset": list(start.without),
    }
