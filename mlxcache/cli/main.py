"""The command line `mlxcache`, whose commands are imported only when they run.

Importing HTTP clients, numpy or MLX takes up to seconds, for which `--version`, `--help` and shell
completion must not wait. Exit status: 0 if done, 1 if failed, 2 for wrong usage.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Callable
from difflib import get_close_matches
from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.main import get_command

from mlxcache import __version__
from mlxcache.cli.help import App, Group


class Lazy(NamedTuple):
    """A command: the `module:name` of its function or Typer app, and its line in the help."""

    target: str
    help: str


COMMANDS = {
    "serve": Lazy(
        "mlxcache.cli.serve:serve",
        "Serve a model to coding agents, over the OpenAI and the Anthropic API.",
    ),
    "launch": Lazy(
        "mlxcache.cli.launch.command:app",
        "Start a coding agent on this server, and the server first if none runs.",
    ),
    "connect": Lazy(
        "mlxcache.cli.launch.command:connect",
        "Print how clients connect to a running server: addresses, and variables for a shell.",
    ),
    "sessions": Lazy(
        "mlxcache.cli.sessions:app",
        "List, show, pin, rename, fork and remove sessions, with a running server or without.",
    ),
    "models": Lazy(
        "mlxcache.cli.models:app",
        "List models, load and unload those of a running server, download and remove them.",
    ),
    "snapshot": Lazy(
        "mlxcache.cli.sessions:snapshot",
        "Write a session to one file, to continue it on another machine or server.",
    ),
    "restore": Lazy(
        "mlxcache.cli.sessions:restore",
        "Import a session from a snapshot or a prompt cache of mlx-lm; its next turn is warm.",
    ),
    "warm": Lazy(
        "mlxcache.cli.cache:warm",
        "Compute a prefix ahead of its first use, so that the first turn is warm.",
    ),
    "explain": Lazy(
        "mlxcache.cli.explain:explain",
        "Explain where two requests differ, why, and what that costs; or audit one request.",
    ),
    "cache": Lazy(
        "mlxcache.cli.cache:app", "Show figures of the cache, verify its files, prune and clear it."
    ),
    "top": Lazy(
        "mlxcache.cli.top:top",
        "Show budgets, requests and sessions of a running server, live. Ctrl-C ends it.",
    ),
    "doctor": Lazy(
        "mlxcache.cli.doctor.command:doctor",
        "Check this machine, its settings, and the models that are served.",
    ),
    "plan": Lazy(
        "mlxcache.cli.plan:plan",
        "Predict what users of a model get from a machine: hit rates, first tokens, load, disk.",
    ),
    "trace": Lazy(
        "mlxcache.cli.plan:trace",
        "Record the requests of a running server as a trace without any text.",
    ),
    "bench": Lazy(
        "mlxcache.bench.command:bench",
        "Measure latency, speed and memory of this server and others on the same model, in turn.",
    ),
    "prove": Lazy(
        "mlxcache.bench.prove:prove",
        "Measure mlxcache and mlx-lm on this machine, and write one report that can be published.",
    ),
}
"""The commands, in the order of the help; each line is the first of its own help."""


class LazyGroup(Group):
    """Command group that imports each command only when it is called or completed.

    Until then, a placeholder represents the command in the help.
    """

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            better = _improve(error.message)
            if better == error.message:
                raise
            raise typer.BadParameter(
                better, ctx=error.ctx, param=error.param, param_hint=error.param_hint
            ) from None

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """Import the command named first in `args`, in place of its placeholder."""
        name = args[0] if args else ""
        if name in COMMANDS:
            self.add_command(load(name), name)
        return super().resolve_command(ctx, args)


def load(name: str) -> Any:
    """Import a command and return it as a click command or group."""
    module, _, attribute = COMMANDS[name].target.partition(":")
    found: typer.Typer | Callable[..., None] = getattr(import_module(module), attribute)
    if not isinstance(found, typer.Typer):
        made = App(add_completion=False)
        made.command(name)(found)
        found = made
    return get_command(found)


def load_all() -> Any:
    """Import all commands and return the click group of `app` with them, for documentation."""
    group: Any = get_command(app)
    for name in COMMANDS:
        group.add_command(load(name), name)
    return group


def _improve(message: str) -> str:
    """Remove pydantic's prefix, and suggest the allowed value most similar to the wrong one."""
    message = message.removeprefix("Value error, ")
    wrong = re.fullmatch(r"'(.+)' is not one of ('.+')\.", message)
    if wrong is None:
        return message
    like = get_close_matches(wrong[1], re.findall(r"'([^']+)'", wrong[2]), 1)
    return f"{message[:-1]}: did you mean {like[0]}?" if like else message


_HELP = {"help_option_names": ["-h", "--help"]}

app = App(
    name="mlxcache",
    cls=LazyGroup,
    context_settings=_HELP,
    no_args_is_help=True,
    invoke_without_command=True,
)


def _placeholder() -> None:
    """Stand for a command that is not imported yet."""


for _name, _lazy in COMMANDS.items():
    app.command(_name, help=_lazy.help)(_placeholder)


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
    warn_of_unknown_variables()


def warn_of_unknown_variables() -> None:
    if not any(name.startswith("MLXCACHE_") for name in os.environ):
        return
    # Here and not above: what reads the settings takes a third of the time of --version.
    from rich.text import Text  # noqa: PLC0415

    from mlxcache.cli.options import FRONT, SERVICE, URL_VARIABLE  # noqa: PLC0415
    from mlxcache.cli.output import console  # noqa: PLC0415
    from mlxcache.config import unknown_variables  # noqa: PLC0415

    for name, like in unknown_variables(os.environ, (URL_VARIABLE, SERVICE, FRONT)):
        advice = f"; did you mean {like}?" if like else ""
        text = f"{name} is ignored: no setting has that name{advice}"
        console(stderr=True).print(Text.assemble(("Warning: ", "bold yellow"), text))


@app.command()
def version(
    *,
    as_json: Annotated[
        bool, typer.Option("--json", metavar="", help="Print JSON, for programs.")
    ] = False,
) -> None:
    """Print the version."""
    print(json.dumps({"version": __version__}, indent=2) if as_json else f"mlxcache {__version__}")


def main() -> None:
    """Run the command given on the command line, and exit with its status."""
    try:
        if sys.argv[1:] == ["--version"]:
            version()  # typer parses options with pydantic, which doubles the time
        else:
            app()
    except SystemExit as end:
        _exit(end.code if isinstance(end.code, int) else int(end.code is not None))


def _exit(status: int) -> None:
    """Exit with `status` without waiting for threads, which may be downloading or loading a model.

    The destructors of MLX are skipped too: they abort the process while an MLX thread is computing.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if threading.active_count() > 1 or "mlx.core" in sys.modules:
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
