"""Two processes on this machine serve a divided model: the text and counts of one process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlxcache.cli.ranks import free_port
from tests.conftest import ToyMaker
from tests.served import Served, served
from tests.server.api import Answer, Api

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TWO = ("--hosts", "127.0.0.1,127.0.0.1")
FOUR = ("--hosts", ",".join(["127.0.0.1"] * 4))
HEAD = " ".join(f"Rule {i}: oaks have acorns, number {i * 7919 % 101}." for i in range(50))
AFTER_A_MARK = 8
"""Tokens that a chat template writes between the end of a message and where prompts may part."""
Messages = list[dict[str, Any]]


def asked(text: str) -> dict[str, str]:
    question = f"{text} Tell me of trees, and of what grows beneath them. "
    return {"role": "user", "content": question * 8}


class Talk:
    """A conversation of branches, edits and concurrent turns. `rows`: what was answered."""

    def __init__(self, server: Served):
        self.api = Api(server)
        self.rows: list[tuple[str, str, int, int | None]] = []

    def turn(
        self, label: str, messages: Messages, tokens: int = 16, *, alone: bool = True
    ) -> Messages:
        """A turn; how much is cached is compared only where no other turn runs."""
        got: Answer = self.api.chat(messages, tokens)
        cached = got.cached if alone else None
        self.rows.append((f"{label}{len(messages)}", got.text, got.prompt, cached))
        return [*messages, {"role": "assistant", "content": got.text}]

    def together(self, *turns: tuple[str, Messages, int]) -> list[Messages]:
        with ThreadPoolExecutor(len(turns)) as pool:
            return list(pool.map(lambda one: self.turn(*one, alone=False), turns))

    def first(self) -> list[Messages]:
        """Turns, a branch, turns at once, an edit: until the server ends."""
        head = [{"role": "system", "content": HEAD}]
        a = self.turn("a", [*head, asked("one")])
        a = self.turn("a", [*a, asked("two")])
        b = self.turn("b", [*head, asked("branch")])
        a, b = self.together(("a", [*a, asked("three")], 16), ("b", [*b, asked("second")], 16))
        self.together(*((n, [*a, asked(n)], k) for n, k in (("c", 40), ("d", 20), ("e", 60))))
        self.turn("edit", [*a[:3], asked("another second")])
        return [self.turn("a", [*a, asked("four")]), b]

    def second(self, talks: Sequence[Messages]) -> None:
        """A turn of each conversation, after a restart."""
        for label, messages in zip("ab", talks, strict=True):
            self.turn(label, [*messages, asked("again")])


@contextmanager
def serving(model: Path, folder: Path, *flags: str) -> Iterator[Served]:
    """A server in `folder`. Every process of it has ended afterwards."""
    cache = ("--cache-dir", str(folder / "cache"), "--ram", "600MB", "--disk", "500MB")
    with served("--model", str(model), *cache, *flags, home=folder) as server:
        assert server.url  # it is ready
        left = psutil.Process(server.process.pid).children(recursive=True)
        try:
            yield server
        finally:
            if server.process.poll() is None:
                assert server.stop(seconds=30) == 0, server.output
            _, alive = psutil.wait_procs(left, timeout=2)
            for one in alive:
                one.kill()
            assert not alive, server.output


def talk(model: Path, folder: Path, *flags: str) -> list[tuple[str, str, int, int | None]]:
    """Talk to a server that is started again in between."""
    folder.mkdir()
    with serving(model, folder, *flags) as server:
        before = Talk(server)
        talks = before.first()
    with serving(model, folder, *flags) as server:
        after = Talk(server)
        after.second(talks)
    return sorted([*before.rows, *after.rows], key=str)


def test_four_processes_answer_like_one(toy: ToyMaker, tmp_path: Path):
    """Each with one head of the KV."""
    model = toy("llama", heads=4, kv_heads=4)
    one = talk(model, tmp_path / "one")
    assert talk(model, tmp_path / "four", *FOUR) == one


@pytest.mark.parametrize(
    ("family", "flags"),
    [("llama", ()), ("gpt_oss", ()), ("qwen3_5", ()), ("qwen3_5", ("--pipeline",))],
)
def test_two_processes_answer_like_one(
    toy: ToyMaker, tmp_path: Path, family: str, flags: tuple[str, ...]
):
    """Turns, a branch, several at once, an edit, and a restart from the disks of both."""
    one = talk(toy(family), tmp_path / "one")
    two = talk(toy(family), tmp_path / "two", *TWO, *flags)
    for (*said, cached), (*same, here) in zip(two, one, strict=True):
        assert said == same
        # where windows slide, one process goes on from any token, and several from marks
        assert cached == here or (
            family == "gpt_oss" and 0 < (here or 0) - (cached or 0) <= AFTER_A_MARK
        )
    assert [name for name, *_, cached in one if cached == 0] == ["a2"]


def test_what_is_not_served_yet_is_refused(toy_llama: Path, tmp_path: Path):
    """In words, and the server goes on."""
    with serving(toy_llama, tmp_path, *TWO) as server:
        api = Api(server)
        api.chat([asked("one")])
        (session,) = api.http.get("/v1/sessions").json()["data"]
        answer = api.http.get(f"/v1/sessions/{session['id']}/snapshot?format=mlx-lm")
        assert answer.status_code == 400
        assert "several machines" in answer.text
        (model,) = api.http.get("/v1/models").json()["data"]
        answer = api.http.post(f"/v1/models/{model['id']}/unload")
        assert answer.status_code == 400
        assert "cannot be unloaded" in answer.text
        api.chat([asked("one")])


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("llama", TWO, ()),
        ("llama", (), TWO),
        ("qwen3_5", TWO, FOUR),
        ("qwen3_5", (), (*TWO, "--pipeline")),
        ("qwen3_5", (*TWO, "--pipeline"), TWO),
    ],
)
def test_a_snapshot_is_warm_on_another_number_of_ranks(
    toy: ToyMaker,
    tmp_path: Path,
    family: str,
    before: tuple[str, ...],
    after: tuple[str, ...],
):
    """The next turn has the same text, and reuses there what it reuses here."""
    model = toy(family, heads=4, kv_heads=4, layers=8)
    talk = [{"role": "system", "content": HEAD}, asked("one")]
    (tmp_path / "before").mkdir()
    (tmp_path / "after").mkdir()
    with serving(model, tmp_path / "before", *before) as server:
        api = Api(server)
        first = api.chat(talk)
        time.sleep(2)  # until it is on disk
        (session,) = api.http.get("/v1/sessions").json()["data"]
        answer = api.http.get(f"/v1/sessions/{session['id']}/snapshot")
        assert answer.status_code == 200, answer.text
        talk += [{"role": "assistant", "content": first.text}, asked("two")]
        second = api.chat(talk)
    with serving(model, tmp_path / "after", *after) as server:
        api = Api(server)
        made = api.http.post("/v1/sessions", content=answer.content)
        assert made.status_code == 201, made.text
        there = api.chat(talk)
        assert (there.text, there.prompt) == (second.text, second.prompt)
        assert there.cached == second.cached > 0


def rank_process(server: Served, rank: int) -> psutil.Process:
    """The process of a rank."""
    for one in psutil.Process(server.process.pid).children(recursive=True):
        if one.environ().get("MLX_RANK") == str(rank):
            return one
    raise AssertionError(server.output)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_an_error_to_clients_and_the_end(
    toy_llama: Path, tmp_path: Path, number: signal.Signals
):
    """Within 10 seconds; started again, the conversation is warm and its text the same."""
    with serving(toy_llama, tmp_path, *TWO) as server:
        api = Api(server)
        before = api.chat([asked("one")])
        time.sleep(1)  # until it is on disk
        body = {"messages": [asked("two")], "max_tokens": 7000, "stream": True}
        with api.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            os.kill(rank_process(server, 1).pid, number)
            began = time.monotonic()
            last = [line for line in lines if line.startswith("data: ")][-1]
            assert "error" in json.loads(last.removeprefix("data: "))
        assert server.process.wait(10 - (time.monotonic() - began)) == 1
    with serving(toy_llama, tmp_path, *TWO) as server:
        after = Api(server).chat([asked("one")])
        assert after.text == before.text
        assert after.cached == after.prompt - 1


@pytest.mark.parametrize("which", ["front", "mlx.launch"])
def test_ranks_end_when_what_started_them_was_killed(toy_llama: Path, tmp_path: Path, which: str):
    """Nobody tells them: a process that was killed cannot."""
    with serving(toy_llama, tmp_path, *TWO) as server:
        front = psutil.Process(server.process.pid)
        (launcher,) = front.children()
        left = [launcher, *launcher.children(recursive=True)]
        (front if which == "front" else launcher).kill()
        _, alive = psutil.wait_procs(left, timeout=10)
        assert not alive
        server.process.wait(10)


@contextmanager
def by_hand(model: Path, folder: Path) -> Iterator[Api]:
    """Two ranks as mlx.launch starts them on two machines, each with a cache folder of its own."""
    port = free_port(2)
    hostfile = folder / "hosts.json"
    hostfile.write_text(json.dumps([[f"127.0.0.1:{port + rank}"] for rank in range(2)]))
    environ = {"MLX_HOSTFILE": str(hostfile), "MLX_RANK": "1"}
    flags = ("--model", str(model), "--ram", "600MB", "--disk", "500MB", "--cache-dir")
    rank_1 = Served((*flags, str(folder / "1")), folder, environ)
    environ["MLX_RANK"] = "0"
    try:
        with served(*flags, str(folder / "0"), home=folder, environ=environ) as server:
            yield Api(server)
            assert server.stop(seconds=30) == 0, server.output
        assert rank_1.process.wait(10) == 0, rank_1.output
    finally:
        if rank_1.process.poll() is None:
            rank_1.process.kill()
            rank_1.process.wait()


def test_a_rank_with_an_empty_disk_makes_the_first_turn_cold(toy_llama: Path, tmp_path: Path):
    """Its text is the same, and it is written again on that rank."""
    with by_hand(toy_llama, tmp_path) as api:
        before = api.chat([asked("one")])
    shutil.rmtree(tmp_path / "1")
    with by_hand(toy_llama, tmp_path) as api:
        cold = api.chat([asked("one")])
        assert (cold.text, cold.cached) == (before.text, 0)
    with by_hand(toy_llama, tmp_path) as api:
        warm = api.chat([asked("one")])
        assert (warm.text, warm.cached) == (before.text, before.prompt - 1)
