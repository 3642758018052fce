"""Queued requests, and requests refused by a full queue."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.api import CHAT, COUNT, END_IDS, MESSAGES, Api, events, request, user, words

LONG: dict[str, Any] = {
    "model": "m",
    "messages": [user("Go on and on.")],
    "max_tokens": 60_000,
    "stream": True,
    "logit_bias": END_IDS,
}
SHORT: dict[str, Any] = {"model": "m", "messages": [user("Hi")], "max_tokens": 2}
PING_SECONDS = 10
GRACE_SECONDS = 5
"""How long a waiting stream's headers are held back: see `ApiSettings.queue_grace`."""


class Waiting(threading.Thread):
    """A streamed request, and the names of the events that came so far."""

    def __init__(self, api: Api, path: str):
        super().__init__(daemon=True)
        self.api, self.path = api, path
        self.names: list[str] = []
        self.told = threading.Event()
        self.start()

    def run(self) -> None:
        headers = {"X-Session-Id": self.path}
        body = SHORT | {"stream": True}
        with self.api.http.stream("POST", self.path, json=body, headers=headers) as reply:
            assert reply.status_code == 200
            for name, data in events(reply):
                self.names.append(name or str(data)[:6])
                if self.names.count("ping") > 1 or name == "comment":
                    self.told.set()


@contextmanager
def busy(api: Api) -> Iterator[None]:
    """The one slot is taken until the context ends."""
    with api.raw(request(CHAT, LONG, "X-Session-Id: busy")):
        api.wait("busy", "decode")
        yield
        assert api.record_of("busy")["status"] == "decode"
    api.wait("busy", "cancelled", seconds=10)


@pytest.mark.slow
def test_a_full_queue_and_those_who_wait_in_it(queueing: Api) -> None:
    """A fourth request is sent away; the second and the third are kept company, then served."""
    with busy(queueing):
        waiting = [Waiting(queueing, path) for path in (CHAT, MESSAGES)]
        for one in waiting:
            queueing.wait(one.path, "queued")
        assert_refused(queueing)
        assert queueing.count(messages=SHORT["messages"]) > 5
        for one in waiting:
            assert one.told.wait(GRACE_SECONDS + PING_SECONDS), one.names
            assert queueing.record_of(one.path)["status"] == "queued"
    for one, last in zip(waiting, ("[DONE]", "message_stop"), strict=True):
        one.join(10)
        assert one.names[-1] == last


def assert_refused(api: Api) -> None:
    """503 with Retry-After, in both shapes, before any headers of a stream."""
    for path, kind in ((CHAT, "server_error"), (MESSAGES, "overloaded_error")):
        for stream in (False, True):
            refused = api.post(path, SHORT | {"stream": stream})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == kind


def test_a_client_that_leaves_the_queue(queueing: Api) -> None:
    """Streaming or not, its place is free at once."""
    with busy(queueing):
        for stream in (False, True):
            session = f"leaves {stream}"
            body = SHORT | {"stream": stream}
            with queueing.raw(request(MESSAGES, body, f"X-Session-Id: {session}")):
                queueing.wait(session, "queued")
            assert queueing.wait(session, "cancelled", seconds=5)["fed_tokens"] == 0


def test_fifty_counts_while_a_long_prompt_is_computed(llama: Api) -> None:
    """An editor asks for them all at once; none generates, none waits for the model."""
    body = LONG | {"messages": [user(words(7000, 6000))]}
    before = llama.http.get("/v1/cache").json()["requests"]["total"]
    with llama.raw(request(MESSAGES, body, "X-Session-Id: prefill")):
        llama.wait("prefill", "prefill")

        def count(i: int) -> int:
            messages = [user(words(i, 200))]
            response = llama.post(COUNT, {"model": "m", "messages": messages})
            assert response.status_code == 200
            return int(response.json()["input_tokens"])

        with ThreadPoolExecutor(50) as pool:
            counts = list(pool.map(count, range(50)))
        assert min(counts) > 400
        assert llama.record_of("prefill")["status"] == "prefill"
    llama.wait("prefill", "cancelled", seconds=10)
    assert llama.http.get("/v1/cache").json()["requests"]["total"] <= before + 1
