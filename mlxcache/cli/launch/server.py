"""The server for a client: asked whether it is there, and waited for."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Sequence

import httpx

from mlxcache.cli.launch.background import Background
from mlxcache.cli.launch.client import Service
from mlxcache.cli.output import Loading, console
from mlxcache.cli.remote import ANSWER_S, NoServer, Remote, proxied
from mlxcache.errors import MlxcacheError

POLL_S = 0.2

_STEP = re.compile(r"(?P<what>.*?)(?: (?P<percent>\d{1,3})%)?")


def ask(url: str, key: str | None) -> Service | None:
    """The server at `url` as clients see it; None while it loads its model.

    Raises NoServer where none answers, MlxcacheError where it cannot serve or wants another key.
    """
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    if not answers(url):  # before it is told the key
        raise NoServer(f"Nothing answers at {url}, or it is no mlxcache server.")
    try:
        response = httpx.get(
            f"{url}/v1/models", headers=headers, timeout=ANSWER_S, trust_env=proxied(url)
        )
    except httpx.HTTPError as error:
        raise NoServer(f"Nothing answers at {url}: {error}.") from error
    if response.status_code == 503:
        return None
    if response.status_code == 401:
        raise MlxcacheError(
            f"The server at {url} asks for a key: give it with --api-key, or in MLXCACHE_API_KEY."
        )
    if response.is_error:
        raise MlxcacheError(f"The server at {url} cannot serve: {_message(response)}")
    (model, *_) = response.json()["data"]
    return Service(url, str(model["id"]), int(model["context_length"]), key)


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"status {response.status_code}."


def answers(url: str) -> bool:
    """Whether an mlxcache server is there, also one that is still loading."""
    return Remote(url).answers()


class Overtaken(MlxcacheError):
    """Another server was quicker to listen where one was to be started, and answers there."""

    def __init__(self, url: str):
        super().__init__(f"Another server was quicker to listen at {url}.")


def wait(
    url: str, key: str | None, started: Background | None, signals: Sequence[int] = ()
) -> Service:
    """The server at `url`, once it serves; what it loads is shown meanwhile.

    `started`: the one that was started there. No other is asked in its place, nor told the key.
    It is ended where this does not return: it could not serve, or one of `signals` came, which
    ends this command as it would by itself. Raises MlxcacheError, and Overtaken.
    """
    served = None
    try:
        with Loading(console(stderr=True)) as progress:
            while served is None:
                _obey(signals)
                served = ask(url, key) if started is None else _ask_started(key, started)
                if served is None:
                    progress(*_step(started))
                    time.sleep(POLL_S)
    finally:
        if served is None and started is not None:
            if signals:
                console(stderr=True).print("Ending the server that was started.")
            started.stop()
    return served


def _obey(signals: Sequence[int]) -> None:
    for number in signals:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)


def _ask_started(key: str | None, started: Background) -> Service | None:
    """As `ask`, of that server. None also where it does not answer yet."""
    if started.ended:
        if started.lost_its_port() and answers(started.url):
            raise Overtaken(started.url)
        raise started.failure()
    if not started.listens():
        return None
    try:
        return ask(started.url, key)
    except NoServer:
        return None
    except MlxcacheError:  # it could not load its model, and says so before it ends
        raise started.failure() from None


def _step(started: Background | None) -> tuple[str, float | None]:
    """What is being loaded and the share done, as the log's last line tells."""
    last = started.tail(1) if started is not None else []
    found = _STEP.fullmatch(last[0]) if last else None
    if found is None:
        return "the server is loading", None
    percent = found["percent"]
    return f"server: {found['what']}", None if percent is None else int(percent) / 100
