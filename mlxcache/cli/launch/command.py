"""The command `mlxcache launch`: start a coding agent on a server."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxcache.cli.launch.clients import ClientName
from mlxcache.cli.options import Config, Flags, with_settings
from mlxcache.cli.output import reporting
from mlxcache.cli.target import Json, Url
from mlxcache.errors import ConfigError

Client = Annotated[
    ClientName | None,
    typer.Argument(
        metavar="CLIENT",
        help="claude, opencode, codex, qwen, pi, cline, copilot or anyclaude.",
    ),
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="Arguments for the client, after two dashes."),
]
PrintEnv = Annotated[
    bool,
    typer.Option(
        "--print-env", metavar="", help="Print the variables for a shell, and start nothing."
    ),
]
StopAfter = Annotated[
    bool,
    typer.Option(
        "--stop-after", metavar="", help="Stop the server with the client, if it was started here."
    ),
]


@with_settings()
def launch(
    client: Client = None,
    arguments: Arguments = None,
    *,
    print_env: PrintEnv = False,
    stop_after: StopAfter = False,
    url: Url = None,
    as_json: Json = False,
    flags: Flags,
    config: Config = None,
) -> None:
    """Start a coding agent on this server, and the server first if none runs.

    The server is started in the background with the flags below and keeps running after the client
    ends. The client's own settings are not changed. Without CLIENT, a menu is shown.
    """
    with reporting():
        if as_json and not print_env:
            raise ConfigError(
                "--json needs --print-env: without it the client runs and uses the output"
            )
        # Here and not above: httpx takes a while to import, and --help needs none of it.
        from mlxcache.cli.launch.launching import Launch  # noqa: PLC0415

        started = Launch(flags, config, url)
        name = client or started.choose()
        if print_env:
            started.print_env(name, arguments or [], as_json=as_json)
            return
        status = started.run(name, arguments or [], stop_after=stop_after)
    raise typer.Exit(status)
