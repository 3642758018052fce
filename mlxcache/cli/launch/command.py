"""`mlxcache launch`: a server where none runs, and a coding agent on it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from mlxcache.cli.launch.known import Name
from mlxcache.cli.output import reporting
from mlxcache.cli.serve import given, serve
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


def with_flags_of_serve(command: Callable[..., None]) -> Callable[..., None]:
    """A command that takes all flags of `mlxcache serve` too, and finds them in its context."""
    own = inspect.signature(command)
    parameters = [
        one.replace(annotation=hint)
        for function in (command, serve)
        for name, hint in get_type_hints(function, include_extras=True).items()
        if (one := inspect.signature(function).parameters.get(name))
        and (function is command or name not in own.parameters)
    ]

    @functools.wraps(command)
    def run(ctx: typer.Context, **everything: Any) -> None:
        command(
            ctx, **{name: value for name, value in everything.items() if name in own.parameters}
        )

    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


@with_flags_of_serve
def launch(
    ctx: typer.Context,
    client: Client = None,
    arguments: Arguments = None,
    *,
    print_env: PrintEnv = False,
    stop_after: StopAfter = False,
    url: Url = None,
    as_json: Json = False,
) -> None:
    """Start a coding agent on this server, and the server first where none runs.

    The server is started in the background with the flags below, and goes on when the client ends.
    The client's own settings stay as they are. Without CLIENT: a menu.
    """
    own = ("client", "arguments", "print_env", "stop_after", "url", "as_json", "config")
    flags = given({name: value for name, value in ctx.params.items() if name not in own})
    with reporting():
        if as_json and not print_env:
            raise ConfigError("--json goes with --print-env: else the client has the output")
        # Here and not above: httpx takes a while to import, and --help needs none of it.
        from mlxcache.cli.launch.launching import Launching  # noqa: PLC0415

        launching = Launching(flags, ctx.params["config"], url)
        name = client or launching.choose()
        if print_env:
            launching.print_env(name, arguments or [], as_json=as_json)
            return
        status = launching.run(name, arguments or [], stop_after=stop_after)
    raise typer.Exit(status)
