"""A client that gives up too early and asks again: its prompt is computed once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.server.api import CHAT, END_IDS, MESSAGES, Api, user, words

TRIES = 5
SHORT_S = 0.1
"""What an impatient client waits: far less than the prompt takes."""


@contextmanager
def slow_prompt(api: Api) -> Iterator[None]:
    """Another conversation decodes meanwhile, so that prompts take longer than anybody waits."""
    body = {"messages": [user("On and on.")], "max_tokens": 60_000, "logit_bias": END_IDS}
    with api.http.stream("POST", CHAT, json=body | {"stream": True}, headers={"X-Session-Id": "x"}):
        yield
    api.wait("x", "cancelled")


def records(api: Api, session: str) -> list[dict[str, Any]]:
    """What a session's requests did, the oldest first."""
    found = api.http.get("/v1/requests?limit=1000").json()["data"]
    return [record for record in reversed(found) if record["session"] == session]


def fed(found: list[dict[str, Any]]) -> int:
    """Prompt tokens that the model was fed for all of them."""
    return sum(record["fed_tokens"] for record in found if record["joined"] is None)


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        (CHAT, False),
        (MESSAGES, True),
        pytest.param(CHAT, True, marks=pytest.mark.slow),
        pytest.param(MESSAGES, False, marks=pytest.mark.slow),
    ],
)
def test_five_tries_cost_one_prefill(llama: Api, path: str, stream: bool) -> None:
    """Each closes its connection, as SDKs do at their timeout; the last one waits."""
    session = f"impatient {path} {stream}"
    body = {"model": "m", "messages": [user(words(len(session), 500))], "max_tokens": 4}
    body |= {"stream": stream, "temperature": 0}
    left = 0
    with slow_prompt(llama):
        for _ in range(TRIES - 1):
            with httpx.Client(base_url=llama.url, timeout=SHORT_S) as client:
                try:
                    reply = client.post(path, json=body, headers={"X-Session-Id": session})
                    assert reply.status_code == 200
                except httpx.TimeoutException:
                    left += 1
        last = llama.post(path, body, **{"X-Session-Id": session})
    assert last.status_code == 200, last.text
    found = records(llama, session)
    assert 1 < len(found) <= TRIES  # a try may end before all of it has arrived
    assert left, "the prompt is too short for this test"
    prompt = found[0]["prompt_tokens"]
    assert 0.9 * prompt < fed(found) <= prompt + TRIES  # others have the template's head
    assert found[-1]["status"] == "done"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_tries_whose_connections_stay_open_join(llama: Api, stream: bool) -> None:
    """As of a client behind a proxy that holds on: the server cannot see that it gave up."""
    session = f"held {stream}"
    body: dict[str, Any] = {"messages": [user(words(77 + stream, 300))], "max_tokens": 30}
    body |= {"stream": stream, "temperature": 1.0, "logit_bias": END_IDS}
    texts: list[str] = []

    def ask(attempt: int) -> None:
        headers = {"X-Session-Id": session, "X-Stainless-Retry-Count": str(attempt)}
        reply = llama.post(CHAT, body, **headers)
        assert reply.status_code == 200
        if not stream:
            texts.append(reply.json()["choices"][0]["message"]["content"])

    with slow_prompt(llama):
        threads = []
        for attempt in range(TRIES):
            threads.append(threading.Thread(target=ask, args=(attempt,)))
            threads[-1].start()
            llama.wait(session, "queued", "prefill", "decode", "done")
        for thread in threads:
            thread.join(120)
    found = records(llama, session)
    assert len(found) == TRIES
    assert {record["status"] for record in found} == {"done"}
    prompt = found[0]["prompt_tokens"]
    assert 0.9 * prompt < fed(found) <= prompt + TRIES  # others have the template's head
    assert all(text for text in texts)
    assert len(texts) == (0 if stream else TRIES)


def test_two_clients_that_ask_the_same_each_get_their_answer(llama: Api) -> None:
    body = {"messages": [user(words(5, 200))], "max_tokens": 12, "temperature": 0}
    body |= {"logit_bias": END_IDS}
    answers: dict[str, dict[str, Any]] = {}

    def ask(name: str) -> None:
        headers = {"X-Session-Id": f"twin {name}", "User-Agent": f"{name}/1.0"}
        answers[name] = llama.post(CHAT, body, **headers).json()

    threads = [threading.Thread(target=ask, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    texts = {answer["choices"][0]["message"]["content"] for answer in answers.values()}
    assert len(answers) == 2
    assert len(texts) == 1
    assert all(answer["usage"]["completion_tokens"] == 12 for answer in answers.values())
    found = [*records(llama, "twin one"), *records(llama, "twin two")]
    assert [record["joined"] for record in found] == [None, None]
    assert fed(found) <= found[0]["prompt_tokens"] + 2


@pytest.mark.parametrize(
    ("path", "kind"),
    [(CHAT, ("server_error", "deadline_exceeded")), (MESSAGES, ("timeout_error",))],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_request_whose_time_is_over(llama, path, kind, stream):
    """504 in the API's own shape; in a stream that has begun an error event, and then the end."""
    session = f"late {path} {stream}"
    body = {"model": "m", "messages": [user(words(9, 50) + session)], "max_tokens": 60_000}
    body |= {"stream": stream, "stop": "no such text"} if path == CHAT else {"stream": stream}
    body |= {"logit_bias": END_IDS} if path == CHAT else {}
    limits = {"X-Request-Timeout": "0.6", "X-Session-Id": session}
    with slow_prompt(llama):
        reply = llama.post(path, body, **limits)
    record = llama.record_of(session)
    if reply.status_code == 200 and record["status"] == "done":
        pytest.skip("the toy ended its turn by itself")
    assert reply.status_code == 504 or (stream and reply.status_code == 200)
    for word in kind:
        assert f'"{word}"' in reply.text
    assert "0.6 s" in reply.text
    assert "[DONE]" not in reply.text
    assert record["status"] == "failed"


def test_a_time_that_is_none_is_refused(llama: Api) -> None:
    body = {"messages": [user("Hi")], "max_tokens": 2}
    reply = llama.post(CHAT, body, **{"X-Request-Timeout": "soon"})
    assert reply.status_code == 400
    assert "X-Request-Timeout" in reply.json()["error"]["message"]
