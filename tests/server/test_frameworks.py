"""Frameworks for agents: the AI SDK as anyclaude uses it, in bytes, and the real packages."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conftest import ToyMaker
from tests.scripted import scripted
from tests.served import Served
from tests.server.api import Api
from tests.server.recording import check_turn

NPM = {
    "ai 5": ("ai@5", "@ai-sdk/openai@2", "@ai-sdk/openai-compatible@1", "@ai-sdk/anthropic@2"),
    "ai 7": ("ai@7", "@ai-sdk/openai@4", "@ai-sdk/openai-compatible@3", "@ai-sdk/anthropic@4"),
}
"""By version of the SDK; anyclaude asks for 5."""
PIP = {
    "openai-agents": ("openai-agents",),
    "langchain": ("langchain", "langchain-openai", "langchain-anthropic"),
    "pydantic-ai": ("pydantic-ai-slim[anthropic,openai]",),
    "litellm": ("litellm",),
}
APIS = {
    "openai-agents": ("responses", "chat"),
    "langchain": ("chat", "responses", "messages"),
    "pydantic-ai": ("chat", "responses", "messages"),
    "litellm": ("chat", "messages"),
}

INPUT = {"path": "a b.txt", "lines": [1, 20]}
CALL = f"I look.\n<tool_call>\n{json.dumps({'name': 'read', 'arguments': INPUT})}\n</tool_call>"
QUESTION = "Please read a b.txt."
SCRIPT = [
    ("Please read", CALL),
    ("^alpha$", "It says alpha."),
    ("^Hello", "Hello! What can I do?"),
    ("Sum up", "A file with one word."),
]


@pytest.fixture(scope="module")
def server(toy: ToyMaker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--model", str(toy("llama")), "--ram", "200MB", "--disk", "off")
    with scripted(SCRIPT, *flags, home=tmp_path_factory.mktemp("home")) as running:
        yield running


def body(*messages: dict[str, Any]) -> dict[str, Any]:
    """What anyclaude sends: the SDK's body with its own changes."""
    properties = {"path": {"type": "string"}}
    function = {
        "name": "read",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": properties, "required": ["path"]},
        "strict": False,
    }
    return {
        "model": "current-model",
        "messages": [{"role": "system", "content": "Be brief. " * 60}, *messages],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens": 200,
        "parallel_tool_calls": False,
        "cache_prompt": True,
    }


def chunks(server: Served, sent: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a streamed reply, which ends as it should."""
    response = httpx.post(f"{server.url}/v1/chat/completions", json=sent, timeout=120)
    assert response.status_code == 200, response.text
    lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def test_the_wire_format_of_anyclaude_is_served(server: Served) -> None:
    """Calls come with an index, an id and a name first, then the arguments; usage comes last."""
    events = chunks(server, body({"role": "user", "content": QUESTION}))
    deltas = [one["choices"][0]["delta"] for one in events if one["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert [call["index"] for call in calls] == [0] * len(calls)
    assert calls[0]["type"] == "function"
    assert calls[0]["function"]["name"] == "read"
    assert json.loads("".join(call["function"].get("arguments", "") for call in calls)) == INPUT
    reasons = [one["choices"][0]["finish_reason"] for one in events if one["choices"]]
    assert [reason for reason in reasons if reason] == ["tool_calls"]
    assert events[-1]["choices"] == []
    said = {"role": "assistant", "content": "I look.\n"}
    said["tool_calls"] = [  # type: ignore[assignment] # as the SDK writes it: compact JSON
        {
            "id": calls[0]["id"],
            "type": "function",
            "function": {"name": "read", "arguments": json.dumps(INPUT, separators=(",", ":"))},
        }
    ]
    result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "alpha"}
    question = {"role": "user", "content": QUESTION}
    events = chunks(server, body(question, said, result))
    text = "".join(one["choices"][0]["delta"].get("content") or "" for one in events[:-1])
    assert text == "It says alpha."
    usage = events[-1]["usage"]
    assert usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"] < 64


def run(command: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )


def install(command: Sequence[str], folder: Path) -> None:
    done = run(command, folder)
    if done.returncode:
        pytest.skip(f"{Path(command[0]).name} cannot install here: {done.stderr[-200:]}")


def converse(server: Served, command: Sequence[str], folder: Path) -> tuple[list[Any], list[Any]]:
    """What a program prints of three turns, and their requests; each further one is warm."""
    api = Api(server)
    earlier = len(api.http.get("/v1/requests").json()["data"])
    done = run([*command, "Hello.", QUESTION, "Sum up."], folder)
    assert done.returncode == 0, done.stderr
    requests = api.http.get("/v1/requests").json()["data"][::-1][earlier:]
    assert [one["status"] for one in requests] == ["done"] * 4
    for before, now in pairwise(requests):
        check_turn(before, now)
    return [json.loads(line) for line in done.stdout.splitlines()], requests


@pytest.fixture(scope="module", params=NPM)
def packages(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the program and the real packages."""
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm here")
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package.json").write_text('{"private": true}')
    flags = ("--no-audit", "--no-fund", "--ignore-scripts")
    install([npm, "install", *flags, *NPM[request.param]], folder)
    shutil.copy(Path(__file__).with_name("aisdk.mjs"), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("api", ["chat", "responses", "compatible", "messages"])
def test_the_ai_sdk_reads_streamed_calls(server: Served, packages: Path, api: str) -> None:
    """Text, call and input as they were written, and the tokens that were reused."""
    command = ["node", "aisdk.mjs", f"{server.url}/v1", api]
    replies, requests = converse(server, command, packages)
    assert [one["cached"] or 0 for one in replies] == [one["cached_tokens"] for one in requests]
    _, first, second, _ = replies
    kinds = [part["type"] for part in first["parts"]]
    assert "error" not in kinds
    assert {"text-delta", "tool-input-start", "tool-input-delta", "tool-input-end"} <= set(kinds)
    (call,) = (part for part in first["parts"] if part["type"] == "tool-call")
    assert (call["toolName"], call["input"]) == ("read", INPUT)
    assert first["reason"] == "tool-calls"
    text = "".join(part["text"] for part in second["parts"] if part["type"] == "text-delta")
    assert (text, second["reason"]) == ("It says alpha.", "stop")


@pytest.fixture(scope="module", params=PIP)
def framework(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """A framework, and the Python that has it."""
    folder = tmp_path_factory.mktemp("pip")
    install([sys.executable, "-m", "venv", "."], folder)
    python = folder / "bin" / "python"
    install([str(python), "-m", "pip", "install", "-q", *PIP[request.param]], folder)
    return request.param, python


@pytest.mark.slow
def test_a_python_framework_calls_its_tool(server: Served, framework: tuple[str, Path]) -> None:
    name, python = framework
    program = str(Path(__file__).with_name("frameworks.py"))
    for api in APIS[name]:
        command = [str(python), program, server.url, name, api]
        replies, _ = converse(server, command, python.parent)
        assert replies == [SCRIPT[2][1], SCRIPT[1][1], SCRIPT[3][1]], api
