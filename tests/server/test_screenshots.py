"""Conversations about screenshots, as Claude Code and OpenAI's SDK hold them, stay warm.

Ten requests with five images: one that a person pastes, and four in results of tools. The server
is a process of `mlxcache serve`, started again after the sixth request. In the eleventh the client
has cleared an image of the history.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from tests.conftest import ToyMaker
from tests.muse.toy import picture
from tests.scripted import scripted
from tests.server.api import Api, words
from tests.server.recording import SPARE, check_turn

TOOL_PARTS = (
    "{{- '<|im_start|>user\\n<tool_response>\\n' + message.content -}}",
    """\
{{- '<|im_start|>user\\n<tool_response>\\n' -}}
{%- if message.content is string -%}{{- message.content -}}{%- else -%}
{%- for part in message.content -%}
{{- part.text if part.type == 'text' else '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- endfor -%}{%- endif -%}""",
)
MUSE_CALL = (
    """\
{{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' -}}
{%- if tool_call.arguments is string -%}{{- tool_call.arguments -}}
{%- else -%}{{- tool_call.arguments | tojson -}}{%- endif -%}
{{- '}\\n</tool_call>' -}}""",
    """\
{{- '<atem:function_calls><atem:invoke name="' + tool_call.name + '">' -}}
{%- for key, value in tool_call.arguments | items -%}
{{- '<atem:parameter name="' + key + '">' + value + '</atem:parameter>' -}}
{%- endfor -%}
{{- '</atem:invoke></atem:function_calls>' -}}""",
)
"""What is replaced in the template of a toy, and by what."""

VLM = ("qwen3_vl", "qwen3_5", "qwen4_exp")
"""Attention alone, with recurrent layers, and with an index of its own."""

CLEARED = "[Old tool result content cleared]"


def call(name: str, **arguments: str) -> str:
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


SCRIPT = [
    ("mock-up", "I look at the file first.\n" + call("Read", file_path="/work/page.html")),
    ("<html>", "Now the page as it is.\n" + call("screenshot", url="http://localhost:3000")),
    ("1280 x 720", "The title is too small.\n" + call("Edit", file_path="/work/page.html")),
    ("updated", "I look again.\n" + call("screenshot", url="http://localhost:3000")),
    ("^$", "Both are alike now, and the title has its size."),
    ("Sum it up", "The page is like the mock-up, in both themes."),
    ("And now", "Nothing is left."),
    ("dark", "I read the screenshot that you saved.\n" + call("Read", file_path="/tmp/dark.png")),
]
"""When a message matches, the reply to it."""


@dataclass(frozen=True)
class Shown:
    """What a client sends next: a text, the images behind it, and whether a tool made them."""

    text: str
    images: tuple[int, ...] = ()
    by_tool: bool = True


TURNS = (
    Shown("Make the page look like this mock-up. " + words(3, 40), (1,), by_tool=False),
    Shown("     1\t<html>\n     2\t<title>Page</title>\n" + words(4, 60)),
    Shown("Screenshot of 1280 x 720 pixels:", (2,)),
    Shown("The file /work/page.html has been updated."),
    Shown("", (3,)),
    Shown("Now the dark theme, please. " + words(5, 20), by_tool=False),
    Shown("", (4,)),
    Shown("And in dark it is readable? " + words(6, 10), by_tool=False),
    Shown("", (5,)),
    Shown("Thanks. Sum it up. " + words(7, 10), by_tool=False),
    Shown("And now? " + words(8, 10), by_tool=False),
    Shown("And now? " + words(9, 10), by_tool=False),
)
RESTART, TEN, DROPPED = 6, 10, 2
"""Requests before which the server starts again, and the client clears the image of another."""


def encoded(seed: int) -> str:
    return base64.b64encode(picture(seed, width=224, height=168)).decode()


@dataclass
class ClaudeCode:
    """Messages of Anthropic's API: images in tool results, streams, a changing header."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    last: Any = None

    def show(self, turn: Shown) -> None:
        texts = [{"type": "text", "text": turn.text}] if turn.text else []
        images = [
            {
                "type": "image",
                "source": {"type": "base64", "media_type": "image/png", "data": encoded(seed)},
            }
            for seed in turn.images
        ]
        content: list[dict[str, Any]] = [*texts, *images]
        if turn.by_tool:
            (use,) = (block for block in self.last if block["type"] == "tool_use")
            plain = turn.text if not images else content
            content = [{"type": "tool_result", "tool_use_id": use["id"], "content": plain}]
        self.messages.append({"role": "user", "content": content})

    def send(self, api: Api) -> str:
        client = anthropic.Anthropic(base_url=api.url, api_key="any", max_retries=0)
        tool = {"type": "object", "properties": {}, "additionalProperties": {"type": "string"}}
        noise = f"x-anthropic-billing-header: cch={len(self.messages):05x};"
        asked: dict[str, Any] = {
            "model": "claude-any",
            "max_tokens": 200,
            "system": [
                {"type": "text", "text": noise},
                {
                    "type": "text",
                    "text": "You are a coding agent. " + words(1, 150),
                    "cache_control": {"type": "ephemeral"},
                },
            ],
            "tools": [
                {"name": name, "description": f"Does {name}.", "input_schema": tool}
                for name in ("Read", "Edit", "screenshot")
            ],
            "messages": self.messages,
        }
        with client.messages.stream(**asked) as stream:
            reply = stream.get_final_message()
            id = stream.response.headers["x-mlxcache-request"]
        self.last = [block.model_dump(exclude_none=True) for block in reply.content]
        self.messages.append({"role": "assistant", "content": self.last})
        return str(id)

    def clear(self, turn: int) -> None:
        """Put the client's own words in place of what a tool returned, as it does with old ones."""
        (block,) = self.messages[2 * turn]["content"]
        block["content"] = CLEARED


@dataclass
class OpenAISdk:
    """Chat completions: images in messages of the role `tool`, and in a person's."""

    messages: list[dict[str, Any]] = field(default_factory=list)
    last: Any = None

    def show(self, turn: Shown) -> None:
        if not self.messages:
            text = "You are a coding agent. " + words(1, 150)
            self.messages.append({"role": "system", "content": text})
        parts: list[dict[str, Any]] = [{"type": "text", "text": turn.text}] if turn.text else []
        for seed in turn.images:
            url = f"data:image/png;base64,{encoded(seed)}"
            parts.append({"type": "image_url", "image_url": {"url": url, "detail": "high"}})
        message = {"role": "user", "content": parts if turn.images else turn.text}
        if turn.by_tool:
            (used,) = self.last["tool_calls"]
            message |= {"role": "tool", "tool_call_id": used["id"]}
        self.messages.append(message)

    def send(self, api: Api) -> str:
        client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="any", max_retries=0)
        parameters = {"type": "object", "additionalProperties": {"type": "string"}}
        tools: Any = [
            {"type": "function", "function": {"name": name, "parameters": parameters}}
            for name in ("Read", "Edit", "screenshot")
        ]
        messages: Any = self.messages
        made = client.chat.completions.with_raw_response.create(
            model="any", messages=messages, tools=tools, max_tokens=200
        )
        reply = made.parse().choices[0].message
        self.last = reply.model_dump(exclude_none=True, include={"role", "content", "tool_calls"})
        self.messages.append(self.last)
        return made.headers["x-mlxcache-request"]

    def clear(self, turn: int) -> None:
        """Put words in place of what a tool returned."""
        self.messages[2 * turn + 1]["content"] = CLEARED


Client = ClaudeCode | OpenAISdk


@pytest.fixture(params=["muse", *VLM])
def model(request: pytest.FixtureRequest, toy: ToyMaker, tmp_path: Path) -> Path:
    """A toy whose template writes calls as the model does.

    Those of mlx-vlm show images in results of tools, as Qwen's templates do.
    """
    muse = request.param == "muse"
    found = request.getfixturevalue("toy_muse") if muse else toy(request.param, images=True)
    made: Path = shutil.copytree(found, tmp_path / "model")
    file = made / "tokenizer_config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    for old, new in (MUSE_CALL,) if muse else (TOOL_PARTS,):
        assert old in fields["chat_template"]
        fields["chat_template"] = fields["chat_template"].replace(old, new)
    file.write_text(json.dumps(fields), encoding="utf-8")
    return made


def script(model: Path) -> list[tuple[str, str]]:
    """The replies, with calls as the family of the model writes them."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "muse_spark":
        return SCRIPT
    return [
        (when, re.sub(r"<tool_call>(.*?)</tool_call>", _muse_call, reply, flags=re.DOTALL))
        for when, reply in SCRIPT
    ]


def _muse_call(found: re.Match[str]) -> str:
    call = json.loads(found[1])
    arguments = "".join(
        f'<atem:parameter name="{key}">{value}</atem:parameter>'
        for key, value in call["arguments"].items()
    )
    invoked = f'<atem:invoke name="{call["name"]}">{arguments}</atem:invoke>'
    return f"<atem:function_calls>{invoked}</atem:function_calls>"


@pytest.mark.slow
@pytest.mark.parametrize("client", [ClaudeCode, OpenAISdk])
def test_every_turn_feeds_what_is_new_in_it(model, client, tmp_path):
    """Also behind images, and when the server was started again in between.

    An image that the client drops at the end costs what is behind it, and nothing a turn later.
    """
    flags = ("--model", str(model), "--trust-remote-code", "--ram", "300MB", "--disk", "1GB")
    start = partial(scripted, script(model), *flags, "--prefill-chunk", "64", home=tmp_path)
    talk, done = client(), []
    for turns in (TURNS[:RESTART], TURNS[RESTART:]):
        with start() as server:
            api = Api(server)
            for turn in turns:
                if turn is TURNS[TEN]:
                    talk.clear(DROPPED)
                talk.show(turn)
                done.append(api.finished(talk.send(api)))
            assert server.stop() == 0
    before, dropped = done[DROPPED - 1], done.pop(TEN)
    for one, now in pairwise(done[:TEN]):
        check_turn(one, now)
        assert not (now["lost"] or {}).get("lost_tokens"), now
    assert done[RESTART]["restored_tokens"] > done[RESTART - 1]["prompt_tokens"]
    until_image = before["prompt_tokens"] + before["generated_tokens"]
    assert until_image - SPARE <= dropped["cached_tokens"] < until_image + SPARE
    assert dropped["lost"]["at_token"] >= until_image - SPARE
    (last,) = done[TEN:]
    check_turn(dropped, last)
