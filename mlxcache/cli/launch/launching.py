"""Steps of `mlxcache launch`: find or start the server, then run the client or print its setup."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.text import Text

from mlxcache.cli.agent_settings import current_folder
from mlxcache.cli.connect import base_url, quote_value
from mlxcache.cli.launch.chooser import choose_client
from mlxcache.cli.launch.clients import (
    CLIENTS,
    TAKES_SMALL,
    Client,
    ClientName,
    check_program,
    find_program,
)
from mlxcache.cli.launch.process import deferred_signals, remove_abandoned_settings, run_client
from mlxcache.cli.launch.server import (
    OtherServerStarted,
    StartedServer,
    find_free_port,
    query_server,
    server_answers,
    start_server,
    wait_until_ready,
    was_asked,
)
from mlxcache.cli.launch.setup import (
    KEY_VARIABLE,
    Invocation,
    Service,
    Setup,
    proxy_bypass,
)
from mlxcache.cli.launch.watching import watching
from mlxcache.cli.listen import PortTaken, is_taken
from mlxcache.cli.output import console
from mlxcache.cli.own_command import own_command, own_sources
from mlxcache.cli.remote import Remote
from mlxcache.cli.show import print_json
from mlxcache.cli.target import URL_VARIABLE
from mlxcache.config import SETTINGS, load_settings, read_keys
from mlxcache.config.models import DEMO_ID
from mlxcache.config.settings import is_loopback
from mlxcache.errors import ConfigError, MlxcacheError
from mlxcache.store.lock import servers
from mlxcache.store.mac_folder import locate_cache_dir

_USED = ("host", "port", "cache_dir", "api_key", "api_keys_file", "model")
"""Flags that are used even if a server is already running: they find it or are sent to it."""


class Launch:
    """One call of the command `launch`.

    `flags` are settings given as flags, by name, and `config` is the path of config.toml or None.
    The argument `url` is the value of --url, or None, which stands for that of MLXCACHE_URL.
    `small` is the name of the model for titles and sub-agents, None for the client's main model.

    The attribute `settings` holds the settings of the server to start if none runs. The attribute
    `url` is the address of the server that was found or is to be started, and `running` tells
    whether an mlxcache server answers there. `url` changes when a server is started on a free port,
    and `running` if another command starts a server first.
    """

    def __init__(
        self,
        flags: Mapping[str, Any],
        config: Path | None,
        url: str | None,
        small: str | None = None,
    ):
        self._small = small
        asked = url or os.environ.get(URL_VARIABLE)
        address = _local_address(asked) if asked else {}
        self._elsewhere = address is None
        self._flags = {**flags, **(address or {})}
        self._config = config
        self.settings = load_settings(self._flags, os.environ, config)
        self.key = next(iter(read_keys(self.settings).values), None)
        local = base_url(self.settings.host, self.settings.port)
        self.url = str(asked) if self._elsewhere else local
        self.running = False
        self._find()

    def choose(self) -> ClientName:
        """Show the menu and return the client that the user chose.

        Raises ConfigError without a terminal, or if the input ends.
        """
        found = query_server(self.url, self.key) if self.running else None
        default = self.settings.for_request(None)
        return choose_client(found, default.model, default.context)

    def run(self, name: ClientName, arguments: list[str], *, stop_after: bool) -> int:
        """Run the client and return its exit status. Blocks until it ends.

        If no server runs, one is started first; with `stop_after`, it is stopped when the client
        ends. Raises MlxcacheError if the client or the server cannot be started.
        """
        self._check_small(name)
        invocation, client = _invocation(name, arguments), CLIENTS[name]
        check_program(client, invocation)  # fails before a model is loaded
        for path in remove_abandoned_settings():
            _say(f"{path}, left by an earlier launch, cannot be removed; it may hold a key.")
        with deferred_signals() as signals:
            service, started = self._served(signals)
            try:
                setup = client.configure(service, invocation)
                self._announce(client, invocation, service, new=started is not None)
                with watching(service, quiet=client.is_quiet(arguments)):
                    status = run_client(invocation, setup, service, signals)
            except BaseException:
                if started is not None:
                    _say("The client was not started: stopping its server.")
                    started.stop()
                raise
            if started is not None:
                self._leave(started, service, status, stop_after=stop_after)
            return status

    def _announce(
        self, client: Client, invocation: Invocation, service: Service, *, new: bool
    ) -> None:
        """Print hints to standard error before the client starts, where they apply.

        One says that the client would work on the sources of mlxcache, the other how long its first
        prompt is. The latter is printed only if this command started the server (`new`), which then
        has not read the prompt yet.
        """
        if own_sources(invocation.cwd):
            _say(
                f"{client.title} works on the sources of mlxcache, in {invocation.cwd}. "
                f"For another project: cd YOUR-PROJECT, then {own_command()} launch {client.name}"
            )
        if new and not client.is_quiet(invocation.arguments):
            _say(
                f"Its first prompt ({client.about_first_prompt} with the demo model) is read once. "
                f"How far it is: {service.url}/dashboard"
            )

    def _leave(
        self, started: StartedServer, service: Service, status: int, *, stop_after: bool
    ) -> None:
        """Stop the started server, or print how to stop it, after the client has ended.

        The server is stopped with `stop_after`, or if the client's exit `status` is not 0 and it
        sent no request.
        """
        unused = status != 0 and not was_asked(service)
        if unused and not stop_after:
            _say(f"The client sent no request and ended with {status}: stopping its server.")
        if unused or stop_after:
            started.stop()
            return
        pid = started.process.pid
        _say(f"The server keeps running at {service.url}. To stop it: kill {pid}")

    def print_env(self, name: ClientName, arguments: list[str], *, as_json: bool) -> None:
        """Print the client's variables and command, without starting the client or a server.

        They are printed as shell lines, or with `as_json` as one JSON object. Blocks while a
        running server loads its model.
        """
        self._check_small(name)
        if self.running:
            service = self._choose_models(wait_until_ready(self.url, self.key, None))
            self._report_unused_flags()
        else:
            service = self._expected()
        invocation = _invocation(name, arguments, needed=False)
        if CLIENTS[name].oldest is not None:
            check_program(CLIENTS[name], invocation)
        setup = CLIENTS[name].configure(service, invocation)
        if setup.by_hand is not None:
            _say(setup.by_hand)
        if as_json:
            print_json(setup_object(setup, service, invocation))
            return
        print("\n".join(shell_lines(setup, service, invocation.environ)))
        command = shlex.join([invocation.program.name, *setup.arguments, *invocation.arguments])
        _say(f"The command to run with them: {command}")
        if setup.settings_flag is not None and setup.by_hand is None:
            names = ", ".join(setup.settings["env"])
            _say(
                f"Your settings of {name.value} set {names} too and override these variables; "
                "without --print-env, launch overrides your settings."
            )

    def _find(self) -> None:
        """Look for a running server: set `running`, and `url` to the address of one that answers.

        `running` becomes True if one answers, else False. First `url` is tried, unless the
        configured port is 0. Then the servers that are listed in the cache folder are tried, but
        only if the user gave neither an address (--host, --port, --url, MLXCACHE_URL) nor --model.
        """
        # port 0 asks for a server of its own on any free port, where none can answer yet
        self.running = bool(self._elsewhere or self.settings.port) and server_answers(self.url)
        fixed = self._elsewhere or any(self._flags.get(one) for one in ("host", "port", "model"))
        if not self.running and not fixed:
            for one in servers(locate_cache_dir(self.settings.cache_dir)):
                if server_answers(one.url):
                    self.url, self.running = one.url, True
                    break

    def _served(self, signals: Sequence[int]) -> tuple[Service, StartedServer | None]:
        """Return a ready server, and its process if it was started here, else None.

        A server is started if none is running. Blocks until it is ready. Signals received meanwhile
        are added to `signals`: SIGINT then raises KeyboardInterrupt, another one SystemExit.
        """
        while not self.running:
            try:
                started = self._start()
                service = wait_until_ready(self.url, self.key, started, signals)
                return self._choose_small(service, started), started
            except OtherServerStarted as error:
                _say(str(error))
                self.running = bool(self.settings.port)  # with port 0, another port is tried
        service = wait_until_ready(self.url, self.key, None, signals)
        service = self._choose_models(service)
        _say(f"Using the server that runs at {service.url}. It serves {service.model}.")
        self._report_unused_flags()
        return service, None

    def _start(self) -> StartedServer:
        """Start a server in the background, without waiting until it is ready.

        Raises OtherServerStarted if an mlxcache server has taken the port, and MlxcacheError if the
        server cannot be started.
        """
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
            if server_answers(self.url):
                raise OtherServerStarted(self.url)
            raise PortTaken(settings.host, settings.port)
        environ = dict(os.environ)
        if keys:  # as a variable: `ps` shows flags to all users of the machine
            environ[SETTINGS["api_key"].variable] = keys[0]
        started = start_server(settings, _words({**flags, "config": self._config}), environ)
        what = " and ".join(one.model or "the built-in demo" for one in settings.entries)
        _say(f"Starting a server for {what} in the background; its log is {started.log}")
        return started

    def _report_unused_flags(self) -> None:
        unused = [f"--{name.replace('_', '-')}" for name in self._flags if name not in _USED]
        if unused:
            _say(f"A server runs already at {self.url}: {', '.join(unused)} changes nothing.")

    def _check_small(self, name: ClientName) -> None:
        """Raise ConfigError if a small model is given for a client that takes none."""
        if self._small is not None and name not in TAKES_SMALL:
            raise ConfigError(f"--small-model is only for {' and '.join(TAKES_SMALL)}")

    def _choose_models(self, service: Service) -> Service:
        """Return `service`, a running server, with the models that the user asked for.

        The first `--model` is the client's model. If the server has never loaded that model, the
        model is loaded now, because its context length is not known before. Raises MlxcacheError
        for a model that is not served.
        """
        remote = Remote(self.url, self.key)
        models = remote.models() if self._small or self._flags.get("model") else []
        if self._flags.get("model"):
            found = [_find_served(models, entry.names) for entry in self.settings.entries]
            if None in found:
                names = ", ".join(str(one["id"]) for one in models)
                choice = "Name one of them with --model" if len(models) > 1 else "Leave out --model"
                raise MlxcacheError(
                    f"The server at {service.url} serves {names}. {choice} to use it, stop it, or "
                    "start another one beside it with --port 0."
                )
            if (chosen := found[0]) is not None and chosen["id"] != service.model:
                service = _with_model(service, chosen, remote)
        return self._with_small(service, models)

    def _choose_small(self, service: Service, started: StartedServer) -> Service:
        """Return `service` with the small model, or unchanged if the user named none.

        `service` describes the server `started`. If that server does not have the small model,
        stops the server and raises MlxcacheError.
        """
        if self._small is None:
            return service
        try:
            return self._with_small(service, Remote(service.url, self.key).models())
        except MlxcacheError:
            started.stop()
            raise

    def _with_small(self, service: Service, models: Sequence[Mapping[str, Any]]) -> Service:
        """Return `service` with the model that was named as small, or unchanged if none was.

        `models`: as in `GET /v1/models`. Raises MlxcacheError if the small model is none of them.
        """
        if self._small is None:
            return service
        found = _find_served(models, (self._small,))
        if found is None:
            names = ", ".join(str(one["id"]) for one in models)
            raise MlxcacheError(
                f"The server at {service.url} has no model {self._small!r} for --small-model; its "
                f"models are {names}."
            )
        return replace(service, small=str(found["id"]))

    def _expected(self) -> Service:
        """Describe the server that would be started, from the settings and the model's files.

        If the settings have several models, the description has the default one.
        """
        settings = self.settings.for_request(None)
        _say(f"No server runs at {self.url} yet: `{own_command()} serve` starts one.")
        if settings.model is None:
            from mlxcache.model.demo import CONTEXT  # noqa: PLC0415 - MLX takes seconds

            length = settings.context or CONTEXT
            return Service(self.url, DEMO_ID, length, self.key, small=self._small)
        from mlxcache.model.examine import examine  # noqa: PLC0415 - as above
        from mlxcache.model.load import ModelSpec  # noqa: PLC0415

        spec = ModelSpec(
            settings.model,
            adapter=settings.adapter,
            context=settings.context,
            images=settings.feeds_images,
        )
        info = examine(spec, settings.kv_bits).info
        return Service(self.url, info.id, info.context_length, self.key, small=self._small)


def _find_served(
    models: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> Mapping[str, Any] | None:
    """Return the first of `models` whose id, display name or alias is in `names`, or None.

    `models`: as in `GET /v1/models`.
    """
    for one in models:
        if {one["id"], one.get("display_name"), *one.get("aliases", ())} & set(names):
            return one
    return None


def _with_model(service: Service, model: Mapping[str, Any], remote: Remote) -> Service:
    """Return `service` with `model` in place of the default model of its server.

    `model`: its object in `GET /v1/models`. `remote`: a client of that server, through which the
    model is loaded if it never was. Blocks until it is loaded.
    """
    if not model.get("context_length"):
        _say(f"Loading {model['id']}, which the server at {service.url} has not loaded before.")
        model = remote.load_model(str(model["id"]))
    name = str(model["id"])
    return replace(service, model=name, asked=name, context=int(model["context_length"]))


def _local_address(url: str) -> dict[str, str] | None:
    """Return the flags `host` and `port` for `url`, or None if it is not on this machine.

    None also stands for an https address or one without a port, where no server can be started.
    Raises ConfigError if `url` is not an HTTP address.
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


def _invocation(name: ClientName, arguments: list[str], *, needed: bool = True) -> Invocation:
    """Describe the client program with the user's arguments and environment.

    If the client is not installed, raises MlxcacheError; without `needed`, prints the error to
    standard error instead and returns an Invocation whose `installed` is False.
    """
    client = CLIENTS[name]
    path: Path | None
    try:
        path = find_program(client)
    except MlxcacheError as error:
        if needed:
            raise
        _say(str(error))
        path = None
    surroundings = (tuple(arguments), os.environ, Path.home(), current_folder())
    return Invocation(path or Path(client.name), *surroundings, installed=path is not None)


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


def setup_object(setup: Setup, service: Service, invocation: Invocation) -> dict[str, Any]:
    """Return the object that `launch --print-env --json` prints.

    `command` is the client's command line, `set` holds variables to set by name, and `unset` the
    names of variables to remove.
    """
    return {
        "object": "launch",
        "command": [invocation.program.name, *setup.arguments, *invocation.arguments],
        "set": {**proxy_bypass(service, invocation.environ), **setup.values(service)},
        "unset": list(setup.unset),
    }


def _say(text: str) -> None:
    """Print a line to standard error without wrapping it, so that it can be copied."""
    console(stderr=True).print(Text(text))
