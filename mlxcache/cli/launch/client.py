"""What a client is pointed at, and how it is started there. Nothing here starts anything."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mlxcache.cli.connect import DUMMY_KEY, Variables
from mlxcache.config.settings import is_loopback


@dataclass(frozen=True, slots=True)
class Service:
    """A server as clients see it: its address without /v1, the model's id, the context in tokens.

    `key`: what it asks for; None where it asks for none.
    """

    url: str
    model: str
    context: int
    key: str | None = field(default=None, repr=False)

    @property
    def credential(self) -> str:
        """What clients send as their key; they insist on one."""
        return self.key or DUMMY_KEY


_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_NO_PROXY = ("NO_PROXY", "no_proxy")


def direct(service: Service, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables that keep a proxy, where one is set, out of the way to a server of this machine.

    It could not reach it, and would be told the prompts and the key.
    """
    host = urlsplit(service.url).hostname or ""
    has_proxy = any(environ.get(name) or environ.get(name.lower()) for name in _PROXIES)
    if not has_proxy or not is_loopback(host):
        return {}
    given = next((environ[name] for name in _NO_PROXY if environ.get(name)), "")
    return dict.fromkeys(_NO_PROXY, ",".join(filter(None, (given, host))))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a client would start: its program, its user's own arguments, and what it will read.

    `installed`: the program is there.
    """

    program: Path
    arguments: Sequence[str]
    environ: Mapping[str, str]
    home: Path
    cwd: Path
    installed: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """How a client is started.

    `variables` are set, those of `without` are not there: they would lead elsewhere. `arguments`
    come before the user's own. `settings`: what a file says that the client is given by `flag`,
    for as long as it runs.
    """

    variables: Variables
    without: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    flag: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def environment(self, service: Service, environ: Mapping[str, str]) -> dict[str, str]:
        """The client's whole environment."""
        kept = _as_it_was(environ)
        for name in self.without:
            kept.pop(name, None)
        told = {
            name: service.credential if value is None else value
            for name, value in self.variables.items()
        }
        return kept | direct(service, environ) | told


_ADDED = (("LD_PRELOAD", "libopenblas.so.0"), ("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"))
"""What the scripts in bin/ put into lists in the environment, for the server on Linux."""


def _as_it_was(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without that: an agent's own programs are not to be changed by it."""
    found = dict(environ)
    for name, added in _ADDED:
        if name in found:
            words = [word for word in found[name].split(":") if not word.endswith(added)]
            found[name] = ":".join(words)
            if not words:
                del found[name]
    return found


@dataclass(frozen=True, slots=True)
class Client:
    """A coding agent: `name` is also its program's. `install` is a shell line.

    `first_prompt` is about how many tokens its tools and system prompt take, `good_for` a sentence.
    `start` raises MlxcacheError where the client that is there cannot work with this server.
    """

    name: str
    title: str
    install: str
    first_prompt: int
    good_for: str
    start: Callable[[Service, Place], Start]
