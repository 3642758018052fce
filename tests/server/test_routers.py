"""HAProxy and nginx with the configurations in examples/ in front of three servers."""

from __future__ import annotations

import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ToyMaker
from tests.served import Served, served
from tests.server.api import CHAT

EXAMPLES = Path(__file__).parents[2] / "examples"
CONVERSATIONS = 30
TURN_TOKENS = 8
SESSION_HEADERS = ("x-claude-code-session-id", "x-session-id")
NEW_TOKENS = 200
"""More tokens than one turn adds to a conversation here."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Conversation:
    """One client that sends each turn until it is answered, as agents do."""

    url: str
    number: int
    messages: list[dict[str, str]] = field(default_factory=list)
    fed: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)
    failed: int = 0

    @property
    def headers(self) -> dict[str, str]:
        return {SESSION_HEADERS[self.number % 2]: self.name}

    @property
    def name(self) -> str:
        return f"conversation-{self.number}"

    def turn(self, seconds: float = 60.0) -> None:
        """Send the next turn, again after each failure, until it is answered."""
        text = f"{self.name}, {len(self.messages)}: " + "what do the trees say? " * 12
        self.messages.append({"role": "user", "content": text})
        body: dict[str, Any] = {"messages": self.messages, "max_tokens": TURN_TOKENS}
        end = time.monotonic() + 120
        while True:
            try:
                sent = httpx.post(self.url + CHAT, json=body, headers=self.headers, timeout=seconds)
                sent.raise_for_status()
                break
            except httpx.HTTPError:
                self.failed += 1
                assert time.monotonic() < end, f"{self.name} got no answer"
                time.sleep(0.5)
        reply = sent.json()
        used = reply["usage"]
        self.messages.append(reply["choices"][0]["message"])
        self.prompts.append(used["prompt_tokens"])
        self.fed.append(used["prompt_tokens"] - used["prompt_tokens_details"]["cached_tokens"])


class Farm:
    """Three servers with one remote, and where each conversation is."""

    def __init__(self, servers: list[Served]):
        self.servers = servers

    def sessions(self, server: Served) -> dict[str, int]:
        """Turns of each conversation that a server answered."""
        data = httpx.get(f"{server.url}/v1/sessions", timeout=30).json()["data"]
        return {one["label"]: one["turns"] for one in data if one["label"]}

    def uploaded(self) -> None:
        """Wait until nothing is left to upload."""
        for server in self.servers:
            end = time.monotonic() + 60
            while _waiting(server):
                assert time.monotonic() < end
                time.sleep(0.2)


def _waiting(server: Served) -> int:
    remote = httpx.get(f"{server.url}/v1/cache", timeout=30).json()["remote"]
    return int(remote["exchange"]["waiting"])


@pytest.fixture
def farm(toy: ToyMaker, tmp_path: Path) -> Iterator[Farm]:
    shared = tmp_path / "remote"
    shared.mkdir()
    with ExitStack() as stack:
        servers = []
        for number in range(3):
            home = tmp_path / str(number)
            home.mkdir()
            arguments = ("--model", str(toy("llama")), "--ram", "200MB", "--disk", "200MB")
            more = ("--remote", f"file://{shared}", "--concurrency", "4")
            server = served(*arguments, *more, home=home, command=("tests.patient",))
            servers.append(stack.enter_context(server))
        for one in servers:
            one.wait_for(r"^Address ", 300)
        yield Farm(servers)
        for one in servers:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGCONT)


def free_port() -> int:
    """A free port below those that the system gives to connections."""
    while True:
        with socket.socket() as one:
            number = random.randrange(20_000, 30_000)
            if one.connect_ex(("127.0.0.1", number)) != 0:
                return number


def configured(path: Path, servers: list[Served], port: int) -> str:
    """An example's text with these servers, listening on `port` of this machine."""
    places = iter(server.url.removeprefix("http://") for server in servers)
    text = re.sub(r"192\.168\.1\.\d+:8081", lambda _: next(places), path.read_text())
    return re.sub(r"(bind :|listen )8080", rf"\g<1>{port}", text).replace(
        "bind :", "bind 127.0.0.1:"
    )


@contextmanager
def running(command: list[str], port: int) -> Iterator[str]:
    process = subprocess.Popen(command)
    try:
        end = time.monotonic() + 20
        while True:
            with socket.socket() as one:
                if one.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the router ended"
            assert time.monotonic() < end
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(10)


@contextmanager
def haproxy(servers: list[Served], folder: Path) -> Iterator[str]:
    program, port = shutil.which("haproxy"), free_port()
    if program is None:
        pytest.skip("haproxy is not installed")
    file = folder / "haproxy.cfg"
    file.write_text(configured(EXAMPLES / "haproxy" / "haproxy.cfg", servers, port))
    with running([program, "-db", "-f", str(file)], port) as url:
        yield url


@contextmanager
def nginx(servers: list[Served], folder: Path) -> Iterator[str]:
    program, port = shutil.which("nginx"), free_port()
    if program is None:
        pytest.skip("nginx is not installed")
    file = folder / "nginx.conf"
    text = configured(EXAMPLES / "nginx" / "nginx.conf", servers, port)
    file.write_text(text)
    own = f"daemon off; pid {folder}/nginx.pid; error_log {folder}/nginx.log;"
    with running([program, "-p", str(folder), "-c", str(file), "-g", own], port) as url:
        yield url


def all_turn(conversations: list[Conversation]) -> None:
    """One turn of each conversation, ten at once."""
    with ThreadPoolExecutor(10) as pool:
        list(pool.map(lambda one: one.turn(), conversations))


def begin(url: str, farm: Farm) -> tuple[list[Conversation], dict[str, int]]:
    """Play two turns of each conversation; return them, and the number of the server of each."""
    conversations = [Conversation(url, number) for number in range(CONVERSATIONS)]
    for _ in range(2):
        all_turn(conversations)
    assert sum(one.failed for one in conversations) == 0
    homes: dict[str, int] = {}
    for number, server in enumerate(farm.servers):
        for name, turns in farm.sessions(server).items():
            assert turns == 2, "both turns of a conversation were answered by one server"
            homes[name] = number
    assert len(homes) == CONVERSATIONS
    assert min(Counter(homes.values()).values()) >= 2
    assert len(set(homes.values())) == 3
    farm.uploaded()
    return conversations, homes


def lose(
    farm: Farm,
    conversations: list[Conversation],
    homes: dict[str, int],
    number: int,
    stop: Callable[[Served], None],
) -> None:
    """Stop a server while all conversations have their next turn; what it had goes on elsewhere.

    Nothing fails but requests of that server's conversations, and each is warm elsewhere.
    """
    before = {one.name: one.failed for one in conversations}
    with ThreadPoolExecutor(10) as pool:
        turns = [pool.submit(one.turn) for one in conversations[:15]]
        stop(farm.servers[number])
        turns += [pool.submit(one.turn) for one in conversations[15:]]
        for turn in turns:
            turn.result()
    for one in conversations:
        if homes[one.name] != number:
            assert one.failed == before[one.name], f"{one.name} was on another server"
    moved = [one for one in conversations if homes[one.name] == number]
    assert moved
    print("moved:", {one.name: (one.prompts[-1], one.fed[-1], one.failed) for one in moved})
    for one in moved:
        assert one.fed[-1] <= NEW_TOKENS < one.prompts[-1], f"{one.name} is warm elsewhere"


def kill(server: Served) -> None:
    server.process.kill()
    server.process.wait()


def freeze(server: Served) -> None:
    server.process.send_signal(signal.SIGSTOP)


def after(farm: Farm, conversations: list[Conversation], homes: dict[str, int]) -> None:
    """Play one more turn of each: nothing fails, and all are warm."""
    failed = sum(one.failed for one in conversations)
    all_turn(conversations)
    assert sum(one.failed for one in conversations) == failed
    assert all(one.fed[-1] <= NEW_TOKENS for one in conversations)


def test_haproxy_moves_conversations_of_a_killed_server(farm: Farm, tmp_path: Path):
    with haproxy(farm.servers, tmp_path) as url:
        conversations, homes = begin(url, farm)
        lose(farm, conversations, homes, 0, kill)
        after(farm, conversations, homes)


def test_haproxy_moves_conversations_of_a_frozen_server(farm: Farm, tmp_path: Path):
    """The health check ends its connections, and the server comes back when it wakes up."""
    with haproxy(farm.servers, tmp_path) as url:
        conversations, homes = begin(url, farm)
        lose(farm, conversations, homes, 1, freeze)
        after(farm, conversations, homes)
        farm.servers[1].process.send_signal(signal.SIGCONT)
        time.sleep(6)
        after(farm, conversations, homes)


def test_nginx_moves_conversations_of_a_killed_server(farm: Farm, tmp_path: Path):
    with nginx(farm.servers, tmp_path) as url:
        conversations, homes = begin(url, farm)
        lose(farm, conversations, homes, 0, kill)
        after(farm, conversations, homes)


def test_nginx_waits_for_a_frozen_server(farm: Farm, tmp_path: Path):
    """As the documentation says: its clients get no answer until it wakes up."""
    with nginx(farm.servers, tmp_path) as url:
        conversations, homes = begin(url, farm)
        freeze(farm.servers[2])
        stuck = next(one for one in conversations if homes[one.name] == 2)
        body = {"messages": stuck.messages, "max_tokens": 1}
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(url + CHAT, json=body, headers=stuck.headers, timeout=15)
