"""Where a client's server is or would be, and the client on it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rich.text import Text

from mlxcache.cli.connect import base_url
from mlxcache.cli.launch import background, server, shell
from mlxcache.cli.launch.background import Background
from mlxcache.cli.launch.chooser import choose
from mlxcache.cli.launch.client import Place, Service
from mlxcache.cli.launch.known import CLIENTS, Name, program
from mlxcache.cli.launch.run import held_signals, run
from mlxcache.cli.launch.settings import sweep
from mlxcache.cli.listen import IN_USE
from mlxcache.cli.output import console
from mlxcache.cli.show import print_json
from mlxcache.cli.target import URL_VARIABLE
from mlxcache.config import load_settings, read_keys
from mlxcache.config.settings import is_loopback
from mlxcache.errors import ConfigError, MlxcacheError
from mlxcache.store.lock import servers

_WHERE = ("host", "port", "cache_dir", "api_key", "api_keys_file", "config", "model")
"""Flags that mean something where a server runs already."""


class Launching:
    """One use of the command: where its server is or would be, and the client on it."""

    def __init__(self, flags: Mapping[str, Any], config: Path | None, url: str | None):
        self._flags = dict(flags)
        self._config = config
        asked = url or os.environ.get(URL_VARIABLE)
        self._far = bool(asked) and not self._here(str(asked))
        self.settings = load_settings(self._flags, os.environ, config)
        self.key = next(iter(read_keys(self.settings).values), None)
        self.url = str(asked) if self._far else base_url(self.settings.host, self.settings.port)
        self.running = False
        self._find()

    def choose(self) -> Name:
        """Which client, by the menu. Raises ConfigError where nobody can be asked."""
        found = server.ask(self.url, self.key) if self.running else None
        return choose(found, self.settings.model, self.settings.context)

    def run(self, name: Name, arguments: list[str], *, stop_after: bool) -> int:
        """The client's exit status."""
        place = _place(name, arguments)  # before a model is loaded for nothing
        for path in sweep():
            _say(f"{path}, which an earlier launch left, cannot be removed; a key may be in it.")
        with held_signals() as signals:
            service, started = self._served(signals)
            try:
                return run(place, CLIENTS[name].start(service, place), service, signals)
            finally:
                if started is not None and stop_after:
                    started.stop()
                elif started is not None:
                    pid = started.process.pid
                    _say(f"The server goes on at {service.url}. To stop it: kill {pid}")

    def _served(self, signals: Sequence[int]) -> tuple[Service, Background | None]:
        """A server that serves, and its process where it was started here."""
        while not self.running:
            try:
                started = self._start()
                return server.wait(self.url, self.key, started, signals), started
            except server.Overtaken as error:
                _say(str(error))
                self.running = bool(self.settings.port)  # else another port will do
        service = server.wait(self.url, self.key, None, signals)
        self._check(service)
        _say(f"Using the server that runs at {service.url}. It serves {service.model}.")
        self._tell_vain()
        return service, None

    def print_env(self, name: Name, arguments: list[str], *, as_json: bool) -> None:
        """Print what the client would find, without starting anything."""
        service = server.wait(self.url, self.key, None) if self.running else self._expected()
        if self.running:
            self._tell_vain()
        place = _place(name, arguments, needed=False)
        start = CLIENTS[name].start(service, place)
        if as_json:
            print_json(shell.as_object(start, service, place))
            return
        print("\n".join(shell.lines(start, service, place.environ)))
        _say(f"The command that goes with them: {shell.command(start, place)}")
        if start.flag is not None:
            names = ", ".join(start.settings["env"])
            _say(f"Your settings of {name.value} set {names} too, and win; launch overrides that.")

    def _here(self, url: str) -> bool:
        """Whether a server at `url` could be started; host and port are then taken from it."""
        try:
            parts = urlsplit(url.rstrip("/").removesuffix("/v1"))
            host, port = parts.hostname or "", parts.port
        except ValueError:
            host, port = "", None
        if parts.scheme not in ("http", "https") or not host:
            raise ConfigError(
                f"--url must be an address such as http://127.0.0.1:8081, not {url!r}"
            )
        if parts.scheme != "http" or port is None or not is_loopback(host):
            return False
        self._flags |= {"host": host, "port": str(port)}
        return True

    def _find(self) -> None:
        """Look for the server: at its address, else by the folder that it would use."""
        self.running = bool(self.settings.port) and server.answers(self.url)
        fixed = self._far or any(self._flags.get(one) for one in ("host", "port", "model"))
        if not self.running and not fixed:
            for one in servers(self.settings.cache_dir):
                if server.answers(one.url):
                    self.url, self.running = one.url, True
                    break

    def _tell_vain(self) -> None:
        given = [name for name, value in self._flags.items() if value is not None]
        vain = [f"--{name.replace('_', '-')}" for name in given if name not in _WHERE]
        if vain:
            _say(f"A server runs already at {self.url}: {', '.join(vain)} changes nothing.")

    def _start(self) -> Background:
        if self._far:
            raise MlxcacheError(f"Nothing answers at {self.url}, and it is not of this machine.")
        settings, flags = self.settings, dict(self._flags)
        keys = flags.pop("api_key", None) or ()
        if len(keys) > 1:
            raise ConfigError("--api-key: a client sends one; give several in --api-keys-file FILE")
        if not settings.port:
            flags["port"] = str(background.free_port(settings.host))
            settings = replace(settings, port=int(flags["port"]))
            self.url = base_url(settings.host, settings.port)
        elif background.taken(str(urlsplit(self.url).hostname), settings.port):
            if server.answers(self.url):
                raise server.Overtaken(self.url)
            raise MlxcacheError(
                f"Port {settings.port} of {settings.host} {IN_USE}: choose "
                "another one with --port N (0 picks a free one)."
            )
        words = _words({**flags, "config": self._config})
        started = background.start(settings, words, background.environment(next(iter(keys), None)))
        what = settings.model or "the built-in demo"
        _say(f"Starting a server for {what} in the background; its log is {started.log}")
        return started

    def _check(self, service: Service) -> None:
        """Refuse a server whose model is not the one that was asked for."""
        wanted = self._flags.get("model")
        if not wanted or not self.running or service.model == wanted:
            return
        from mlxcache.model.hub import display_name  # noqa: PLC0415 - mlx-lm takes seconds

        if service.model != display_name(wanted, Path(wanted).expanduser()):
            raise MlxcacheError(
                f"The server at {service.url} serves {service.model}. Leave out --model to use "
                "it, stop it, or start another one beside it with --port 0."
            )

    def _expected(self) -> Service:
        """What a server started now would serve, as far as its files tell."""
        settings = self.settings
        _say(f"No server runs at {self.url} yet: `mlxcache serve` starts one.")
        if settings.model is None:
            from mlxcache.model.demo import CONTEXT, DEMO_ID  # noqa: PLC0415 - MLX takes seconds

            return Service(self.url, DEMO_ID, settings.context or CONTEXT, self.key)
        from mlxcache.model.examine import examine  # noqa: PLC0415 - as above
        from mlxcache.model.load import ModelSpec  # noqa: PLC0415

        spec = ModelSpec(settings.model, adapter=settings.adapter, context=settings.context)
        info = examine(spec, settings.kv_bits).info
        return Service(self.url, info.id, info.context_length, self.key)


def _place(name: Name, arguments: list[str], *, needed: bool = True) -> Place:
    client = CLIENTS[name]
    path: Path | None
    try:
        path = program(client)
    except MlxcacheError as error:
        if needed:
            raise
        _say(str(error))
        path = None
    environment = (tuple(arguments), os.environ, Path.home(), Path.cwd())
    return Place(path or Path(client.name), *environment, installed=path is not None)


def _words(flags: Mapping[str, Any]) -> list[str]:
    """Flags as they were given."""
    words = []
    for name, value in flags.items():
        flag = f"--{name.replace('_', '-')}"
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is True:
                words.append(flag)
            elif one is not None and one is not False:
                words += [flag, str(one)]
    return words


def _say(text: str) -> None:
    """A line beside the client's own output, whole, so that what is in it can be copied."""
    console(stderr=True).print(Text(text))
