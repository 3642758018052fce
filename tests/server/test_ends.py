"""Signals while the model computes: clients are told, and the process ends in time."""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ToyMaker
from tests.forked import served
from tests.server.api import CHAT, MESSAGES, Api, request, user, words


class Reader(threading.Thread):
    """A request whose whole answer is read."""

    def __init__(self, url: str, path: str, *, stream: bool):
        super().__init__(daemon=True)
        self.url, self.path, self.stream = url, path, stream
        self.answer: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        body: dict[str, Any] = {
            "model": "m",
            "messages": [user(words(len(self.path) + self.stream, 6000))],
            "max_tokens": 5,
            "stream": self.stream,
        }
        self.answer = httpx.post(self.url + self.path, json=body, timeout=60)


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_during_a_prefill(toy: ToyMaker, tmp_path: Path, number: int) -> None:
    """Everyone who waits for an answer gets an error, also those whose stream has begun."""
    with served("--model", str(toy("llama")), home=tmp_path) as running:
        api = Api(running)
        readers = [
            Reader(api.url, path, stream=stream)
            for path in (CHAT, MESSAGES)
            for stream in (False, True)
        ]
        while len(api.http.get("/v1/requests").json()["data"]) < 4:
            time.sleep(0.02)
        # Streams begin once they are admitted, so some of these have begun and some have not.
        api.http.close()
        began = time.monotonic()
        assert running.stop(number) == 0, running.output
        assert time.monotonic() - began < 10
        for reader in readers:
            reader.join(5)
            assert reader.answer is not None
            assert reader.answer.status_code in ((200, 503) if reader.stream else (503,))
            assert "The server is stopping." in reader.answer.text
        assert "Traceback" not in running.output


def test_a_second_signal_does_not_wait_for_the_model(toy: ToyMaker, tmp_path: Path) -> None:
    """It ends at once, and logs that the end was not clean."""
    with served("--model", str(toy("llama")), home=tmp_path) as running:
        api = Api(running)
        body = {"model": "m", "messages": [user(words(1, 6000))], "max_tokens": 5}
        with api.raw(request(MESSAGES, body, "X-Session-Id: long")):
            api.wait("long", "prefill")
            running.process.terminate()
            running.wait_for("Send the signal again")
            began = time.monotonic()
            running.process.terminate()
            assert running.process.wait(5) == 1
            assert time.monotonic() - began < 2
