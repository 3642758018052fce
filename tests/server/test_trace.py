"""`mlxcache trace` records what requests were like, and nothing that they said."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxcache.cli.main import app
from mlxcache.engine.trace import MOST_WAITING, Recordings
from mlxcache.plan.trace_files import read_trace
from tests.server.api import Api

WORDS = "the cat sat on the mat and looked at the dog " * 12


def converse(api: Api, turns: int, session: str) -> list[dict[str, Any]]:
    """Usage of each turn of one conversation."""
    messages: list[dict[str, str]] = [{"role": "system", "content": WORDS}]
    found = []
    for turn in range(turns):
        messages.append({"role": "user", "content": f"{turn} secretword {session}"})
        body = {"model": "m", "messages": messages, "max_tokens": 12, "temperature": 0}
        answer = api.http.post(
            "/v1/chat/completions", json=body, headers={"X-Session-Id": session}
        ).json()
        messages.append(answer["choices"][0]["message"])
        found.append(answer["usage"])
    return found


def test_a_recording_has_lengths_and_times_and_no_text(llama: Api, tmp_path: Path) -> None:
    """The command ends after so many requests; `plan` reads what it wrote."""
    path = tmp_path / "recorded.jsonl"
    results = []

    def record() -> None:
        arguments = ["trace", "-o", str(path), "--requests", "3", "--url", llama.url, "--json"]
        results.append(CliRunner().invoke(app, arguments))

    thread = threading.Thread(target=record)
    thread.start()
    end = time.monotonic() + 30
    while not path.exists() or not path.read_bytes():
        assert time.monotonic() < end
        time.sleep(0.02)
    usages = converse(llama, 3, "trace-session")
    thread.join(30)
    (result,) = results
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == {"object": "trace", "path": str(path), "requests": 3}
    assert path.stat().st_mode & 0o077 == 0
    text = path.read_text(encoding="utf-8")
    assert "secretword" not in text
    assert "trace-session" not in text
    trace = read_trace(path)
    assert [one.prompt_tokens for one in trace.requests] == [u["prompt_tokens"] for u in usages]
    cached = [u["prompt_tokens_details"]["cached_tokens"] for u in usages]
    assert [one.cached for one in trace.requests] == cached
    assert len({one.session for one in trace.requests}) == 1
    assert [one.after for one in trace.requests] == [(), (0,), (1,)]
    # each prompt contains the one before with its reply
    lengths = [one.tokens() for one in trace.requests]
    for before, after in zip(lengths, trace.requests[1:], strict=False):
        assert (before[:-12] == after.tokens()[: len(before) - 12]).all()


def test_a_recording_is_of_one_owner_and_ends_if_it_lags() -> None:
    """Requests of other keys are left out, and memory is bounded."""
    recordings = Recordings()
    task: Any = SimpleNamespace(job=SimpleNamespace(owner="other"), admitted=True)
    with recordings.record("own") as recording:
        recordings.note(task)  # would need the fields of a real task
        one: Any = object()
        for _ in range(MOST_WAITING + 1):
            recording.put(one)
        assert recording.lagging


def test_the_command_says_why_a_recording_ended(tmp_path: Path) -> None:
    """What was recorded stays, and the exit status is 1."""
    from mlxcache.cli.plan import record
    from mlxcache.errors import MlxcacheError

    events = [("trace", {"trace": "mlxcache"}), ("request", {"time": 1}), ("end", {"reason": "x"})]
    remote: Any = SimpleNamespace(trace=lambda: iter(events))
    path = tmp_path / "t"
    with path.open("wb") as file, pytest.raises(MlxcacheError, match=r"after 1 request: x"):
        record(remote, file, None, None)
    assert len(path.read_bytes().splitlines()) == 2
