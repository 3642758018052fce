"""A plan predicts a server's own hit rate within 2 points, on three kinds of traces."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tokenizers import Tokenizer

from mlxcache.bench.process import Server, ours, running
from mlxcache.cli.plan import record
from mlxcache.cli.remote import Remote
from mlxcache.config import parse_size
from mlxcache.model.examine import examine
from mlxcache.model.kv import Layout
from mlxcache.model.load import ModelSpec
from mlxcache.plan.agents import agents_trace
from mlxcache.plan.cache import Memory
from mlxcache.plan.simulate import Outcome, Simulation, Speed
from mlxcache.plan.trace import Request, Trace
from mlxcache.plan.trace_files import read_trace
from tests.proofs import models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

POINTS = 0.02
BLOCK = 16
RAM, DISK = "24MB", "24MB"
NO_DISK = "off"
SESSIONS = os.environ.get("PLAN_SESSIONS", "").split()
LONGEST = 4500
"""Tokens of the longest prompt of recorded sessions: more than half of `RAM` has room for."""


class IdsPlayer:
    """Player to the server at `url`, of a toy model in `folder`."""

    def __init__(self, url: str, folder: Path):
        self._url = url
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._said: dict[int, list[int]] = {}
        # part of a character before a reply would change the reply's text
        vocabulary = self._tokenizer.get_vocab()
        self._plain = sorted(id for token, id in vocabulary.items() if token.isascii())[64:]

    def play(self, requests: Iterable[Request]) -> None:
        """Send requests one after another, each with what the server replied before.

        Replies are random: greedy ones repeat themselves, and the server ends those.
        """
        for one in requests:
            prompt = slice(one.prompt_parts)
            pairs = zip(one.ids[prompt].tolist(), one.lengths[prompt].tolist(), strict=True)
            ids = [token for id, count in pairs for token in self._tokens(id, count)]
            assert len(ids) == one.prompt_tokens
            body = {"model": "toy", "prompt": ids, "max_tokens": max(1, one.reply_tokens)}
            headers = {} if one.session is None else {"X-Session-Id": one.session}
            body |= {"temperature": 1.0, "top_k": 12, "seed": 1}
            url = f"{self._url}/v1/completions"
            answer = httpx.post(url, json=body, headers=headers, timeout=300).json()
            text = answer["choices"][0]["text"]
            said = self._tokenizer.encode(text, add_special_tokens=False).ids
            parts = slice(one.prompt_parts, None)
            for id, count in zip(one.ids[parts].tolist(), one.lengths[parts].tolist(), strict=True):
                self._said[id], said = said[:count], said[count:]

    def _tokens(self, id: int, count: int) -> list[int]:
        said = self._said.get(id)
        if said is not None:
            assert len(said) == count, "the toy's reply does not encode to the generated tokens"
            return said
        rng = np.random.default_rng(id)
        return [self._plain[at] for at in rng.integers(0, len(self._plain), count)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.tiny(tmp_path_factory.mktemp("plan") / "toy", "llama")


@pytest.fixture(scope="module")
def layout(model: Path) -> Layout:
    return examine(ModelSpec(str(model))).layout


@contextmanager
def served(model: Path, folder: Path, disk: str, *more: str) -> Iterator[Server]:
    launch = ours(folder / "cache", "--ram", RAM, "--disk", disk, *more)
    with running(launch, model, folder, 120.0) as server:
        yield server


def url_of(server: Server) -> str:
    return f"http://127.0.0.1:{server.client.port}"


def figures(server: Server) -> dict[str, Any]:
    time.sleep(1.0)  # they are published after each step, and the disk's are half a second old
    _, header = next(Remote(url_of(server)).trace())
    found: dict[str, Any] = httpx.get(f"{url_of(server)}/v1/cache").json()
    return found | {"growth": header["prefill_growth"]}


def memory(found: dict[str, Any], disk: str) -> Memory:
    """The memory of a server, as `mlxcache plan --url` takes it."""
    kinds = {name: found["ram"]["kinds"].get(name, 0) for name in ("pool", "transient", "pending")}
    limit = (parse_size(disk, total=1) or 0) if disk != NO_DISK else 0
    return Memory(found["ram"]["limit_bytes"], limit, kinds)


def in_turn(requests: list[Request]) -> Trace:
    """A trace of these requests one after another, as the player sends them."""
    timed = (replace(one, time=float(at), after=()) for at, one in enumerate(requests))
    return Trace(tuple(timed), "mooncake", BLOCK)


def compare(layout: Layout, trace: Trace, found: dict[str, Any], disk: str) -> tuple[float, float]:
    """The hit rates of plan and server; says both, with what came from disk."""
    speed = Speed(growth=found["growth"])
    outcome: Outcome = Simulation(layout, memory(found, disk), speed, at_once=1).run(trace)
    tokens = found["tokens"]
    server = tokens["cached"] / tokens["prompt"]
    print(
        f"\n{len(trace.requests)} requests, disk {disk}: plan {outcome.hit_rate:.4f} "
        f"({outcome.share(lambda one: one.disk):.4f} from disk), server {server:.4f} "
        f"({tokens['restored'] / tokens['prompt']:.4f}), files evicted "
        f"{found['disk'].get('evicted_files')}, {found['evictions']}, "
        f"anticipated {found['anticipated']}, growth {speed.growth:.2g}"
    )
    return outcome.hit_rate, server


def play(model: Path, layout: Layout, folder: Path, order: list[Request], disk: str) -> None:
    """Play requests to a new server, and require that the plan agrees with it."""
    with served(model, folder, disk) as server:
        before = figures(server)["tokens"]
        IdsPlayer(url_of(server), model).play(order)
        found = figures(server)
    found["tokens"] = {name: count - before[name] for name, count in found["tokens"].items()}
    assert sum(found["evictions"].values()) > 20
    planned, real = compare(layout, in_turn(order), found, disk)
    assert planned == pytest.approx(real, abs=POINTS)


def in_turns(layout: Layout, trace: Trace, users: int) -> list[Request]:
    """Requests in the order in which so many users would send them, as plain completions."""
    # a plain completion has no messages, and so no conversation key
    plain = replace(trace, requests=tuple(replace(one, key=None) for one in trace.requests))
    speed = Speed(prefill=600, decode=30)
    order = Simulation(layout, Memory(1 << 60), speed, at_once=1).run(plain, users=users).order
    return [plain.requests[at] for at in order]


def agentic_lines(sessions: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Lines in AIPerf's form: a global layer, one of a group, and one of the session."""
    new = iter(range(10_000, 1_000_000))
    for number in range(sessions):
        group = rng.randrange(3)
        hashes = [*range(25), *(1000 + 100 * group + at for at in range(12))]
        hashes += [next(new) for _ in range(rng.randint(2, 25))]
        name = {"session_id": f"sess-{number}"}
        yield name | {
            "input_length": len(hashes) * BLOCK - rng.randrange(BLOCK),
            "output_length": rng.randint(2, 30),
            "hash_ids": hashes,
            "timestamp": 0.0,
            "group_id": group,
        }
        for _ in range(rng.randint(5, 14)):
            tokens = int(min(600, rng.lognormvariate(4.2, 0.9))) + 1
            yield name | {
                "input_length": tokens,
                "output_length": rng.randint(2, 30),
                "hash_ids": [next(new) for _ in range(-(-tokens // BLOCK))],
                "delay": rng.lognormvariate(7.5, 1.0),
            }


def mooncake_lines(count: int, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Lines in Mooncake's form: prompts that share beginnings, popular ones more often."""
    documents = [[rng.randrange(1 << 40) for _ in range(rng.randint(10, 60))] for _ in range(14)]
    for number in range(count):
        document = documents[min(int(rng.expovariate(0.25)), len(documents) - 1)]
        shared = document[: rng.randint(len(document) // 2, len(document))]
        own = [rng.randrange(1 << 40) for _ in range(rng.randint(1, 12))]
        hashes = [*documents[0][:6], *shared, *own]
        yield {
            "timestamp": 900 * number,
            "input_length": len(hashes) * BLOCK - rng.randrange(BLOCK),
            "output_length": rng.randint(1, 20),
            "hash_ids": hashes,
        }


def read(folder: Path, lines: Iterator[dict[str, Any]]) -> Trace:
    path = folder / "trace.jsonl"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    return read_trace(path, block_tokens=BLOCK)


@pytest.mark.parametrize("disk", [DISK, NO_DISK])
def test_agents_in_the_form_of_aiperf(model, layout, tmp_path, disk):
    """Four users whose sessions grow and share layers, more than RAM and disk hold."""
    trace = read(tmp_path, agentic_lines(16, random.Random(1)))
    order = in_turns(layout, trace, 4)
    assert len(order) == len(trace.requests)
    play(model, layout, tmp_path, order, disk)


@pytest.mark.parametrize("disk", [DISK, NO_DISK])
def test_agents_like_real_ones(model, layout, tmp_path, disk):
    """Sessions that grow, change earlier messages and are compacted."""
    trace = agents_trace(4, 2000, sessions=1, seed=1)
    play(model, layout, tmp_path, in_turns(layout, trace, 4)[:150], disk)


@pytest.mark.parametrize("disk", [DISK, NO_DISK])
@pytest.mark.skipif(not SESSIONS, reason="PLAN_SESSIONS names no files of recorded sessions")
def test_recorded_sessions_scaled_down(model, layout, tmp_path, disk):
    """Sessions of another server, with so few of their tokens that RAM has room for one."""
    trace = read_trace(*map(Path, SESSIONS))
    longest = max(one.prompt_tokens for one in trace.requests)
    play(model, layout, tmp_path, in_turns(layout, trace.scaled(LONGEST / longest), 2), disk)


@pytest.mark.parametrize("disk", [DISK, NO_DISK])
def test_prompts_in_the_form_of_mooncake(model, layout, tmp_path, disk):
    """Independent prompts with beginnings of different popularity."""
    trace = read(tmp_path, mooncake_lines(150, random.Random(2)))
    play(model, layout, tmp_path, list(trace.requests), disk)


@pytest.mark.parametrize("disk", [DISK, NO_DISK])
def test_chats_recorded_from_the_server_itself(model, layout, tmp_path, disk):
    """Chats with replies, regenerations and two agents a session, recorded as they run."""
    path = tmp_path / "recorded.jsonl"
    with served(model, tmp_path, disk) as server:
        before = figures(server)["tokens"]
        with path.open("wb") as file:
            count = 130
            thread = threading.Thread(
                target=lambda: record(Remote(url_of(server)), file, None, count)
            )
            thread.start()
            while path.stat().st_size == 0:
                time.sleep(0.02)
            chat(url_of(server), count, random.Random(3))
            thread.join(60)
        found = figures(server)
    found["tokens"] = {name: now - before[name] for name, now in found["tokens"].items()}
    trace = read_trace(path)
    assert len(trace.requests) == count
    assert sum(found["evictions"].values()) > 20
    planned, real = compare(layout, trace, found, disk)
    cached = sum(one.cached or 0 for one in trace.requests)
    assert cached / sum(one.prompt_tokens for one in trace.requests) == pytest.approx(real)
    assert planned == pytest.approx(real, abs=POINTS)


def chat(url: str, count: int, rng: random.Random) -> None:
    tools = "You are an agent. " + words(rng, 150)
    talks: list[tuple[str, list[dict[str, str]]]] = []
    for number in range(12):
        system = tools + (words(rng, 30) if number % 3 == 0 else "")
        talks.append((f"s{number % 8}", [{"role": "system", "content": system}]))
    with httpx.Client(base_url=url, timeout=300) as http:
        for number in range(count):
            session, messages = talks[min(int(rng.expovariate(0.2)), len(talks) - 1)]
            if sum(len(one["content"]) for one in messages) > 5000:
                del messages[1:]  # the client begins a new conversation
            again = len(messages) > 2 and rng.random() < 0.1
            if again:
                messages.pop()  # the last reply is generated once more
            else:
                messages.append({"role": "user", "content": words(rng, rng.randint(5, 60))})
            body = {
                "messages": messages,
                "model": "m",
                "max_tokens": rng.randint(4, 24),
                "temperature": 1.0,
                "top_k": 12,
                "seed": number,
            }
            answer = http.post("/v1/chat/completions", json=body, headers={"X-Session-Id": session})
            assert answer.status_code == 200, answer.text
            messages.append({
                "role": "assistant",
                "content": answer.json()["choices"][0]["message"]["content"],
            })  # fmt: skip


def words(rng: random.Random, count: int) -> str:
    return " ".join(
        rng.choice(["the", "file", "path", "tool", "agent", "cache", "token"])
        + str(rng.randrange(100))
        for _ in range(count)
    )
