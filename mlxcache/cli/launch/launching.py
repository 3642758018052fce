"""Steps of `mlxcache launch`: find or start the server, then run the client or print its setup."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer
from rich.console import Console
from rich.prompt import Prompt
from rich.table import Table
from rich.text import Text

from mlxcache.cli.connect import (
    base_url,
    current_folder,
    find_on_path,
    own_command,
    own_sources,
)
from mlxcache.cli.launch.clients import (
    CLIENTS,
    KEY_VARIABLE,
    Client,
    ClientName,
    Invocation,
    Service,
    Setup,
    proxy_bypass,
    quote_value,
)
from mlxcache.cli.launch.processes import (
    OtherServerStarted,
    RunningServer,
    StartedServer,
    check_program,
    deferred_signals,
    find_free_port,
    query_server,
    remove_abandoned_settings,
    run_client,
    say,
    start_server,
    wait_until_ready,
    watching,
)
from mlxcache.cli.listen import PortTaken, is_taken
from mlxcache.cli.options import named_url
from mlxcache.cli.output import can_ask
from mlxcache.cli.remote import Remote
from mlxcache.cli.show import print_json
from mlxcache.config import SETTINGS, format_size, load_settings, machine_bytes, read_keys
from mlxcache.config.models import DEMO_ID
from mlxcache.config.settings import is_loopback
from mlxcache.errors import ConfigError, MlxcacheError
from mlxcache.store.lock import servers

_USED = ("host", "port", "cache_dir", "api_key", "api_keys_file", "model")
"""Flags that are used even if a server is already running: they find it or are sent to it."""


class Launch:
    """One call of the command `launch`, with its flags by the names of settings.

    `settings` are those of the server to start if none runs. `url` is the address of the server
    that was found or is to be started, and `running` tells whether an mlxcache server answers
    there.
    """

    def __init__(
        self,
        flags: Mapping[str, Any],
        config: Path | None,
        url: str | None,
        small: str | None = None,
    ):
        self._small = small
        asked = named_url(url, None)
        address = _local_address(asked) if asked else {}
        self._elsewhere = address is None
        self._flags = {**flags, **(address or {})}
        self._config = config
        self.settings = load_settings(self._flags, os.environ, config)
        self.key = next(iter(read_keys(self.settings).values), None)
        local = base_url(self.settings.host, self.settings.port)
        self.url = str(asked) if self._elsewhere else local
        # port 0 asks for a server of its own on any free port, where none can answer yet
        may_answer = bool(self._elsewhere or self.settings.port)
        self.running = may_answer and Remote(self.url).answers()
        fixed = self._elsewhere or any(self._flags.get(one) for one in ("host", "port", "model"))
        if not self.running and not fixed:
            urls = (one.url for one in servers(self.settings.cache_dir))
            if (found := next((one for one in urls if Remote(one).answers()), None)) is not None:
                self.url, self.running = found, True

    def choose(self) -> ClientName:
        """Show the menu and return the client that the user chose. Raises ConfigError."""
        found = query_server(self.url, self.key) if self.running else None
        default = self.settings.for_request(None)
        return choose_client(found, default.model, default.context)

    def run(self, name: ClientName, arguments: list[str], *, stop_after: bool) -> int:
        """Run the client and return its exit status, after starting a server if none runs.

        Blocks until the client ends. Raises MlxcacheError if one of them cannot be started.
        """
        self._check_small(name)
        client = CLIENTS[name]
        invocation = _invocation(client, arguments)
        check_program(client, invocation)  # fails before a model is loaded
        for path in remove_abandoned_settings():
            say(f"{path}, left by an earlier launch, cannot be removed; it may hold a key.")
        with deferred_signals() as signals:
            service, server = self._served(signals)
            try:
                setup = client.configure(service, invocation)
                _announce(client, invocation, service, new=server.is_new)
                with watching(service, quiet=client.is_quiet(arguments)):
                    status = run_client(invocation, setup, service, signals)
            except BaseException:
                server.stop("The client was not started: stopping its server.")
                raise
            server.leave(service, status, stop_after=stop_after)
            return status

    def print_env(self, name: ClientName, arguments: list[str], *, as_json: bool) -> None:
        """Print the client's variables and command, as shell lines or JSON, and start nothing.

        Blocks while a running server loads its model.
        """
        self._check_small(name)
        if self.running:
            service = self._ready(RunningServer(self.url))
            self._report_unused_flags()
        else:
            service = self._expected()
        client = CLIENTS[name]
        invocation = _invocation(client, arguments)
        if not invocation.installed:
            say(client.missing)
        elif client.oldest is not None:
            check_program(client, invocation)
        setup = client.configure(service, invocation)
        if setup.by_hand is not None:
            say(setup.by_hand)
        if as_json:
            print_json(setup_object(setup, service, invocation))
            return
        print("\n".join(shell_lines(setup, service, invocation.environ)))
        say(f"The command to run with them: {shlex.join(_command(setup, invocation))}")
        if setup.settings_in is not None and setup.by_hand is None:
            names = ", ".join(setup.settings["env"])
            say(
                f"Your settings of {name.value} set {names} too and override these variables; "
                "without --print-env, launch overrides your settings."
            )

    def _served(self, signals: Sequence[int]) -> tuple[Service, RunningServer | StartedServer]:
        """Find or start a server and wait until it is ready, as `wait_until_ready` does."""
        while not self.running:
            try:
                started = self._start()
                return self._ready(started, signals), started
            except OtherServerStarted as error:
                say(str(error))
                self.running = bool(self.settings.port)  # with port 0, another port is tried
        server = RunningServer(self.url)
        service = self._ready(server, signals)
        say(f"Using the server that runs at {service.url}. It serves {service.model}.")
        self._report_unused_flags()
        return service, server

    def _start(self) -> StartedServer:
        """Start a server in the background, without waiting until it is ready."""
        if self._elsewhere:
            raise MlxcacheError(
                f"Nothing answers at {self.url}. launch starts servers on this machine only."
            )
        settings, flags = self.settings, dict(self._flags)
        keys = flags.pop("api_key", None) or ()
        if len(keys) > 1:
            raise ConfigError("--api-key: a client sends one; give several in --api-keys-file FILE")
        if not settings.port:
            flags["port"] = str(find_free_port(settings.host))
            settings = replace(settings, port=int(flags["port"]))
            self.url = base_url(settings.host, settings.port)
        elif is_taken(settings.host, settings.port):
            if Remote(self.url).answers():
                raise OtherServerStarted(self.url)
            raise PortTaken(settings.host, settings.port)
        environ = dict(os.environ)
        if keys:  # as a variable: `ps` shows flags to all users of the machine
            environ[SETTINGS["api_key"].variable] = keys[0]
        started = start_server(settings, _words({**flags, "config": self._config}), environ)
        what = " and ".join(one.model or "the built-in demo" for one in settings.entries)
        say(f"Starting a server for {what} in the background; its log is {started.log}")
        return started

    def _report_unused_flags(self) -> None:
        unused = [f"--{name.replace('_', '-')}" for name in self._flags if name not in _USED]
        if unused:
            say(f"A server runs already at {self.url}: {', '.join(unused)} changes nothing.")

    def _check_small(self, name: ClientName) -> None:
        if self._small is not None and not CLIENTS[name].takes_small:
            names = [one.name for one in CLIENTS.values() if one.takes_small]
            raise ConfigError(f"--small-model is only for {' and '.join(names)}")

    def _ready(self, server: RunningServer | StartedServer, signals: Sequence[int] = ()) -> Service:
        """Wait until `server` is ready, and return it with the models that the user asked for.

        The first `--model` is the client's model, unless the server was started with it, which is
        stopped if a model is not served.
        """
        service = wait_until_ready(server, self.key, signals)
        remote = Remote(service.url, self.key)
        named = not server.is_new and self._flags.get("model")
        try:
            models = remote.models() if self._small or named else []
            if named:
                service = self._with_named(service, models, remote)
            if self._small is None:
                return service
            if (found := _find_served(models, (self._small,))) is None:
                names = ", ".join(str(one["id"]) for one in models)
                raise MlxcacheError(
                    f"The server at {service.url} has no model {self._small!r} for --small-model; "
                    f"its models are {names}."
                )
            return replace(service, small=str(found["id"]))
        except MlxcacheError:
            server.stop()
            raise

    def _with_named(
        self, service: Service, models: Sequence[Mapping[str, Any]], remote: Remote
    ) -> Service:
        """Return `service` with the model of --model.

        It is loaded now if it never was, because its context length is not known before. Blocks.
        """
        found = [_find_served(models, entry.names) for entry in self.settings.entries]
        if None in found:
            names = ", ".join(str(one["id"]) for one in models)
            choice = "Name one of them with --model" if len(models) > 1 else "Leave out --model"
            raise MlxcacheError(
                f"The server at {service.url} serves {names}. {choice} to use it, stop it, or "
                "start another one beside it with --port 0."
            )
        model = found[0]
        if model is None or model["id"] == service.model:
            return service
        if not model.get("context_length"):
            say(f"Loading {model['id']}, which the server at {service.url} has not loaded before.")
            model = remote.load_model(str(model["id"]))
        name = str(model["id"])
        return replace(service, model=name, asked=name, context=int(model["context_length"]))

    def _expected(self) -> Service:
        """Describe the server that would be started, from the settings and the model's files."""
        settings = self.settings.for_request(None)
        say(f"No server runs at {self.url} yet: `{own_command()} serve` starts one.")
        if settings.model is None:
            from mlxcache.model.demo import CONTEXT  # noqa: PLC0415 - MLX takes seconds

            length = settings.context or CONTEXT
            return Service(self.url, DEMO_ID, length, self.key, small=self._small)
        from mlxcache.engine.opening import spec_of  # noqa: PLC0415 - as above
        from mlxcache.model.examine import examine  # noqa: PLC0415
        from mlxcache.residency.memory import bits_of  # noqa: PLC0415

        spec = replace(spec_of(settings, settings.model), id=None, draft=None)
        info = examine(spec, bits_of(settings)).info
        return Service(self.url, info.id, info.context_length, self.key, small=self._small)


def _announce(client: Client, invocation: Invocation, service: Service, *, new: bool) -> None:
    if own_sources(invocation.cwd):
        say(
            f"{client.title} works on the sources of mlxcache, in {invocation.cwd}. "
            f"For another project: cd YOUR-PROJECT, then {own_command()} launch {client.name}"
        )
    if new and not client.is_quiet(invocation.arguments):
        say(
            f"Its first prompt ({client.about_first_prompt} with the demo model) is read once. "
            f"How far it is: {service.url}/dashboard"
        )


def _find_served(
    models: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Mapping[str, Any] | None:
    for one in models:
        if {one["id"], one.get("display_name"), *one.get("aliases", ())} & set(names):
            return one
    return None


def _local_address(url: str) -> dict[str, str] | None:
    """Return the flags `host` and `port` for `url`, or None where no server can be started.

    That is on another machine, with https or without a port. Raises ConfigError if `url` is not an
    HTTP address.
    """
    try:
        parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
        host, port = parts.hostname or "", parts.port
    except ValueError:
        host, port = "", None
    if not host or parts.scheme not in ("http", "https"):
        raise ConfigError(f"--url must be an address such as http://127.0.0.1:8081, not {url!r}")
    if parts.scheme != "http" or port is None or not is_loopback(host):
        return None
    return {"host": host, "port": str(port)}


def _invocation(client: Client, arguments: list[str]) -> Invocation:
    path = find_on_path(client.name)
    surroundings = (tuple(arguments), os.environ, Path.home(), current_folder())
    return Invocation(Path(path or client.name), *surroundings, installed=path is not None)


def _words(flags: Mapping[str, Any]) -> list[str]:
    """Return flags, given by setting name, as words of a command line."""
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is True:
                words.append(flag)
            elif one is not None and one is not False:
                words += [flag, str(one)]
    return words


def shell_lines(setup: Setup, service: Service, environ: Mapping[str, str]) -> list[str]:
    """Return lines for `eval` in a POSIX shell that set and unset the client's variables.

    Each line is a complete command. The key is read from MLXCACHE_API_KEY if that variable holds
    it; otherwise it is written out.
    """
    in_variable = service.key is not None and environ.get(KEY_VARIABLE) == service.key
    found = [f"unset {' '.join(setup.unset)};"] if setup.unset else []
    values = setup.variables if in_variable else setup.values(service)
    for name, value in {**proxy_bypass(service, environ), **values}.items():
        found.append(f"export {name}={quote_value(value, has_key=in_variable)};")
    return found


def _command(setup: Setup, invocation: Invocation) -> list[str]:
    """Return the words that run the client; FILE stands for that of `setup.by_hand`."""
    flag = setup.settings_in if setup.by_hand is not None else None
    file = [flag, "FILE"] if flag is not None and flag.startswith("-") else []
    return [invocation.program.name, *file, *setup.arguments, *invocation.arguments]


def setup_object(setup: Setup, service: Service, invocation: Invocation) -> dict[str, Any]:
    """Return the object that `launch --print-env --json` prints."""
    return {
        "object": "launch",
        "command": _command(setup, invocation),
        "set": {**proxy_bypass(service, invocation.environ), **setup.values(service)},
        "unset": list(setup.unset),
    }


# -- the menu ----------------------------------------------------------------------------------

MIN_PROMPTS = 2
"""Minimum context for a client, in multiples of its first prompt. A shorter one is reported."""

GB = 10**9
MODELS = (
    (80 * GB, "mlx-community/Qwen3-Next-80B-A3B-Instruct-4bit", 45 * GB),
    (30 * GB, "mlx-community/Qwen3-Coder-30B-A3B-Instruct-4bit", 17 * GB),
    (0, "mlx-community/Qwen3-4B-Instruct-2507-4bit", 2.3 * GB),
)
"""Models to suggest, which can call tools: minimum memory, Hub id, bytes of the weights."""

Which = Callable[[str], str | None]


_LEAVE = "q"


class _Menu(Prompt):
    illegal_choice_message = (
        f"Type a number from 1 to {len(CLIENTS)}, a name such as {ClientName.OPENCODE}, or "
        f"{_LEAVE} to leave."
    )


def choose_client(found: Service | None, model: str | None, context: int | None) -> ClientName:
    """Print the menu and return the client that the user chooses. Blocks for the answer.

    `found` is the running server, else the one to start has `model` (None for the demo) and
    `context`.
    """
    usage = f"run mlxcache launch CLIENT, where CLIENT is {' or '.join(CLIENTS)}"
    if not can_ask():
        raise ConfigError(f"no client is given: {usage}")
    console = Console(stderr=True, highlight=False, markup=False)
    print_menu(console, found, model, context)
    numbers = {str(number): name for number, name in enumerate(CLIENTS, start=1)}
    choices = [*numbers, *(name.value for name in CLIENTS), _LEAVE]
    try:
        answer = _Menu.ask(
            f"Which one ({_LEAVE} to leave)",
            console=console,
            choices=choices,
            show_choices=False,
            case_sensitive=False,
            default="1",
        )
    except EOFError as error:
        raise ConfigError(f"no client was chosen: {usage}") from error
    if answer == _LEAVE:
        raise typer.Exit
    return numbers.get(answer) or ClientName(answer)


def print_menu(
    console: Console,
    found: Service | None,
    model: str | None,
    context: int | None,
    *,
    which: Which = find_on_path,
    memory: int | None = None,
) -> None:
    """Print the machine's memory, the model, and one entry for each client.

    If a server for the demo would be started, a command with a model that fits the `memory` is
    printed too, on a line of its own, to be copied.
    """
    memory = machine_bytes() if memory is None else memory
    length = found.context if found is not None else context
    served = found.model if found is not None else model or "the built-in demo"
    with_length = f" with a context of {length:,} tokens" if length else ""
    how = f"{found.url} serves" if found is not None else "a server would be started for"
    console.print(f"{format_size(memory)} of memory; {how} {served}{with_length}.")
    table = Table(box=None, pad_edge=False, show_header=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for number, client in enumerate(CLIENTS.values(), start=1):
        table.add_row(str(number), Text(client.name, "bold"), _description(client, length, which))
    console.print(table)
    if found is None and model is None:
        name, weights = next((name, size) for least, name, size in MODELS if memory >= least)
        console.print(
            "Without --model the built-in demo is served, whose replies have no meaning. A model "
            f"that fits this machine ({format_size(int(weights))} of {format_size(memory)}):"
        )
        line = f"{own_command()} launch claude --model {name}"
        console.print(Text(line, "cyan"), soft_wrap=True)


def _description(client: Client, context: int | None, which: Which) -> Text:
    text = Text(f"{client.title}: {client.good_for}. ")
    old = f", {client.on_old_node:,} with Node.js before 22" if client.on_old_node else ""
    text.append(f"First prompt: {client.about_first_prompt}{old}.")
    if context is not None and context < client.first_prompt * MIN_PROMPTS:
        text.append(" The context is too short for it.", "yellow")
    if which(client.name) is None:
        text.append(" Not installed.", "yellow")
    return text
