"""First tokens and speeds, with stand-ins for servers."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mlxcache.bench import context as module
from mlxcache.bench import prove_http
from mlxcache.bench.client import Reply
from mlxcache.bench.context import Clock, Context, Scale, Subject
from mlxcache.bench.findings import Findings, NotApplicable
from mlxcache.bench.process import OURS, THEIRS
from mlxcache.command_buffers import LARGE, OWN

SCALE = Scale(
    short=(100, 200), long=(60_000,), decode=(100,), crowds=(2,), reply=8, prompt=64, passes=(16,),
    runs=2,
)  # fmt: skip


@dataclass
class Server:
    """A server whose cold first token takes a millisecond per token, and a warm one 11 ms.

    `ends`: replies end after one token. `forgets`: nothing is kept over a restart.
    """

    name: str
    ends: bool = False
    forgets: bool = False
    log: list[str] = field(default_factory=list)
    known: int = 0

    @property
    def client(self) -> Server:
        return self

    def chat(self, messages: Any, max_tokens: int) -> Reply:
        tokens = sum(len(message["content"]) for message in messages)
        cached, self.known = self.known, tokens
        generated = 1 if self.ends else max_tokens
        first = 0.011 if cached else tokens / 1000
        self.log.append("chat")
        return Reply("x", first, first + 0.1, first + 0.1, tokens, cached, generated, None)

    def get(self, path: str) -> dict[str, Any]:
        assert path == "/v1/cache"
        return {"pending_bytes": 0, "evictions": {"spilled": 0, "dropped": len(self.log)}}

    def stop(self, seconds: float) -> None:
        self.log.append("stop")
        self.known = 0 if self.forgets else self.known

    def kill(self) -> None:
        self.log.append("kill")


class Own:
    """The model by itself: 10 ms for a warm turn, 70 tokens/s."""

    def ask(self, prefix: int, fed: int) -> tuple[float, float]:
        assert prefix > 0 < fed
        return 0.010, 1.0

    def decode(self, prefix: int, reply: int) -> tuple[float, float]:
        return 70.0, 5e6

    def prefill(self, prompt: int, step: int) -> float:
        return float(prompt * step)


class Played(Context):
    """A context with stand-ins. `servers`: those that were started."""

    servers: list[Server]
    arguments: list[Any]
    more: dict[str, Any]
    cuttable: bool

    @contextmanager
    def _one(self, name: str) -> Iterator[Any]:
        self.servers.append(Server(name, **self.more))
        yield self.servers[-1]

    def serving(self, *extra: str, **variables: str) -> Any:
        self.arguments.append((extra, variables))
        return self._one(OURS)

    def theirs(self) -> Any:
        return self._one(THEIRS)

    @contextmanager
    def own_time(self) -> Iterator[Any]:
        if not self.cuttable:
            raise NotApplicable("it cannot be cut")
        yield Own()

    @property
    def filler(self) -> Any:
        return self

    def text(self, tokens: int, seed: str) -> str:
        return "x" * tokens


@pytest.fixture
def context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Played:
    monkeypatch.setattr(module, "SETTLED_S", 0.0)
    subject = Subject(tmp_path, "m", {})
    found = Findings("x", "m")
    made = Played(subject, SCALE, Clock(600), tmp_path, 10**11, found, lambda _: None)
    made.servers, made.arguments, made.more, made.cuttable = [], [], {}, True
    return made


def medians(found: Findings, title: str) -> dict[str, dict[str, float]]:
    rows = found.tables[title]
    return {row: {name: one.median for name, one in of.items()} for row, of in rows.items()}


def test_first_tokens_are_taken_in_every_state(context: Played) -> None:
    prove_http.first_token(context)
    found = medians(context.found, prove_http.TIMES)
    assert found[f"100 tokens, {OURS}"] == {
        "cold": 0.1, "warm": 0.011, "the model's own": 0.010, "restored": 0.011,
        "after kill -9": 0.011,
    }  # fmt: skip
    assert found[f"200 tokens, {THEIRS}"] == {"cold": 0.2, "warm": 0.011}
    ends = [word for word in context.servers[0].log if word != "chat"]
    assert ends == ["stop", "stop", "kill", "kill"]
    assert context.found.checks == []
    assert len(context.found.unchecked) == 2


def test_the_bound_on_warm_turns_is_checked_on_long_prompts(context: Played) -> None:
    """11 ms by 10 ms is 1.1; without the model's own time there is nothing to check."""
    prove_http.first_token_long(context)
    (check,) = context.found.checks
    assert (round(check.measured, 6), check.bound) == (1.1, 1.10)
    context.cuttable = False
    context.found.checks.clear()
    prove_http.first_token_long(context)
    assert context.found.checks == []
    assert "was not measured" in context.found.unchecked[-1].why


def test_a_server_that_restores_nothing_fails(context: Played) -> None:
    """Its first token would be a cold one under the name of a restored one."""
    context.more = {"forgets": True}
    with pytest.raises(ValueError, match="nothing was restored"):
        prove_http.first_token(context)


def test_decoding_is_compared_pair_by_pair(context: Played) -> None:
    """Seven tokens in 0.1 s are 70 tokens/s, as of the model by itself."""
    prove_http.decode(context)
    found = medians(context.found, prove_http.DECODE)
    assert round(found[f"100 tokens, {OURS}"]["one reply"], 6) == 70
    by_itself = {"one reply": 70, "peak beyond the first token's memory": 5e6}
    assert found[f"100 tokens, {prove_http.GENERATE}"] == by_itself
    assert found[f"100 tokens, {THEIRS}"]["2 at once, all"] > 0
    (check,) = context.found.checks
    assert (round(check.measured, 6), check.bound, check.least) == (1.0, 0.97, True)


def test_short_replies_have_no_speed(context: Played) -> None:
    context.more = {"ends": True}
    with pytest.raises(ValueError, match="ended after 1 of 8 tokens"):
        prove_http.decode(context)


def test_two_sizes_of_command_buffers_are_compared(context, monkeypatch):
    """In turn, at two servers; there is no bound, and no such buffers without Metal."""
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(NotApplicable):
        prove_http.command_buffers(context)
    monkeypatch.setattr(sys, "platform", "darwin")
    prove_http.command_buffers(context)
    assert context.arguments == [((), LARGE), ((), OWN)]
    (row,) = context.found.tables[prove_http.BUFFERS].values()
    assert {column: len(one.samples) for column, one in row.items()} == {
        "large": SCALE.runs, "MLX's own": SCALE.runs,
    }  # fmt: skip
    assert context.found.checks == []


def test_churn_sends_two_streams_of_new_prompts_for_a_while(context, monkeypatch):
    monkeypatch.setattr(prove_http, "LASTING_S", 0.05)
    prove_http.churn(context)
    ((extra, _),) = context.arguments
    assert (extra[0], extra[2:]) == ("--ram", ("--disk", "off"))
    (row,) = medians(context.found, prove_http.CHURN).values()
    assert row["replies"] >= 2
    (check,) = context.found.checks
    assert check.ok
    assert check.measured == len(context.servers[0].log)


def test_churn_shows_its_figures_if_the_last_requests_outlast_the_limit(context, monkeypatch):
    def chat(server: Server, *_: Any) -> None:
        time.sleep(0.6 if len(server.log) >= 4 else 0)
        server.log.append("chat")

    monkeypatch.setattr(prove_http, "SPARE_S", 0.1)
    monkeypatch.setattr(Server, "chat", chat)
    context.clock = Clock(0.3)
    with context.clock.bounding():
        prove_http.churn(context)
    (row,) = medians(context.found, prove_http.CHURN).values()
    assert row["replies"] >= 4
    assert row["lasted"] < 0.6


# -- sleep -----------------------------------------------------------------------------------------

LINE = '   pid {pid}(caffeinate): [0x1] 00:00:01 PreventUserIdleSystemSleep named: "caffeinate"'


@pytest.fixture
def mac(context: Played, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Play the scenario on a Mac with a stand-in for pmset, which shows another caffeinate too."""
    assertions, command = tmp_path / "assertions", tmp_path / "pmset"
    assertions.write_text(LINE.format(pid=7) + "\n")
    command.write_text(f"#!/bin/sh\ncat {assertions}\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(prove_http, "PATIENCE_S", 0.5)

    def play(*, holds: bool, lets_go: bool) -> None:
        def chat(*_: Any) -> None:
            before = assertions.read_text()
            if holds:
                assertions.write_text(before + LINE.format(pid=42))
            time.sleep(1.0)
            if lets_go:
                assertions.write_text(before)

        monkeypatch.setattr(Server, "chat", chat)
        prove_http.awake(context)

    return play


def test_an_assertion_that_comes_and_goes_is_found(context: Played, mac: Any) -> None:
    """Another program's is not taken for it."""
    mac(holds=True, lets_go=True)
    assert context.found.notes
    assert prove_http.asserting() == {7}


@pytest.mark.parametrize(("holds", "wrong"), [(False, "no caffeinate while"), (True, "still held")])
def test_an_assertion_that_never_comes_or_stays_is_a_failure(mac, holds, wrong):
    """The Mac could sleep within a request, or would be kept awake for ever."""
    with pytest.raises(ValueError, match=wrong):
        mac(holds=holds, lets_go=False)
