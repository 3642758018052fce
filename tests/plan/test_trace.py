"""Traces: three forms are read, and a wrong line is named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxcache.common_prefix import common_length
from mlxcache.engine.trace import TracedRequest, TraceWriter
from mlxcache.plan.trace import Trace
from mlxcache.plan.trace_files import TraceError, read_trace
from mlxcache.types import Tokens, token_ids


def written(folder: Path, *lines: Any) -> Path:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(json.dumps(one) for one in lines) + "\n", encoding="utf-8")
    return path


def shared(trace: Trace, one: int, other: int) -> int:
    """Tokens that the paths of two requests have in common."""
    paths = [trace.requests[at].tokens() for at in (one, other)]
    return common_length(*paths)


def test_a_trace_in_the_form_of_mooncake_has_whole_prompts(tmp_path: Path) -> None:
    """Times are milliseconds, and the size of a block follows from the lengths."""
    path = written(
        tmp_path,
        {"timestamp": 0, "input_length": 1300, "output_length": 50, "hash_ids": [0, 1, 2]},
        {"timestamp": 27482, "input_length": 1200, "output_length": 0, "hash_ids": [0, 1, 9]},
    )
    trace = read_trace(path)
    assert (trace.form, trace.block_tokens, trace.closed) == ("mooncake", 512, False)
    first, second = trace.requests
    assert (first.prompt_tokens, first.reply_tokens, first.session) == (1300, 50, None)
    assert (second.prompt_tokens, second.reply_tokens, second.time) == (1200, 0, 27.482)
    assert shared(trace, 0, 1) == 1024


def test_a_reply_that_comes_back_in_a_later_prompt_is_reused(tmp_path: Path) -> None:
    """The later prompt has it in blocks of its own; where it diverges, nothing is credited."""
    row = {"output_length": 100, "timestamp": 0}
    path = written(
        tmp_path,
        row | {"input_length": 150, "hash_ids": [1, 2, 3]},
        row | {"input_length": 420, "hash_ids": [1, 2, 4, 5, 6, 7, 8]},
        row | {"input_length": 150, "hash_ids": [1, 2, 3]},
        row | {"input_length": 260, "hash_ids": [1, 2, 9, 10, 11]},
    )
    trace = read_trace(path, block_tokens=64)
    assert [one.prompt_tokens for one in trace.requests] == [150, 420, 150, 260]
    assert [one.reply_tokens for one in trace.requests] == [100, 100, 100, 100]
    assert shared(trace, 0, 1) == 250
    assert (shared(trace, 1, 2), shared(trace, 1, 3)) == (150, 128)


def session(**more: Any) -> dict[str, Any]:
    """A session of Claude Code: three requests, and two of a sub-agent between the last ones."""

    def request(at: float, tokens: int, blocks: list[int], **other: Any) -> dict[str, Any]:
        return {"t": at, "type": "n", "in": tokens, "out": 20, "hash_ids": blocks} | other

    agent = [
        request(0.0, 70, [40], api_time=1.0, think_time=0.0),
        request(3.0, 140, [40, 41], api_time=1.0, think_time=2.0),
    ]
    return {
        "id": "one",
        "block_size": 64,
        "tool_tokens": 30,
        "system_tokens": 20,
        "requests": [
            request(0.0, 100, [1], api_time=2.0, think_time=0.0),
            request(5.0, 200, [1, 2, 3], api_time=1.0, think_time=3.0),
            {"t": 6.5, "type": "subagent", "requests": agent},
            request(12.0, 300, [1, 2, 3, 4], api_time=1.0, think_time=6.0),
        ],
    } | more


def test_a_session_waits_for_its_sub_agents(tmp_path: Path) -> None:
    """Each request follows the one before it; the main one after a sub-agent follows that too."""
    trace = read_trace(written(tmp_path, session()))
    assert (trace.form, trace.block_tokens, trace.chains()) == ("sessions", 64, [[0, 1, 2, 3, 4]])
    assert [one.after for one in trace.requests] == [(), (0,), (1,), (2,), (1, 3)]
    assert [one.delay for one in trace.requests] == [0.0, 3.0, 0.5, 2.0, 1.5]
    assert [one.prompt_tokens for one in trace.requests] == [100, 200, 70, 140, 300]
    assert [one.key for one in trace.requests] == [100, 100, 70, 70, 100]
    assert [one.head for one in trace.requests] == [50, 50, 0, 0, 50]
    assert (shared(trace, 0, 1), shared(trace, 1, 4), shared(trace, 2, 3)) == (120, 220, 90)
    assert shared(trace, 0, 2) == 0


def test_sessions_come_from_several_files_and_folders(tmp_path: Path) -> None:
    """Their names of blocks are their own, compressed or not, one a line or alone in a file."""
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "a.json.gz").write_bytes(gzip.compress(json.dumps(session()).encode()))
    (folder / "b.json").write_text(json.dumps(session(id="two"), indent=1), encoding="utf-8")
    both = written(tmp_path, session(id="three"), session(id="four"))
    seen: list[tuple[int, int]] = []
    trace = read_trace(both, folder, progress=lambda *now: seen.append(now))
    assert [len(one) for one in trace.chains()] == [5, 5, 5, 5]
    assert [one.session for one in trace.requests[::5]] == ["three", "four", "one", "two"]
    assert shared(trace, 0, 5) == 0
    assert seen == [(1, 3), (2, 3), (3, 3)]
    assert trace.scaled(0.5).requests[4].prompt_tokens == pytest.approx(150, abs=4)


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        (session(block_size=0), "line 1: block_size is 0"),
        (session(requests=[3]), "requests 1: expected a JSON object"),
        (session(requests=[{"t": 0, "in": 64, "out": 1, "hash_ids": []}]), "whole blocks of 64"),
        (session(requests=[{"t": -1, "in": 1, "out": 1, "hash_ids": []}]), "t is -1"),
        (session(requests=[{"t": 0, "requests": 7}]), "requests is 7: expected a list"),
    ],
)
def test_a_wrong_session_is_named(tmp_path: Path, line: dict[str, Any], wrong: str) -> None:
    with pytest.raises(TraceError, match=wrong):
        read_trace(written(tmp_path, line))


def test_other_traces_come_alone(tmp_path: Path) -> None:
    row = {"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}
    path, folder = written(tmp_path, row), tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(TraceError, match="one at a time"):
        read_trace(path, path)
    with pytest.raises(TraceError, match="no file in it"):
        read_trace(folder)


def test_turns_in_the_form_of_aiperf_follow_the_reply_before(tmp_path: Path) -> None:
    """A later line has only what is new; its prompt begins with all before it."""
    row = {"session_id": "a", "output_length": 30}
    path = written(
        tmp_path,
        row | {"input_length": 100, "hash_ids": [5, 6], "timestamp": 0.0, "group_id": 1},
        row | {"input_length": 40, "hash_ids": [7], "delay": 1500.0},
        row | {"session_id": "b", "input_length": 70, "hash_ids": [5, 8], "timestamp": 9.0},
    )
    trace = read_trace(path, block_tokens=64)
    first, second, other = trace.requests
    assert (trace.form, trace.closed) == ("agentic", True)
    assert (first.prompt_tokens, second.prompt_tokens, other.prompt_tokens) == (100, 170, 70)
    assert (first.delay, second.delay, second.key) == (0.0, 1.5, 100)
    assert (shared(trace, 0, 1), shared(trace, 0, 2)) == (130, 64)


def test_scaling_keeps_what_is_shared(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {"timestamp": 0, "input_length": 1300, "output_length": 64, "hash_ids": [0, 1, 2]},
        {"timestamp": 1, "input_length": 1300, "output_length": 64, "hash_ids": [0, 1, 3]},
    )
    trace = read_trace(path).scaled(1 / 16)
    assert trace.requests[0].prompt_tokens == 32 + 32 + 17
    assert shared(trace, 0, 1) == 64


@pytest.mark.parametrize(
    ("line", "wrong"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: expected a JSON object"),
        ('{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [1]}', "-5"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1.5]}', "1.5"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": 1}', "a list"),
        ('{"timestamp": -1, "input_length": 9, "output_length": 1, "hash_ids": [1]}', "timestamp"),
        ('{"timestamp": 0, "input_length": 9, "output_length": true, "hash_ids": [1]}', "True"),
        ('{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1, 2]}', "--block"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, line: str, wrong: str) -> None:
    good = '{"timestamp": 0, "input_length": 9, "output_length": 1, "hash_ids": [1]}'
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{good}\n{line}\n", encoding="utf-8")
    with pytest.raises(TraceError, match="line 2") as error:
        read_trace(path)
    assert wrong in str(error.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00", b'{"a": 1}\n'])
def test_what_is_no_trace_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    with pytest.raises(TraceError):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "missing")


class Server:
    """What a server would record of paths of token ids."""

    def __init__(self) -> None:
        self.writer = TraceWriter(1000.0)
        self.lines: list[dict[str, Any]] = [self.writer.header()]
        self.paths: list[Tokens] = []

    def serve(self, ids: list[int], prompt: int, *, at: float, session: str | None = "s") -> None:
        path = token_ids(ids)
        one = TracedRequest(
            ids=path,
            prompt_tokens=prompt,
            cached_tokens=0,
            restored_tokens=0,
            arrived=1000.0 + at,
            ended=1001.0 + at,
            session=session,
            key=10,
            head=5,
        )
        self.paths.append(path)
        self.lines.append(self.writer.line(one))


def test_a_recorded_trace_knows_prefixes_to_the_token_where_a_turn_ended(tmp_path: Path) -> None:
    """A next turn begins where the reply ended, a second reply where the prompt ended."""
    server, rng = Server(), np.random.default_rng(1)
    ids = [int(one) for one in rng.integers(0, 9999, 1000)]
    server.serve(ids[:330], 300, at=0)
    server.serve([*ids[:330], *ids[400:500]], 420, at=5)
    server.serve([*ids[:300], *ids[700:750]], 300, at=10)
    server.serve([*ids[:330], *ids[400:430], *ids[800:900]], 400, at=15, session="t")
    trace = read_trace(written(tmp_path, *server.lines))
    assert [one.prompt_tokens for one in trace.requests] == [300, 420, 300, 400]
    assert [one.reply_tokens for one in trace.requests] == [30, 10, 50, 60]
    assert shared(trace, 0, 1) == 330
    assert shared(trace, 1, 2) == shared(trace, 0, 2) == 300
    assert 360 - 64 < shared(trace, 1, 3) <= 360
    assert [one.delay for one in trace.requests] == [0.0, 4.0, 4.0, 0.0]
    assert len({one.session for one in trace.requests}) == 2


def test_recorded_prefixes_are_those_of_the_token_ids(tmp_path: Path) -> None:
    server, rng = Server(), np.random.default_rng(2)
    paths: list[list[int]] = [[]]
    for number in range(60):
        before = paths[rng.integers(len(paths))]
        before = before[: int(rng.integers(len(before) + 1))] if rng.random() < 0.5 else before
        new = [int(one) for one in rng.integers(0, 50, int(rng.integers(1, 150)))]
        path = before + new
        prompt = int(rng.integers(1, len(path) + 1))
        server.serve(path, prompt, at=number, session=str(rng.integers(4)))
        paths.append(path)
    trace = read_trace(written(tmp_path, *server.lines))
    for one in range(60):
        for other in range(one):
            real = common_length(server.paths[one], server.paths[other])
            assert real - 64 < shared(trace, one, other) <= real


def test_a_recorded_trace_holds_no_text_and_no_token_ids(tmp_path: Path) -> None:
    lines = []
    for _ in range(2):
        server = Server()
        for turn in range(1, 20):
            server.serve(list(range(turn * 100)), turn * 100 - 5, at=turn, session="secret")
        lines.append(server.lines[1:])
    names = [
        {one if isinstance(one, str) else one[0] for line in each for one in line["blocks"]}
        for each in lines
    ]
    assert not names[0] & names[1]
    assert lines[0][0]["session"] != lines[1][0]["session"]
    assert "secret" not in json.dumps(lines)
    assert all(len(line["blocks"]) <= 6 for line in lines[0])


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"same": 99}, "same is 99"),
        ({"blocks": [7]}, "blocks holds 7"),
        ({"blocks": [["a", 65]]}, "up to 64"),
        ({"generated_tokens": 3}, "expected 103"),
        ({"time": "now"}, "time is 'now'"),
        ({"session": 5}, "session is 5"),
        ({"head": 121}, "head is 121, but the request has 120 tokens"),
        ({"key": 500}, "key is 500"),
    ],
)
def test_a_wrong_recorded_line_is_named(tmp_path: Path, change: dict[str, Any], wrong: str) -> None:
    server = Server()
    server.serve(list(range(120)), 100, at=0)
    path = written(tmp_path, server.lines[0], server.lines[1] | change)
    with pytest.raises(TraceError, match="line 2") as error:
        read_trace(path)
    assert wrong in str(error.value)


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    """It may mean something else."""
    path = written(tmp_path, TraceWriter(0.0).header() | {"version": 2})
    with pytest.raises(TraceError, match="newer mlxcache"):
        read_trace(path)
