"""`mlxcache explain` on pairs of requests with the changes that real clients make."""

from __future__ import annotations

import copy
import importlib
import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from mlxcache.cli.main import app
from mlxcache.config import Settings
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.wire.chat_bodies import request_to_chat
from tests.prompt import kinds, templates

command = importlib.import_module("mlxcache.cli.explain")
"""The module: the attribute of the package may be the function of the same name."""

Body = dict[str, Any]

_WORDS = (
    "the file path tool command agent session cache prefix model server request response value "
    "read write edit search run test build check result output input message history state"
)
WORDS = _WORDS.split()


def text(size: int, seed: str) -> str:
    rng = random.Random(seed)
    lines = [" ".join(rng.choice(WORDS) for _ in range(9)).capitalize() + "." for _ in range(size)]
    return "\n".join(lines)


def tool(name: str) -> Body:
    # a property may have any name, also that of a key of the API's
    properties = {"path": {"type": "string"}, "type": {"type": "string"}}
    schema = {"type": "object", "properties": properties, "required": ["path"]}
    return {"name": name, "description": text(6, name), "input_schema": schema}


HEAD = [
    "x-anthropic-billing-header: cc_version=2.1.329.0a8; cc_entrypoint=cli; cch=36ee5;",
    "You are an interactive agent.",
    text(20, "system")
    + "\nToday's date is 2026-11-21.\nWorking in /Users/me/café.\n"
    + "Session id: 7a1b0c6e-1111-4222-8333-944455556666\nRequests so far: 17\n\n"
    + "gitStatus: This is the status at the start.\n"
    + "Current branch: main\n\nStatus:\n M server.py\n?? notes.md\n\nRecent commits:\n"
    + "1a2b3c4 Add a reader\n\n"
    + text(20, "more"),
]


def first() -> Body:
    """A request of Anthropic's API with tools, thinking, a call and its result."""
    call = {"type": "tool_use", "id": "toolu_01", "name": "Read", "input": {"path": "a.py", "n": 1}}
    thought = {"type": "thinking", "thinking": "I should read it. " + text(4, "t"), "signature": ""}
    result = {"type": "tool_result", "tool_use_id": "toolu_01", "content": text(12, "result")}
    reminder = f"<system-reminder>\n{text(8, 'claude.md')}\n</system-reminder>"
    asked = [{"type": "text", "text": reminder}, {"type": "text", "text": "Fix the parser."}]
    mark = {"cache_control": {"type": "ephemeral"}}
    return {
        "model": "claude-opus-4-8",
        "max_tokens": 1000,
        "system": [{"type": "text", "text": part} for part in HEAD],
        "tools": [tool(name) for name in ("Bash", "Edit", "Read", "Write")],
        "messages": [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": [thought, call]},
            {"role": "user", "content": [result]},
            {"role": "assistant", "content": [{"type": "text", "text": text(8, "reply")}]},
            {"role": "user", "content": [{"type": "text", "text": "And the lexer?", **mark}]},
        ],
    }


def following(body: Body) -> Body:
    """The next turn: the same messages, a reply and a new message."""
    after = copy.deepcopy(body)
    after["messages"].append({"role": "assistant", "content": [{"type": "text", "text": "Done."}]})
    after["messages"].append({"role": "user", "content": "Now write the tests for both of them."})
    return after


def as_openai(body: Body) -> Body:
    """Convert a body of Anthropic's API to OpenAI's format."""
    made = {k: v for k, v in body.items() if k not in ("system", "tools", "messages")}
    parts = [{"type": "text", "text": block["text"]} for block in body["system"]]
    made["messages"] = [{"role": "system", "content": parts}]
    for message in body["messages"]:
        made["messages"] += list(_messages(message["role"], message["content"]))
    made["tools"] = [
        {
            "type": "function",
            "function": {
                "name": one["name"],
                "description": one["description"],
                "parameters": one["input_schema"],
            },
        }
        for one in body["tools"]
    ]
    return made


def _messages(role: str, content: str | list[Body]) -> list[Body]:
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    kinds: dict[str, list[Body]] = {}
    for block in content:
        kinds.setdefault(block["type"], []).append(block)
    if role == "assistant":
        message: Body = {
            "role": role,
            "content": "".join(b["text"] for b in kinds.get("text", ())) or None,
        }
        for block in kinds.get("thinking", ()):
            message["reasoning_content"] = block["thinking"]
        calls = [
            {
                "id": b["id"],
                "type": "function",
                "function": {"name": b["name"], "arguments": json.dumps(b["input"])},
            }
            for b in kinds.get("tool_use", ())
        ]
        return [{**message, "tool_calls": calls} if calls else message]
    results = [
        {"role": "tool", "tool_call_id": b["tool_use_id"], "content": b["content"]}
        for b in kinds.get("tool_result", ())
    ]
    rest = [
        {"type": "text", "text": b["text"]}
        if b["type"] == "text"
        else {"type": "image_url", "image_url": {"url": b["source"]["data"]}}
        for b in content
        if b["type"] != "tool_result"
    ]
    return [*results, *([{"role": role, "content": rest}] if rest else [])]


def openai() -> Body:
    """The same request in OpenAI's format, without thinking."""
    body = first()
    body["messages"][1]["content"].pop(0)
    return as_openai(body)


TEMPLATE = (
    "{{- '<|im_start|>system\nReasoning: ' + (reasoning_effort or 'low') + '<|im_end|>\n' -}}"
    + templates.chatml(keep="true")
)


@lru_cache(maxsize=2)
def tokenizer() -> kinds.Wrapped:
    return kinds.tokenizer("byte_level", TEMPLATE)


RAW = Settings(no_canonicalise=True)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small tokenizer, with a template that keeps thinking."""
    monkeypatch.setattr(
        command, "make_builder", lambda given: PromptBuilder(tokenizer(), rules=given.rules)
    )


@dataclass(frozen=True)
class Pair:
    """A change to a request's next turn, and what `explain` must report.

    `change` edits the second request. `shows`: texts in the earlier and the later excerpt. `where`:
    the part of the request that is named.
    """

    name: str
    reason: str | None
    cause: str | None
    where: str
    change: Callable[[Body], None]
    shows: tuple[str, str] = ("", "")
    base: Callable[[], Body] = first

    def __str__(self) -> str:
        return self.name


def head(index: int, old: str, new: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        block = body["system"][index]
        assert old in block["text"]
        block["text"] = block["text"].replace(old, new)

    return change


def said(index: int, edit: Callable[[str], str]) -> Callable[[Body], None]:
    """Edit the last text of a message."""

    def change(body: Body) -> None:
        content = body["messages"][index]["content"]
        if isinstance(content, str):
            body["messages"][index]["content"] = edit(content)
            return
        key = "content" if content[-1]["type"] == "tool_result" else "text"
        content[-1][key] = edit(content[-1][key])

    return change


def reminded(edit: Callable[[str], str]) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        block = body["messages"][0]["content"][0]
        block["text"] = edit(block["text"])

    return change


def tools(edit: Callable[[list[Body]], list[Body]]) -> Callable[[Body], None]:
    return lambda body: body.update(tools=edit(body["tools"]))


def described(old: list[Body]) -> list[Body]:
    return [old[0], {**old[1], "description": old[1]["description"] + " Carefully."}, *old[2:]]


def unthinking(body: Body) -> None:
    body["messages"][1]["content"].pop(0)


def inserted(body: Body) -> None:
    body["messages"].insert(3, {"role": "system", "content": "The task tools were not used."})


def counted(body: Body) -> None:
    counter = "<total_tokens>180000 tokens left</total_tokens>"
    body["messages"].insert(3, {"role": "system", "content": counter})


def dropped(body: Body) -> None:
    del body["messages"][3]


def compacted(body: Body) -> None:
    summary = "This session is being continued from a previous conversation. " + text(9, "summary")
    body["messages"] = [{"role": "user", "content": summary}]


def compacted_in_part(body: Body) -> None:
    summary = "This session is being continued from a previous conversation. " + text(9, "summary")
    body["messages"] = [{"role": "user", "content": summary}, *body["messages"][-2:]]


def marked(body: Body) -> None:
    del body["messages"][4]["content"][0]["cache_control"]
    body["messages"][-1]["content"] = [
        {"type": "text", "text": "Now write the tests.", "cache_control": {"type": "ephemeral"}}
    ]
    body["system"][2]["cache_control"] = {"type": "ephemeral"}


def as_strings(body: Body) -> None:
    body["messages"][3]["content"] = body["messages"][3]["content"][0]["text"]
    body["messages"][4]["content"] = body["messages"][4]["content"][0]["text"]


def reserialised(body: Body) -> None:
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"path":"a.py",\n "n":1}'


def argued(body: Body) -> None:
    body["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"path": "b.py", "n": 1}'


def image(data: str) -> Callable[[Body], None]:
    def change(body: Body) -> None:
        source = {"type": "base64", "media_type": "image/png", "data": data}
        body["messages"][0]["content"].insert(1, {"type": "image", "source": source})

    return change


def with_image() -> Body:
    body = first()
    image("aaaa")(body)
    return body


def other_image(body: Body) -> None:
    body["messages"][0]["content"].pop(1)
    image("bbbb")(body)


SYSTEM, TOOLS, EDITED = "system_changed", "tools_changed", "edited"
PAIRS = [
    Pair(
        "attribution",
        SYSTEM,
        "attribution",
        "system",
        head(0, "36ee5", "9a001"),
        ("36ee5", "9a001"),
    ),
    Pair("attribution, another version", SYSTEM, "attribution", "system", head(0, "0a8", "1b9")),
    Pair("attribution left out", SYSTEM, "attribution", "system", lambda b: b["system"].pop(0)),
    Pair("date", SYSTEM, "date", "system", head(2, "2026-11-21", "2026-11-22"), ("-21", "-22")),
    Pair("uuid", SYSTEM, "uuid", "system", head(2, "7a1b0c6e", "0c6e7a1b"), ("7a1b", "0c6e")),
    Pair("counter", SYSTEM, "counter", "system", head(2, "so far: 17", "so far: 18"), ("17", "18")),
    Pair("git branch", SYSTEM, "git_status", "system", head(2, "branch: main", "branch: next")),
    Pair("git status", SYSTEM, "git_status", "system", head(2, " M server.py", " M client.py")),
    Pair("git status grows", SYSTEM, "git_status", "system", head(2, "?? notes", "?? a\n?? notes")),
    Pair("git commits", SYSTEM, "git_status", "system", head(2, "1a2b3c4 Add", "77ee001 Fix")),
    Pair(
        "system line", SYSTEM, "text", "system", head(1, "interactive", "helpful"), ("int", "hel")
    ),
    Pair("unicode", SYSTEM, "unicode_normalisation", "system", head(2, "café", "cafe\u0301")),
    Pair("trailing space", SYSTEM, "whitespace", "system", head(1, "agent.", "agent. ")),
    Pair("line ends", SYSTEM, "line_endings", "system", head(2, ".\n", ".\r\n")),
    Pair(
        "tool inserted",
        TOOLS,
        "tool_inserted",
        "tools[2] Grep",
        tools(lambda old: [*old[:2], tool("Grep"), *old[2:]]),
        ("Read", "Grep"),
    ),
    Pair(
        "tool removed",
        TOOLS,
        "tool_removed",
        "tools[1] Read",
        tools(lambda old: [old[0], *old[2:]]),
        ("Edit", "Read"),
    ),
    Pair(
        "tool appended",
        TOOLS,
        "tool_inserted",
        "tools[4] Zap",
        tools(lambda old: [*old, tool("Zap")]),
    ),
    Pair(
        "tool reordered",
        TOOLS,
        "tool_reordered",
        "tools[0] Edit",
        tools(lambda old: [old[1], old[0], *old[2:]]),
    ),
    Pair("tool described", TOOLS, "tool_changed", "tools[1] Edit", tools(described)),
    Pair(
        "one character",
        EDITED,
        "text",
        "messages[4] assistant",
        said(3, lambda t: t[:90] + ("#" if t[90] != "#" else "!") + t[91:]),
        ("", "#"),
    ),
    Pair("tool result", EDITED, "text", "messages[3] tool", said(2, lambda t: "New. " + t)),
    Pair(
        "result cleared",
        EDITED,
        "tool_result_cleared",
        "messages[3] tool",
        said(2, lambda t: "[Old tool result content cleared]"),
    ),
    Pair(
        "reminder",
        EDITED,
        "date",
        "messages[1] user",
        reminded(lambda t: t.replace("</", "Today's date is 2026-11-22.\n</")),
    ),
    Pair("thinking stripped", EDITED, "thinking_dropped", "messages[2] assistant", unthinking),
    Pair("message inserted", EDITED, "message_inserted", "messages[4] system", inserted),
    Pair("counter inserted", EDITED, "counter", "messages[4] system", counted),
    Pair("message dropped", EDITED, "message_dropped", "messages[4] user", dropped),
    Pair("compaction", EDITED, "compaction", "messages[1] user", compacted),
    Pair("compaction in part", EDITED, "compaction", "messages[1] user", compacted_in_part),
    Pair(
        "template arguments",
        "template_drift",
        "template_args",
        "template arguments",
        lambda b: b.update(reasoning_effort="high"),
        base=openai,
    ),
    Pair("image", EDITED, "image", "messages[1] user", other_image, base=with_image),
    Pair("call's arguments", EDITED, "tool_calls", "messages[2] assistant", argued, base=openai),
    Pair("next turn", None, None, "", lambda b: None),
    Pair("next turn, OpenAI", None, None, "", lambda b: None, base=openai),
    Pair("cache_control moved", None, None, "", marked),
    Pair("strings for lists", None, None, "", as_strings),
    Pair("arguments written anew", None, None, "", reserialised, base=openai),
    Pair(
        "model and limits", None, None, "", lambda b: b.update(model="m", max_tokens=7, stream=True)
    ),
    Pair("thinking disabled", None, None, "", lambda b: b.update(thinking={"type": "disabled"})),
]


def reordered(body: Body) -> None:
    body["tools"].reverse()


REMOVED = [
    ("attribution", "attribution", head(0, "36ee5", "9a001")),
    ("counter", "counter", counted),
    ("tool_order", "tool_reordered", reordered),
    (
        "cleared_results",
        "tool_result_cleared",
        said(2, lambda t: "[Old tool result content cleared]"),
    ),
    ("git_status", "git_status", head(2, " M server.py", " M client.py")),
]


@pytest.mark.parametrize(("rule", "cause", "change"), REMOVED, ids=[r for r, _, _ in REMOVED])
def test_text_that_a_rule_removes_is_not_lost(rule, cause, change):
    one = first()
    other = following(one)
    change(other)
    found = command.explain_pair(one, other, Settings(canonicalise={"git_status": True}))
    assert found["lost"] is None
    assert [(r["rule"], r["cause"]) for r in found["removed"]] == [(rule, cause)]


def test_the_audit_lists_text_that_a_rule_removes():
    found = command.audit_one(first(), Settings())["data"]
    removed = [one for one in found if one["rule"]]
    assert [one["rule"] for one in removed] == ["attribution"]
    assert removed[0]["tokens_behind"] == 0
    assert {one["cause"] for one in found if not one["rule"]} >= {"date", "counter", "git_status"}


def run(*arguments: str) -> tuple[int, str]:
    """Run the command without canonicalisation; returns its exit status and output."""
    if arguments[0].endswith("a.json"):
        arguments = (*arguments, "--no-canonicalise")
    done = CliRunner().invoke(app, ["explain", *arguments])
    return done.exit_code, done.output


@pytest.fixture
def files(tmp_path):
    """Two files with requests that differ in their attribution line."""
    one = first()
    other = following(one)
    head(0, "36ee5", "9a001")(other)
    paths = []
    for name, body in (("a.json", one), ("b.json", other)):
        (tmp_path / name).write_text(json.dumps(body))
        paths.append(str(tmp_path / name))
    return paths


def test_the_text_of_a_pair_has_place_cause_and_advice(files):
    status, output = run(*files)
    assert status == 0
    assert "attribution" in output
    assert "36ee5" in output
    assert "9a001" in output
    assert "CLAUDE_CODE_ATTRIBUTION_HEADER=0" in output
    assert "estimate" in output
    assert max(map(len, output.splitlines())) <= 80


def test_the_text_of_two_conversations_says_that_nothing_is_lost(files, tmp_path):
    other = {"messages": [{"role": "user", "content": "Write a title."}], "system": "A titler."}
    (tmp_path / "c.json").write_text(json.dumps(other))
    status, output = run(files[0], str(tmp_path / "c.json"))
    assert status == 0
    assert "Nothing is lost." in output
    assert "begins another conversation" in output
    assert "tools[0] Bash" in output
    assert "to do" not in output


def test_the_text_of_an_audit_has_what_is_likely_to_change(files):
    status, output = run(files[0])
    assert status == 0
    for cause in ("attribution", "date", "uuid", "counter", "git_status"):
        assert cause in output
    assert "tokens behind it" in output
    assert max(map(len, output.splitlines())) <= 80


PICTURE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "eA=="}}
OTHER_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,eQ=="}}


@pytest.mark.parametrize("picture", [PICTURE, OTHER_PICTURE], ids=["anthropic", "openai"])
def test_images_are_counted_and_compared_by_their_content(tmp_path, picture):
    """Also in the result of a tool; a changed one is a cause of its own."""
    changed = json.loads(json.dumps(picture).replace("eA==", "eg==").replace("eQ==", "eg=="))
    paths = []
    for name, first in (("a.json", picture), ("b.json", changed)):
        said = [{"type": "text", "text": "Look at both."}, first, picture]
        body = {"messages": [{"role": "user", "content": said}]}
        (tmp_path / name).write_text(json.dumps(body))
        paths.append(str(tmp_path / name))
    status, output = run(*paths, "--json")
    found = json.loads(output)
    assert (status, found["images"]) == (0, {"first": 2, "second": 2})
    assert found["lost"]["cause"] == "image"
    status, output = run(paths[0])
    assert status == 0
    assert "2 images: each counts as a line of text here;" in output
    assert max(map(len, output.splitlines())) <= 80


@pytest.mark.parametrize(
    ("model", "backend", "sees"),
    [("toy_llama", "mlx-lm", False), ("toy_muse", "mlx-lm", True), (None, "mlx-lm", False)],
)
def test_the_library_and_whether_the_model_takes_images_are_told(
    tmp_path, request, model, backend, sees
):
    """A request that the server would refuse is named; the demo stands for any model."""
    body = {"messages": [{"role": "user", "content": [{"type": "text", "text": "Look."}, PICTURE]}]}
    (tmp_path / "a.json").write_text(json.dumps(body))
    flags = ("--model", str(request.getfixturevalue(model))) if model else ()
    status, output = run(str(tmp_path / "a.json"), "--json", *flags)
    found = json.loads(output)
    assert (status, found["backend"], found["takes_images"]) == (0, backend, sees)
    status, output = run(str(tmp_path / "a.json"), *flags)
    assert status == 0
    assert ("This model takes no images" in output) == (model == "toy_llama")
    assert "mlx-vlm" not in output


@pytest.mark.parametrize(("family", "sees"), [("qwen3_vl", True), ("minimax_m3", False)])
def test_a_model_of_mlx_vlm_is_named(files, toy, family, sees):
    made = toy(family, images=True) if sees else toy(family)
    status, output = run(*files, "--model", str(made), "--json")
    found = json.loads(output)
    assert (status, found["backend"], found["takes_images"]) == (0, "mlx-vlm", sees)
    status, output = run(*files, "--model", str(made))
    assert status == 0
    assert "The model is run by mlx-vlm." in output
    assert max(map(len, output.splitlines())) <= 80


def test_a_model_that_is_not_here_is_not_described(files):
    status, output = run(*files, "--json", "--model", "org/absent")
    found = json.loads(output)
    assert (status, found["backend"], found["takes_images"]) == (0, None, None)


def test_json_is_printed_on_request(files):
    """Its names are those of a request's `lost`."""
    status, output = run(*files, "--json")
    assert status == 0
    found = json.loads(output)
    assert found["lost"]["cause"] == "attribution"
    assert found["estimated"] is True
    status, output = run(files[0], "--json")
    assert {one["cause"] for one in json.loads(output)["data"]} >= {"attribution", "uuid"}


def test_of_several_models_the_one_is_used_that_serves_the_request(files, tmp_path, monkeypatch):
    """By the request's model name and the routes; --model chooses another one."""
    config = tmp_path / "c.toml"
    tables = '[models.large]\npath = "org/large"\n[models.small]\npath = "org/small"\n'
    config.write_text(f'route = "claude-*=small"\n{tables}')
    monkeypatch.setenv("MLXCACHE_CONFIG", str(config))
    for arguments, expected in (
        ((), "org/small"),
        (("--model", "large"), "org/large"),
        (("--model", "org/other"), "org/other"),
    ):
        for given in (files, files[:1]):
            status, output = run(*given, "--json", *arguments)
            assert (status, json.loads(output)["model"]) == (0, expected)


def test_a_continued_response_needs_its_server(tmp_path):
    """Its body has only the new items, so without a server it cannot be explained."""
    file = tmp_path / "new.json"
    file.write_text(json.dumps({"input": "And then?", "previous_response_id": "resp_1"}))
    status, output = run(str(file), "--url", "http://127.0.0.1:9")
    assert status == 1
    told = " ".join(output.split())
    assert "only its new items: it continues the response resp_1" in told
    assert "No mlxcache server answers at http://127.0.0.1:9" in told


@pytest.mark.parametrize(
    ("session", "explained"),
    [(None, ["req_3"]), ("ses_a", ["req_2", "req_1"]), ("ses_b", ["req_3"]), ("ses_c", [])],
)
def test_the_losses_of_a_session_or_the_last_of_all_are_explained(session, explained, capsys):
    """A request has the session's label until the session has an id."""
    lost = {"at_token": 20, "reason": "evicted", "cause": "memory", "where": "", "lost_tokens": 9}
    lost |= {"before": "", "after": "", "advice": "raise --ram"}
    senders = (
        *(("req_4", "ses_a", None), ("req_3", "label", lost)),
        *(("req_2", "ses_a", lost), ("req_1", "ses_a", lost)),
    )
    requests = [
        {"id": id, "session": by, "lost": one, "prompt_tokens": 40, "created_at": 0.0}
        for id, by, one in senders
    ]
    labels = {"ses_a": None, "ses_b": "label", "ses_c": None}
    server = SimpleNamespace(
        requests=lambda limit: requests, session=lambda id: {"label": labels[id]}
    )
    command.explain_losses(server, session).print(as_json=False)
    output = capsys.readouterr().out
    assert re.findall("req_[0-9]", output) == explained
    assert ("raise --ram" in output) == bool(explained)
    assert ("Nothing was lost" in output) == (not explained)


def test_the_demo_needs_no_server_and_no_weights():
    """It is used if no model is given."""
    from mlxcache.model.load import tokenizer_of

    prompt = PromptBuilder(tokenizer_of(None)).chat(request_to_chat(first()))
    assert prompt.tokenised.text.startswith("<|im_start|>system\n")


def test_a_missing_model_is_an_error(files, monkeypatch):
    """The exit status is 1."""
    monkeypatch.undo()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    status, output = run(*files, "--model", "./no/such/folder")
    assert status == 1
    assert "./no/such/folder is neither an existing folder nor a Hub id" in output
