"""Structured output by the SDKs of both APIs, on a model of random weights."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel, Field

from tests.server.api import CHAT, MESSAGES, Api, events, user, words


class Step(BaseModel):
    """A value whose string ends where the model writes a quote."""

    action: Literal["read", "write", "run"]
    path: str
    sure: bool


class Plan(BaseModel):
    risk: Literal["low", "high"]
    steps: list[Step] = Field(min_length=1, max_length=2)
    note: Literal["none"] | None


ASKED: Any = [user("Say what you would do. " + words(7, 20))]
TITLE: dict[str, Any] = {
    "model": "claude-haiku-4-5-20251001",
    "max_tokens": 32000,
    "stream": True,
    "temperature": 1,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.0;"},
        {"type": "text", "text": "You are Claude Code, Anthropic's official CLI for Claude."},
        {
            "type": "text",
            "text": "Write a title of 3 to 7 words for this coding session. Return JSON with a "
            'single "title" field.',
        },
    ],
    "messages": [{"role": "user", "content": [{"type": "text", "text": "Fix the login button"}]}],
    "tools": [],
    "metadata": {"user_id": '{"device_id": "d", "account_uuid": "", "session_id": "s"}'},
    "output_config": {
        "format": {
            "type": "json_schema",
            "schema": {
                "type": "object",
                "properties": {"title": {"type": "string"}},
                "required": ["title"],
                "additionalProperties": False,
            },
        }
    },
}
"""Claude Code's request for a title, in the shape that 2.1.197 sends."""


class TestOpenAI:
    def test_parse_returns_the_model_that_was_asked_for_and_a_stream_the_same(self, sdk):
        whole = sdk.chat.completions.parse(
            model="any", messages=ASKED, response_format=Plan, seed=4
        )
        assert whole.choices[0].finish_reason == "stop"
        assert isinstance(whole.choices[0].message.parsed, Plan)
        with sdk.chat.completions.stream(
            model="any", messages=ASKED, response_format=Plan, seed=4
        ) as stream:
            kinds = {event.type for event in stream}
            built = stream.get_final_completion()
        assert "content.delta" in kinds
        assert built.choices[0].message.parsed == whole.choices[0].message.parsed

    def test_another_format_finds_the_same_prefix(self, quoting: Api) -> None:
        asked = [user(words(8, 60))]
        quoting.chat(asked, response_format={"type": "json_object"})
        again = quoting.chat(asked, structured_outputs={"choice": ["yes", "no"]})
        free = quoting.chat(asked)
        assert again.text in ("yes", "no")
        assert again.fed == free.fed == 1

    def test_each_of_several_choices_follows_the_format(self, sdk: openai.OpenAI) -> None:
        form = {"structured_outputs": {"regex": "[a-z]{20}"}}
        reply = sdk.chat.completions.create(model="any", messages=ASKED, n=3, extra_body=form)
        texts = [choice.message.content or "" for choice in reply.choices]
        assert all(len(text) == 20 and text.islower() for text in texts)
        assert len(set(texts)) == 3

    def test_a_text_completion_follows_its_format(self, sdk: openai.OpenAI) -> None:
        form = {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}}
        reply = sdk.completions.create(model="any", prompt="Once", extra_body=form)
        letters, digits = reply.choices[0].text.split("-")
        assert set(letters) <= set("abc")
        assert digits.isdecimal()

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_schema_that_cannot_be_followed_is_refused_before_the_headers(self, sdk, stream):
        schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
        form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError, match="not") as raised:
            sdk.chat.completions.create(
                model="any", messages=ASKED, response_format=form, stream=stream
            )
        assert raised.value.param == "response_format.json_schema.schema"
        assert "properties" in raised.value.message


class TestAnthropic:
    def test_parse_returns_the_model_that_was_asked_for(self, claude: anthropic.Anthropic) -> None:
        reply = claude.messages.parse(
            model="any", max_tokens=4000, messages=ASKED, output_format=Step
        )
        assert reply.stop_reason == "end_turn"
        assert isinstance(reply.parsed_output, Step)

    def test_a_title_for_claude_code(self, quoting: Api) -> None:
        """Its request is answered, with a title in JSON."""
        query = f"{MESSAGES}?beta=true"
        beta = "claude-code-20250219,structured-outputs-2025-12-15"
        with quoting.http.stream(
            "POST", query, json=TITLE, headers={"anthropic-beta": beta}
        ) as response:
            assert response.status_code == 200
            data = [event for _, event in events(response)]
        text = "".join(event["delta"].get("text", "") for event in data if "delta" in event)
        assert list(json.loads(text)) == ["title"]
        ends = [event["delta"] for event in data if event["type"] == "message_delta"]
        assert ends[0]["stop_reason"] == "end_turn"

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_schema_that_cannot_be_followed_is_refused_before_the_headers(self, claude, stream):
        schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
        form: Any = {"format": {"type": "json_schema", "schema": schema}}
        with pytest.raises(anthropic.BadRequestError, match=r"properties.*not"):
            claude.messages.create(
                model="any", max_tokens=9, messages=ASKED, output_config=form, stream=stream
            )


def test_a_reply_that_was_cut_says_so(quoting: Api) -> None:
    """In a format as without one."""
    body = {"messages": ASKED, "max_tokens": 3, "guided_json": Step.model_json_schema()}
    assert quoting.post(CHAT, body).json()["choices"][0]["finish_reason"] == "length"
    cut = {"model": "any", **TITLE, "max_tokens": 3, "stream": False}
    assert quoting.post(MESSAGES, cut).json()["stop_reason"] == "max_tokens"
