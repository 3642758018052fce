"""A trace as chats: the same block is the same text, and real replies take the place of theirs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from mlxcache.bench import command
from mlxcache.bench.client import Reply
from mlxcache.bench.process import Launch, mlx_lm_server
from mlxcache.bench.replay import Player, Replay, figures
from mlxcache.errors import ConfigError
from mlxcache.plan.trace import Ids, Request, Trace, path_of


class Echo:
    """A client that keeps what it is sent, and a filler whose text says what it is for."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def chat(self, messages: Any, max_tokens: int) -> Reply:
        self.sent.append(([dict(one) for one in messages], max_tokens))
        number = len(self.sent)
        return Reply(f"reply {number}", 0.1 * number, 1.0, 1.0, 100, 80, max_tokens, None)

    def text(self, tokens: int, seed: str) -> str:
        return f"<{seed} {tokens}>"


def two_turns() -> list[Request]:
    ids = Ids()
    first = [(ids.of("a"), 50), (ids.of("b"), 20)]
    reply, again = (ids.new(), 9), (ids.new(), 1)
    later = [*first, reply, (ids.of("c"), 30)]
    return [
        Request(0.0, "s", *path_of([*first, reply]), 2),
        Request(1.0, "s", *path_of([*later, again]), 4),
    ]


def test_a_next_turn_contains_what_the_server_replied() -> None:
    echo: Any = Echo()
    replies = Player(echo, echo, "t").play(two_turns(), lambda _: None)
    head = {"role": "user", "content": "<t/1 50><t/2 20>"}
    assert echo.sent == [
        ([head], 9),
        (
            [
                head,
                {"role": "assistant", "content": "reply 1"},
                {"role": "user", "content": "<t/5 30>"},
            ],
            1,
        ),
    ]
    found = figures(replies, 0)
    assert (found["prompt_tokens"], found["cached_tokens"], found["hit_rate"]) == (200, 160, 0.8)
    assert found["fed_tokens"] == 40
    assert found["first_token_s"]["p50"] == pytest.approx(0.15)


def test_every_server_gets_the_same_ram(tmp_path: Path) -> None:
    plan = Replay(Trace(tuple(two_turns()), "mooncake", 64), 1, 32_000_000, 10**9)
    other = Launch("other", ("serve", "--cache-memory-mb", "{ram_mb}", "{model}", "{port}"))
    own, alone, mlx_lm, named = plan.launches(tmp_path, [mlx_lm_server(), other])
    assert own.command[-4:] == ("--ram", "32000000", "--disk", "1000000000")
    assert own.command[-4:-2] == alone.command[-4:-2]
    assert alone.command[-1] == "off"
    assert mlx_lm.command[-2:] == ("--prompt-cache-bytes", "32000000")
    assert "32" in named.command


def test_a_trace_that_no_server_can_play_is_refused(toy_llama: Path) -> None:
    ids = Ids()
    long = Request(0.0, None, *path_of([(ids.new(), 100_000_000), (ids.new(), 1)]), 1)
    for requests, wrong in (((long,), "--trace-scale 0.00066"), ((), "no requests")):
        with pytest.raises(ConfigError, match=wrong):
            Replay(Trace(requests, "mooncake", 64), 1, 10**9, 10**9).order(toy_llama)


def test_a_wrong_trace_is_wrong_usage(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0}\n', encoding="utf-8")
    more = {"users": 1, "ram": "1GB", "disk": "1GB"}
    with pytest.raises(typer.BadParameter, match="line 1"):
        command.read_replay([path], 1.0, None, **more)  # type: ignore[arg-type]
    assert command.read_replay(None, 1.0, None, **more) is None  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_trace_is_played_to_servers(tmp_path: Path) -> None:
    import json

    from tests.bench.test_command import bench
    from tests.proofs.models import tiny

    model = tiny(tmp_path / "model", "llama")
    row = {"session_id": "a", "output_length": 8}
    lines = [row | {"input_length": 600, "hash_ids": [1, 2], "timestamp": 0.0}]
    lines += [row | {"input_length": 60, "hash_ids": [at], "delay": 1.0} for at in (3, 4, 5)]
    path, out = tmp_path / "t.jsonl", tmp_path / "out.json"
    path.write_text("".join(json.dumps(one) + "\n" for one in lines), encoding="utf-8")
    args = ["--model", str(model), "--trace", str(path), "--trace-ram", "64MB", "--json", str(out)]
    done = bench(*args, program=(sys.executable, "-m", "tests.proofs"))
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())["trace"]
    assert list(found) == ["mlxcache", "mlxcache, --disk off", "mlx_lm.server"]
    for one in found.values():
        assert one["requests"] == 4
        assert one["fed_tokens"] < one["prompt_tokens"] / 2
