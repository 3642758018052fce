"""`mlxcache launch`: a server where none runs, and a coding agent on it."""

from __future__ import annotations

from typing import Annotated

import typer

from mlxcache.cli.launch.known import Name
from mlxcache.cli.options import Config, Flags, with_settings
from mlxcache.cli.output import reporting
from mlxcache.cli.target import Json, Url
from mlxcache.errors import ConfigError

Client = Annotated[
    Name | None, typer.Argument(metavar="CLIENT", help="claude, opencode, codex or anyclaude.")
]
Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- ARGS", help="What the client is given, behind two dashes."),
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
        "--stop-after", metavar="", help="End the server with the client, if this started it."
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
    """Start a coding agent on this server, and the server first where none runs.

    The server is started in the background with the flags below, and goes on when the client ends.
    The client's own settings stay as they are. Without CLIENT: a menu.
    """
    with reporting():
        if as_json and not print_env:
            raise ConfigError("--json goes with --print-env: else the client has the output")
        # Here and not above: httpx takes a while to import, and --help needs none of it.
        from mlxcache.cli.launch.launching import Launching  # noqa: PLC0415

        launching = Launching(flags, config, url)
        name = client or launching.choose()
        if print_env:
            launching.print_env(name, arguments or [], as_json=as_json)
            return
        status = launching.run(name, arguments or [], stop_after=stop_after)
    raise typer.Exit(status)
