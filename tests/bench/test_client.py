"""The streaming chat client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from mlxcache.bench.client import Client, Refused
from tests.bench.fake_server import Handler


@pytest.fixture
def client() -> Iterator[Client]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        yield Client(server.server_address[1], "any", timeout=5.0)
        server.shutdown()
        thread.join()


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_a_reply_carries_text_counts_and_ascending_times(client: Client) -> None:
    """Comment lines are skipped, and usage is the server's own."""
    reply = client.chat(say("hi"), 3)
    assert (reply.text, reply.prompt_tokens, reply.cached_tokens) == ("abc", 7, 5)
    assert (reply.generated_tokens, reply.request) == (3, "request-1")
    assert 0 < reply.first_s <= reply.last_s <= reply.total_s


def test_a_refusal_carries_its_status_and_when_to_come_back(client: Client) -> None:
    with pytest.raises(Refused) as caught:
        client.chat(say("refuse"), 2)
    assert (caught.value.status, caught.value.retry_after) == (503, 3.0)
    with pytest.raises(Refused) as caught:
        client.get("/absent")
    assert (caught.value.status, caught.value.retry_after) == (404, None)


def test_an_error_within_the_stream_is_a_refusal(client: Client) -> None:
    """Status 200 says that the stream had begun."""
    with pytest.raises(Refused, match="it broke") as caught:
        client.chat(say("break"), 2)
    assert caught.value.status == 200
