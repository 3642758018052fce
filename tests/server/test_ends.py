"""Signals while the model computes: clients are told, and the process ends in time."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.conftest import ToyMaker
from tests.forked import served
from tests.server.api import CHAT, MESSAGES, Api, request, user, words
from tests.server.test_faults import Reader


def begin(api: Api, path: str, stream: bool) -> Reader:
    messages = [user(words(len(path) + stream, 6000))]
    body = {"messages": messages, "max_tokens": 5, "stream": stream}
    return Reader(api, path, body, f"{path} {stream}")


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM]
)
def test_a_signal_during_a_prefill(toy: ToyMaker, tmp_path: Path, number: int) -> None:
    with served("--model", str(toy("llama")), home=tmp_path) as running:
        api = Api(running)
        readers = [
            begin(api, path, stream) for stream in (False, True) for path in (CHAT, MESSAGES)
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
            assert reader.status in ((200, 503) if reader.body["stream"] else (503,))
            assert "The server is stopping." in reader.text
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
