"""Recorded bodies of clients, and their replay. Their texts are shortened to a few words.

A recording has a `script` (see `tests.scripted`) and requests, of which one that extends an earlier
one has how many of its messages it repeats (`same`), and its further messages.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.server.api import Api, until

SPARE = 64
"""Most tokens that a turn may feed beyond its new ones."""

Request = tuple[str, dict[str, Any], dict[str, str]]
"""Path, body and headers."""


def read_json(name: str) -> Any:
    return json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))


def read_recording(name: str) -> dict[str, Any]:
    """A recording of several clients, with each request's whole body.

    A request that extends another one has its number (`like`).
    """
    found = read_json(name)
    whole: list[dict[str, Any]] = []
    for one in found["requests"]:
        whole.append(_extended(whole[one["like"]], one) if "like" in one else one)
    return {"script": found["script"], "requests": whole}


def _extended(before: dict[str, Any], one: dict[str, Any]) -> dict[str, Any]:
    messages = [*before["body"]["messages"][: one["same"]], *one["body"]["messages"]]
    body = before["body"] | one["body"] | {"messages": messages}
    return before | {"like": one["like"], "body": body}


def talk_of(client: dict[str, Any]) -> Iterator[Request]:
    """The requests of one client, each of which extends the one before it."""
    field = "input" if "input" in client["requests"][0] else "messages"
    said: list[Any] = []
    for one in client["requests"]:
        said = [*said[: one["same"]], *one[field]]
        yield client["path"], client["body"] | {field: said}, {"user-agent": client["client"]}


@dataclass
class Run:
    """What a server replied to requests; `requests` are its records of them."""

    api: Api
    replies: list[httpx.Response]
    requests: list[dict[str, Any]]


def play(api: Api, requests: Iterable[Request]) -> Run:
    """Send requests one after the other, and wait until all are counted."""
    replies = []
    for path, body, headers in requests:
        replies.append(api.post(path, body, **headers))
        assert replies[-1].status_code == 200, replies[-1].text
    done = [api.finished(reply.headers["x-mlxcache-request"]) for reply in replies]
    total = lambda: api.http.get("/v1/cache").json()["requests"]["total"]  # noqa: E731
    until(lambda: total() >= len(done), 10, lambda: f"{total()} requests")
    return Run(api, replies, done)


def check_turn(before: dict[str, Any], now: dict[str, Any], spare: int = SPARE) -> None:
    """A turn feeds what is new in it, and little more."""
    new = now["prompt_tokens"] - before["prompt_tokens"] - before["generated_tokens"]
    assert now["fed_tokens"] <= new + spare, now
