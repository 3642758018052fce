"""The commands `launch`, which starts a coding agent on a server, and `connect`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from typing import Annotated, Any

import typer

from mlxcache.cli.connect import launch_command, own_command
from mlxcache.cli.help import App, Command
from mlxcache.cli.launch.clients import (
    CLIENTS,
    ClientName,
    Service,
    anyclaude_variables,
    claude_variables,
    shell_line,
)
from mlxcache.cli.options import (
    Config,
    Flags,
    Json,
    Url,
    Where,
    find_server,
    located,
    with_settings,
)
from mlxcache.cli.show import Result
from mlxcache.config.flags import argument, option, switch
from mlxcache.config.folder import default_cache_dir
from mlxcache.errors import ConfigError

Client = Annotated[
    ClientName | None,
    argument("CLIENT", "claude, opencode, codex, qwen, pi, cline, copilot, cn or anyclaude."),
]
Arguments = Annotated[
    list[str] | None,
    argument("-- ARGS", "Arguments for the client, after two dashes."),
]
PrintEnv = Annotated[
    bool,
    switch("Print the variables for a shell, and start nothing.", "--print-env"),
]
SmallModel = Annotated[
    str | None,
    option("NAME", "A model of the server for titles and sub-agents, in claude and opencode."),
]
StopAfter = Annotated[
    bool,
    switch("Stop the server after the client, if this command started it.", "--stop-after"),
]


_MISSPELT = 0.85
"""Minimum similarity of an unknown option to a known one that is suggested for it."""


_ALSO_CALLED = {"continue": ClientName.CONTINUE.value}


class LaunchCommand(Command):
    """Command whose error for an unknown option says where arguments for the client go."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        args = [*(_ALSO_CALLED.get(word, word) for word in args[:1]), *args[1:]]
        try:
            return super().parse_args(ctx, [*args])
        except typer.BadParameter:
            raise
        except Exception as error:
            unknown: str | None = getattr(error, "option_name", None)
            possible = getattr(error, "possibilities", ...)
            if unknown is None or possible is ...:  # not click's NoSuchOption
                raise
            hint = self._dashes_hint(args, unknown, possible or ())
            if hint is None:
                raise
            known: Any = type(error)
            raise known(unknown, f"No such option: {unknown}. {hint}", ctx=ctx) from None

    def _dashes_hint(
        self, given: Sequence[str], unknown: str, possible: Sequence[str]
    ) -> str | None:
        """Return a message with a command line in which `--` precedes the client's arguments.

        One of `possible` is suggested too, if it is similar enough to the `unknown` option. Returns
        None if no client is named before it.
        """
        parser = self.make_parser(typer.Context(self, ignore_unknown_options=True))
        found = parser.parse_args([*given])[0]
        named, others = found["client"], found["arguments"]
        if named not in list(ClientName):
            return None
        own, rest = [], [*others]
        for word in given:  # the others follow one another among all
            if word == "--":
                break
            if rest and word == rest[0] and named in own:
                del rest[0]
            else:
                own.append(word)
        like = get_close_matches(unknown, possible, 1, _MISSPELT)
        return (f"Did you mean {like[0]}? " if like else "") + (
            f"Arguments for {CLIENTS[ClientName(named)].title} go after `--`: "
            f"{own_command()} launch {shlex.join([*own, '--', *others])}"
        )


@partial(located, find=find_server)
def connect(where: Where) -> Result:
    """Print how clients connect to a running server: addresses, and variables for a shell."""
    (model, *_) = where.models()
    url, has_key = where.url, where.has_key
    service = Service(url, model["id"], int(model["context_length"]))
    lines = {
        "launch": launch_command(url, default_cache_dir()),
        "claude": shell_line("claude", claude_variables(service), has_key=has_key),
        "anyclaude": shell_line("anyclaude", anyclaude_variables(service), has_key=has_key),
        "openai": f"{url}/v1",
        "anthropic": url,
        "dashboard": f"{url}/dashboard",
    }
    key = "\n\nThe key is taken from the variable MLXCACHE_API_KEY." if has_key else ""
    return Result(lines, "\n\n".join(map("\n".join, lines.items())) + key)


app = App(add_completion=False)


@app.command("launch", cls=LaunchCommand)
@with_settings(brief=True)
def launch(
    client: Client = None,
    arguments: Arguments = None,
    *,
    print_env: PrintEnv = False,
    stop_after: StopAfter = False,
    small_model: SmallModel = None,
    url: Url = None,
    as_json: Json = False,
    flags: Flags,
    config: Config = None,
) -> None:
    """Start a coding agent on this server, and the server first if none runs.

    If no mlxcache server runs, one is started in the background with the flags below, and keeps
    running after the client ends. The client's own settings are not changed. Without CLIENT, a menu
    is shown. All flags of `mlxcache serve` may be given, also those not listed here.
    """
    if as_json and not print_env:
        raise ConfigError(
            "--json needs --print-env: without it the client runs and uses the output"
        )
    # Here and not above: it takes 50 ms to import, and --help needs none of it.
    from mlxcache.cli.launch.launching import Launch  # noqa: PLC0415

    started = Launch(flags, config, url, small_model)
    name = client or started.choose()
    if print_env:
        started.print_env(name, arguments or [], as_json=as_json)
        return
    status = started.run(name, arguments or [], stop_after=stop_after)
    raise typer.Exit(status)
