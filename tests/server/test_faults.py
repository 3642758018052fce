"""Faults inside a server: answers to clients, log lines, and what stays on disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ToyMaker
from tests.faulty import Faults
from tests.forked import served
from tests.server.api import CHAT, END_IDS, MESSAGES, Api, until, user, words

TALK = {"temperature": 0, "logit_bias": END_IDS}
LONG: dict[str, Any] = TALK | {"max_tokens": 60_000, "stream": True}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@contextmanager
def faulty(model: Path, home: Path, *flags: str) -> Iterator[tuple[Api, Faults]]:
    """A server on a cache folder below `home`, and the faults that it can be given."""
    folder = home / "faults"
    folder.mkdir(exist_ok=True)
    arguments = ("--model", str(model), "--ram", "200MB", "--disk", "1GB", *flags)
    cache = ("--cache-dir", str(home / "cache"))
    with served(*arguments, *cache, home=home, command=("tests.faulty", str(folder))) as server:
        yield Api(server), Faults(folder)


class Reader(threading.Thread):
    """A request whose answer is read to its end, whatever that is."""

    def __init__(self, api: Api, path: str, body: dict[str, Any], session: str):
        super().__init__(daemon=True)
        self.url, self.body, self.session = api.url + path, body | {"model": "m"}, session
        self.status, self.text = 0, ""
        self.start()

    def run(self) -> None:
        headers = {"X-Session-Id": self.session}
        with httpx.stream("POST", self.url, json=self.body, headers=headers, timeout=120) as reply:
            self.status = reply.status_code
            for piece in reply.iter_text():
                self.text += piece


def test_a_dead_mlx_thread_ends_the_process_and_the_next_one_is_warm(toy, home):
    """Everyone who waits is told at once, /health says why, and what was committed is on disk."""
    first, unfinished = [user(words(1, 200))], [user(words(2, 200))]
    with faulty(toy("llama"), home, "--concurrency", "2") as (api, faults):
        told = api.chat(first, 8, **TALK)
        readers = [
            Reader(api, CHAT, LONG | {"messages": unfinished}, "streamed"),
            Reader(api, MESSAGES, LONG | {"messages": [user("On.")], "stream": False}, "whole"),
        ]
        for reader in readers:
            api.wait(reader.session, "decode")
        readers.append(Reader(api, CHAT, TALK | {"messages": first, "max_tokens": 5}, "queued"))
        api.wait("queued", "queued")
        computed = api.record_of("streamed")["prompt_tokens"]
        faults.put("die")
        health = httpx.Response(200)

        def said() -> bool:
            nonlocal health
            health = httpx.get(f"{api.url}/health")
            return health.status_code == 503

        until(said, 60, lambda: health.text)
        for reader in readers:
            reader.join(60)
            assert "The MLX thread died (Fault: on purpose)" in reader.text
        assert [reader.status for reader in readers] == [200, 500, 500]
        assert health.json()["status"] == "failed"
        assert "The MLX thread died" in health.json()["reason"]
        assert api.served.process.wait(60) == 1
        api.served.wait_for("critical: MLX thread failed")
        api.served.wait_for("Error: The MLX thread died .* Start the server again")
    faults.end("die")
    with faulty(toy("llama"), home) as (api, _):
        more = [*first, {"role": "assistant", "content": told.text}, user("And?")]
        answer = api.chat(more, 4, **TALK)
        assert answer.cached >= told.prompt
        assert api.record(answer.id)["restored_tokens"] == answer.cached
        again = api.record(api.chat(unfinished, 4, **TALK).id)
        assert again["cached_tokens"] == computed - 1
        assert again["restored_tokens"] > 0.9 * computed


def test_a_forward_pass_that_never_returns_shows_in_health(toy: ToyMaker, home: Path) -> None:
    """The process is left alone, and goes on if the pass returns after all."""
    with faulty(toy("llama"), home) as (api, faults):
        assert api.http.get("/health").json()["stalled_s"] == 0
        faults.put("hang")
        reader = Reader(api, CHAT, TALK | {"messages": [user("Hi")], "max_tokens": 4}, "stalled")
        until(
            lambda: api.http.get("/health").json()["stalled_s"] > 0.5,
            60,
            lambda: api.http.get("/health").text,
        )
        faults.end("hang")
        reader.join(60)
        assert json.loads(reader.text)["usage"]["completion_tokens"] == 4
        until(
            lambda: api.http.get("/health").json()["stalled_s"] == 0,
            60,
            lambda: api.http.get("/health").text,
        )
