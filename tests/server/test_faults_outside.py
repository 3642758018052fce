"""Faults around a server: disk, clock, clients, file descriptors."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import psutil
import pytest

from tests.conftest import ToyMaker
from tests.faulty import Faults
from tests.server.api import CHAT, END_IDS, MESSAGES, Api, read_all, request, until, user, words
from tests.server.test_faults import TALK, Reader, faulty

SHORT: dict[str, Any] = {"model": "m", "messages": [user("Hi")], "max_tokens": 2}
YEAR_S = 365 * 86400


@pytest.fixture(scope="module")
def pair(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Api, Faults]]:
    with faulty(toy("llama"), tmp_path_factory.mktemp("home"), "--no-anticipate") as pair:
        yield pair


@pytest.fixture
def api(pair: tuple[Api, Faults]) -> Iterator[Api]:
    """The server; after each test it still answers, and quietly."""
    api, _ = pair
    before = api.served.output.count("Traceback")
    yield api
    assert api.message([user("Hi")], tokens=2, **TALK).generated == 2
    assert api.served.output.count("Traceback") == before


@pytest.fixture
def faults(pair: tuple[Api, Faults]) -> Iterator[Faults]:
    """What can be turned on; all is off in the end."""
    _, faults = pair
    yield faults
    for name in os.listdir(faults.folder):
        faults.end(name)


def disk(api: Api) -> dict[str, Any]:
    return dict(api.http.get("/v1/cache").json()["disk"])


@pytest.mark.parametrize(("fault", "words_"), [("full", "full"), ("locked", "Read-only")])
def test_a_disk_that_takes_nothing_costs_no_reply(api, faults, fault, words_):
    """One line in the log, the next turn warm from RAM; all is written once that is possible."""
    faults.put(fault)
    seed = len(fault)
    messages = [user(words(seed, 100))]
    first = api.chat(messages, 4, **TALK)
    until(lambda: disk(api)["state"] == "suspended", 60, lambda: api.served.output)
    api.served.wait_for(f"disk tier suspended, serving from RAM: .*{words_}")
    more = [*messages, {"role": "assistant", "content": first.text}, user("And?")]
    assert api.chat(more, 4, **TALK).cached >= first.prompt
    faults.end(fault)
    until(lambda: disk(api)["state"] == "ok", 60, lambda: api.served.output)
    session = api.http.get("/v1/sessions").json()["data"][0]["id"]

    def durable() -> bool:
        found = api.http.get(f"/v1/sessions/{session}").json()
        return bool(found["durable_tokens"] >= found["tokens"] - 1)

    until(durable, 60, lambda: api.http.get(f"/v1/sessions/{session}").text)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
@pytest.mark.parametrize(
    "case",
    [
        ("template", "", "Rendering the prompt failed: OSError: no such macro"),
        ("tokenizer", "", "Rendering the prompt failed: Panic: no such byte"),
        ("nan", 3, "The model produced NaN"),
        ("malloc", 4, "Unable to allocate"),
    ],
)
def test_what_breaks_under_one_request_is_told_to_it_alone(pair, faults, path, case):
    """A 500 in its API's shape, a line in the log; the same again is served, and is right."""
    (api, _), (fault, measure, said) = pair, case
    body = SHORT | TALK | {"messages": [user(f"{fault} at {path}?")]}
    expected = api.post(path, body | {"messages": [user(f"{fault} at {path}!")]})
    assert expected.status_code == 200
    faults.put(fault, measure)
    failed = api.post(path, body)
    faults.end(fault)
    assert failed.status_code == 500
    assert said in failed.json()["error"]["message"]
    record = api.record(failed.headers["x-mlxcache-request"])
    assert record.get("status", "failed") == "failed"  # none: it was never queued
    again = api.post(path, body)
    assert again.status_code == 200
    usage = again.json()["usage"]
    cached = usage.get("cache_read_input_tokens", 0)
    cached += usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    if fault == "nan":
        assert cached < 20  # what it shares with the request before it


def test_a_disk_of_seconds_per_file_holds_up_nobody(api: Api, faults: Faults) -> None:
    """Replies come while what was before them is still being written."""
    faults.put("slow", 1.5)
    before = disk(api)["written_bytes"]
    for seed in range(3):
        assert api.chat([user(words(50 + seed, 60))], 4, **TALK).generated == 4
    until(lambda: disk(api)["written_bytes"] > before, 60, lambda: str(disk(api)))
    assert disk(api)["state"] == "ok"


def test_a_wall_clock_that_jumps(api: Api, faults: Faults) -> None:
    """A year forth, two back: replies, times and the order of sessions go on."""
    messages = [user(words(20, 60))]
    answer = api.chat(messages, 4, **TALK)
    for jump in (YEAR_S, -YEAR_S, 0):
        faults.put("clock", jump)
        messages += [{"role": "assistant", "content": answer.text}, user(f"{jump}?")]
        before = answer
        answer = api.chat(messages, 4, **TALK)
        assert answer.cached >= before.prompt
        timing = api.record(answer.id)["timing"]
        assert all(0 <= seconds < 600 for seconds in timing.values() if seconds is not None)
        assert api.http.get("/v1/sessions").status_code == 200
        assert api.http.get("/health").json()["stalled_s"] < 600


def test_a_process_that_is_stopped_goes_on_where_it_was(api: Api) -> None:
    """SIGSTOP in the middle of a reply, and SIGCONT a while later."""
    body = TALK | {"messages": [user("Count.")], "max_tokens": 400, "stream": True}
    reader = Reader(api, CHAT, body, "stopped")
    until(lambda: '"content"' in reader.text, 60, lambda: reader.text)
    api.served.process.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    api.served.process.send_signal(signal.SIGCONT)
    reader.join(120)
    assert reader.text.rstrip().endswith("[DONE]")
    assert '"finish_reason":"length"' in reader.text


def reset(sock: socket.socket) -> None:
    """Close a connection so that the other end sees a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_client_that_resets_at_any_byte_of_its_request(api: Api, path: str) -> None:
    whole = request(path, SHORT)
    for cut in [*range(0, len(whole), 7), len(whole) - 1, len(whole)]:
        with api.raw(whole[:cut]) as sock:
            reset(sock)


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_a_client_that_resets_at_any_byte_of_its_reply(api: Api, path: str) -> None:
    """The streamed reply of one, cut at every few bytes."""
    data = request(path, SHORT | {"stream": True}, "Connection: close")
    with api.raw(data) as sock:
        length = len(read_all(sock))
    for cut in range(1, length, max(1, length // 25)):
        with api.raw(data) as sock:
            left = cut
            while left and (piece := sock.recv(left)):
                left -= len(piece)
            reset(sock)
    until(
        lambda: (
            not any(
                r["status"] in ("queued", "prefill", "decode")
                for r in api.http.get("/v1/requests?limit=60").json()["data"]
            )
        ),
        60,
        lambda: api.http.get("/v1/requests?limit=60").text,
    )


def test_a_reader_of_few_bytes_holds_up_nobody(api: Api) -> None:
    """It gets what it reads; others are answered meanwhile; when it goes, its request ends."""
    body = SHORT | {"max_tokens": 50_000, "stream": True, "logit_bias": END_IDS}
    with api.raw(request(CHAT, body, "X-Session-Id: drop by drop"), buffer=2048) as sock:
        api.wait("drop by drop", "decode", seconds=60)
        for _ in range(5):
            assert sock.recv(1)
            assert api.chat([user("Hi")], 2, **TALK).generated == 2
        assert api.record_of("drop by drop")["status"] == "decode"
    api.wait("drop by drop", "cancelled", seconds=60)


def flood(api: Api, connections: int) -> None:
    """So many connections one after another, 50 open at a time; some ask, some just go."""
    with ExitStack() as stack:
        for number in range(connections):
            if number % 50 == 0:
                stack.close()
            sent = (b"", request(CHAT, SHORT)[:-5], b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            sock = stack.enter_context(api.raw(sent[number % 3]))
            if number % 3 == 2:
                assert sock.recv(12).startswith(b"HTTP/1.1 200")


def descriptors(api: Api) -> int:
    return psutil.Process(api.served.process.pid).num_fds()


@pytest.mark.parametrize("connections", [400, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_connections_are_all_given_back(api: Api, connections: int) -> None:
    before = descriptors(api)
    flood(api, connections)
    until(lambda: descriptors(api) <= before + 8, 60, lambda: str(descriptors(api)))


@pytest.mark.skipif(not hasattr(psutil, "RLIMIT_NOFILE"), reason="limits are set on Linux alone")
def test_a_server_without_file_descriptors_goes_on_and_recovers(api: Api) -> None:
    """Who is connected is served, from RAM; who is not waits in line, and nothing spins."""
    process = psutil.Process(api.served.process.pid)
    limits = process.rlimit(psutil.RLIMIT_NOFILE)
    messages = [user(words(30, 60))]
    first = api.chat(messages, 4, **TALK)
    try:
        process.rlimit(psutil.RLIMIT_NOFILE, (process.num_fds() + 4, limits[1]))
        with ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(api.raw(request(CHAT, SHORT)[:-5]))
            api.served.wait_for("error: no new connection can be accepted now: Too many open files")
            more = [*messages, {"role": "assistant", "content": first.text}, user("And?")]
            assert api.chat(more, 4, **TALK).cached >= first.prompt
            assert cpu_share(process, 1.0) < 0.5
        until(lambda: httpx.get(f"{api.url}/health").status_code == 200, 60, lambda: "no answer")
    finally:
        process.rlimit(psutil.RLIMIT_NOFILE, limits)
    assert api.chat([user(words(31, 60))], 4, **TALK).generated == 4
    until(lambda: disk(api)["state"] == "ok", 60, lambda: api.served.output)
    assert api.served.output.count("no new connection can be accepted") < 5


def cpu_share(process: psutil.Process, seconds: float) -> float:
    """Return the share of a core that a process uses for some seconds."""
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after = process.cpu_times()
    taken = after.user - before.user + after.system - before.system
    return float(taken / (time.monotonic() - began))
