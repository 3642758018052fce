"""The command `mlxcache`. Exit status: 0 done, 1 failed, 2 wrong usage."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Annotated

import typer
from rich.text import Text

from mlxcache import __version__
from mlxcache.cli import cache, sessions
from mlxcache.cli.doctor.command import doctor
from mlxcache.cli.explain import explain
from mlxcache.cli.launch.command import launch
from mlxcache.cli.output import console
from mlxcache.cli.serve import serve
from mlxcache.cli.show import print_json
from mlxcache.cli.snapshot import restore, snapshot
from mlxcache.cli.target import URL_VARIABLE, Json
from mlxcache.cli.top.command import top
from mlxcache.cli.warm import warm
from mlxcache.config import unknown_variables

_HELP = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(
    name="mlxcache",
    context_settings=_HELP,
    no_args_is_help=True,
    invoke_without_command=True,
    pretty_exceptions_enable=False,  # it prints local variables, and so keys and prompts
    rich_markup_mode="rich",
)
app.command()(serve)
app.command()(launch)
app.add_typer(sessions.app, name="sessions")
for command in (snapshot, restore, warm, explain):
    app.command()(command)
app.add_typer(cache.app, name="cache")
app.command()(top)
app.command()(doctor)


@app.callback()
def options(
    *,
    show_version: Annotated[
        bool, typer.Option("--version", metavar="", help="Print the version and exit.")
    ] = False,
) -> None:
    """A model server for coding agents on MLX: every turn after the first starts warm."""
    if show_version:
        version()
        raise typer.Exit
    for name, like in unknown_variables(os.environ, (URL_VARIABLE,)):
        advice = f"; did you mean {like}?" if like else ""
        text = f"{name} is ignored: no setting has that name{advice}"
        console(stderr=True).print(Text.assemble(("Warning: ", "bold yellow"), text))


@app.command()
def version(*, as_json: Json = False) -> None:
    """Print the version."""
    if as_json:
        print_json({"version": __version__})
    else:
        print(f"mlxcache {__version__}")


_PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(add_help_option=False, context_settings=_PASSED_ON)
def bench(ctx: typer.Context) -> None:
    """Measure this server, and others for comparison, as a client sees them."""
    # Here and not above: it imports MLX, which takes seconds.
    from mlxcache.bench.command import bench as command  # noqa: PLC0415

    _pass_on(command, "bench", ctx.args)


@app.command(add_help_option=False, context_settings=_PASSED_ON)
def prove(ctx: typer.Context) -> None:
    """Measure this machine beside mlx-lm, and write one report that can be published."""
    from mlxcache.bench.prove.command import prove as command  # noqa: PLC0415 - as above

    _pass_on(command, "prove", ctx.args)


def _pass_on(command: Callable[..., None], name: str, args: list[str]) -> None:
    """Run a command whose flags the outer one does not know."""
    inner = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    inner.command(context_settings=_HELP)(command)
    inner(args=args, prog_name=f"mlxcache {name}")


def main() -> None:
    """Run a command: the entry point of the wheel and of bin/mlxcache."""
    try:
        app()
    except SystemExit as end:
        _exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def _exit(status: int) -> None:
    """Exit without waiting for threads, which may download or load a model.

    MLX's threads count too: its destructors abort the process while one of them computes.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.active_count() > 1 or "mlx.core" in sys.modules:
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
