"""Setup of a coding agent: the server it is pointed at, its environment, arguments and files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlxcache.cli.connect import ANY_MODEL, DUMMY_KEY, Variables
from mlxcache.config.settings import is_loopback

KEY_VARIABLE = "MLXCACHE_API_KEY"
"""The variable from which OpenCode, Codex and pi read the key."""

_MOST_OUTPUT = 16_384


@dataclass(frozen=True, slots=True)
class Service:
    """Server to which a client is pointed.

    `url` is its address without /v1, `model` the model's id, `context` the context length in
    tokens. `key` is the API key that it requires, or None. `asked` is the model name that clients
    send; by default it is a name that stands for the server's default model. `small` is the id of
    the model for titles and sub-agents, None if clients use their main model for these.
    """

    url: str
    model: str
    context: int
    key: str | None = field(default=None, repr=False)
    asked: str = ANY_MODEL
    small: str | None = None

    @property
    def credential(self) -> str:
        """Key that clients send: the server's, or a placeholder if it requires none."""
        return self.key or DUMMY_KEY

    @property
    def output(self) -> int:
        """Maximum tokens of a reply for clients to request.

        It is a quarter of the context, so that the prompt has room, but at most `_MOST_OUTPUT`.
        """
        return min(_MOST_OUTPUT, self.context // 4)


@dataclass(frozen=True, slots=True)
class Invocation:
    """Client program with the user's own arguments, environment and folders.

    `installed` is False if `program` was not found on the PATH.
    """

    program: Path
    arguments: Sequence[str]
    environ: Mapping[str, str]
    home: Path
    cwd: Path
    installed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Variables, arguments and settings that point a client at a server.

    `variables` are set in the environment; None stands for the server's key. Those named in `unset`
    are removed because they would select another server. `arguments` come before the user's own.
    `settings` are written to a temporary file as JSON. Its path is passed after `settings_flag`, or
    in the variable `settings_variable`; if both are None, no file is written. `by_hand` tells the
    user what to put where instead of that file if `launch` only prints the setup, or is None.
    """

    variables: Variables
    unset: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    settings_flag: str | None = None
    settings_variable: str | None = None
    by_hand: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def environment(self, service: Service, environ: Mapping[str, str]) -> dict[str, str]:
        """Return the client's complete environment, based on the user's `environ`."""
        kept = without_script_settings(environ)
        for name in self.unset:
            kept.pop(name, None)
        return kept | proxy_bypass(service, environ) | self.values(service)

    def values(self, service: Service) -> dict[str, str]:
        """Return the variables, with the server's key in place of None."""
        return {
            name: service.credential if value is None else value
            for name, value in self.variables.items()
        }


# -- the environment of every client -----------------------------------------------------------

_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_NO_PROXY = ("NO_PROXY", "no_proxy")


def proxy_bypass(service: Service, environ: Mapping[str, str]) -> dict[str, str]:
    """Return NO_PROXY and no_proxy with values that exclude a server on this machine from a proxy.

    Otherwise the prompts and the key would be sent to the proxy, which cannot reach the server.
    `environ` holds the user's variables; hosts that NO_PROXY or no_proxy lists there are kept.
    Returns {} if no proxy is set there, or for a server on another machine.
    """
    host = urlsplit(service.url).hostname or ""
    has_proxy = any(environ.get(name) or environ.get(name.lower()) for name in _PROXIES)
    if not has_proxy or not is_loopback(host):
        return {}
    given = next((environ[name] for name in _NO_PROXY if environ.get(name)), "")
    return dict.fromkeys(_NO_PROXY, ",".join(filter(None, (given, host))))


_ADDED = (("LD_PRELOAD", "libopenblas.so.0"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"))
"""Variables that hold lists, each with the entry that the scripts in bin/ add on Linux."""


def without_script_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Return `environ` without the entries that the scripts in bin/ add on Linux (`_ADDED`).

    They load OpenBLAS and set up malloc for the server, and must not affect the programs that an
    agent runs.
    """
    found = dict(environ)
    for name, added in _ADDED:
        if name in found:
            words = [word for word in found[name].split(":") if not word.endswith(added)]
            found[name] = ":".join(words)
            if not words:
                del found[name]
    return found
