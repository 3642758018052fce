"""Forced tool calls by the SDKs of both APIs, on models of random weights."""

from __future__ import annotations

import json
from typing import Any, Literal

import anthropic
import openai
import pytest
from pydantic import BaseModel

from tests.server.api import MESSAGES, Api, user, words


class Turn(BaseModel):
    to: Literal["left", "right"]
    fast: bool


class Note(BaseModel):
    """A text that ends where the model writes a quote."""

    text: str
    tags: list[Literal["a", "b"]]


ASKED: Any = [user("Say what you would do. " + words(7, 20))]
FORCED: Any = {"type": "tool", "name": "turn", "disable_parallel_tool_use": True}
TURN_SCHEMA = Turn.model_json_schema()
TOOLS = [openai.pydantic_function_tool(Turn), openai.pydantic_function_tool(Note)]


class TestOpenAI:
    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("choice", "name", "reason"),
        [
            ({"type": "function", "function": {"name": "Turn"}}, "Turn", "stop"),
            ("required", None, "tool_calls"),
            (
                {
                    "type": "allowed_tools",
                    "allowed_tools": {
                        "mode": "required",
                        "tools": [{"type": "function", "function": {"name": "Turn"}}],
                    },
                },
                "Turn",
                "tool_calls",
            ),
        ],
    )
    def test_a_forced_call_has_arguments_that_the_sdk_parses(
        self, sdk: openai.OpenAI, choice: Any, name: str | None, reason: str, stream: bool
    ) -> None:
        asked: dict[str, Any] = {
            "model": "any",
            "messages": ASKED,
            "tools": TOOLS,
            "tool_choice": choice,
            "parallel_tool_calls": False,
            "seed": 5,
        }
        if stream:
            with sdk.chat.completions.stream(**asked) as running:
                reply: Any = running.get_final_completion()
        else:
            reply = sdk.chat.completions.parse(**asked)
        (call,) = reply.choices[0].message.tool_calls
        assert isinstance(call.function.parsed_arguments, Turn if name else Turn | Note)
        assert reply.choices[0].finish_reason == reason
        assert not (reply.choices[0].message.content or "").strip()

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_schema_that_cannot_be_followed_is_refused_before_the_headers(self, sdk, stream):
        """By the tool's name, the keyword and its place."""
        schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
        tool: Any = {"type": "function", "function": {"name": "Bad", "parameters": schema}}
        with pytest.raises(openai.BadRequestError, match="`not`") as raised:
            sdk.chat.completions.create(
                model="any", messages=ASKED, tools=[tool], tool_choice="required", stream=stream
            )
        assert '"Bad"' in raised.value.message
        assert "/properties/a" in raised.value.message
        assert raised.value.param == "tools"

    def test_a_format_beside_tools_is_that_of_the_text(self, sdk: openai.OpenAI) -> None:
        """Where the model may choose, it answers in the format or calls with valid arguments."""
        form = {"structured_outputs": {"choice": ["yes", "no"]}}
        for seed in range(4):
            reply = sdk.chat.completions.create(
                model="any",
                messages=ASKED,
                tools=TOOLS,
                parallel_tool_calls=False,
                seed=seed,
                extra_body=form,
            )
            message = reply.choices[0].message
            assert message.tool_calls or message.content in ("yes", "no")


class TestAnthropic:
    def test_a_tool_runner_runs_to_its_end(self, claude: anthropic.Anthropic) -> None:
        """The first turn is forced to call; the next, which is not, answers."""
        turns: list[tuple[str, bool]] = []

        @anthropic.beta_tool
        def turn(to: Literal["left", "right"], fast: bool) -> str:
            """Turn the car."""
            turns.append((to, fast))
            return "turned"

        runner = claude.beta.messages.tool_runner(
            model="any",
            max_tokens=400,
            messages=ASKED,
            tools=[turn],
            tool_choice=FORCED,
        )
        replies = []
        for message in runner:
            replies.append(message)
            runner.set_messages_params(lambda params: params | {"tool_choice": {"type": "none"}})
        assert [message.stop_reason for message in replies] == ["tool_use", "end_turn"]
        assert [message.content[-1].type for message in replies] == ["tool_use", "text"]
        assert len(turns) == 1
        assert turns[0][0] in ("left", "right")
        assert isinstance(turns[0][1], bool)
        usage = replies[1].usage
        assert usage.input_tokens <= 64
        assert (usage.cache_read_input_tokens or 0) > usage.input_tokens

    @pytest.mark.parametrize(
        "choice", [{"type": "any"}, {"type": "tool", "name": "turn"}], ids=["any", "tool"]
    )
    def test_streamed_arguments_add_up_to_the_input(self, claude, choice):
        asked: dict[str, Any] = {
            "model": "any",
            "max_tokens": 400,
            "messages": ASKED,
            "tools": [{"name": "turn", "input_schema": TURN_SCHEMA, "strict": True}],
            "tool_choice": choice | {"disable_parallel_tool_use": True},
        }
        pieces = []
        with claude.messages.stream(**asked) as stream:
            for event in stream:
                if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    pieces.append(event.delta.partial_json)
            built = stream.get_final_message()
        (block,) = built.content
        assert block.type == "tool_use"
        assert json.loads("".join(pieces)) == block.input
        assert Turn.model_validate(block.input)
        assert built.stop_reason == "tool_use"


def test_thinking_comes_before_a_format_and_before_a_forced_call(thinking: Api) -> None:
    """It is free, and what follows it is whole and valid."""
    form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    body = {
        "model": "any",
        "max_tokens": 400,
        "messages": ASKED,
        "temperature": 0,
        "output_config": {"format": form},
    }
    content = thinking.post(MESSAGES, body).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "text"]
    assert json.loads(content[1]["text"]) in ("yes", "no")
    tool = {"name": "turn", "input_schema": TURN_SCHEMA}
    forced = {"tools": [tool], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    content = thinking.post(MESSAGES, body | {"output_config": {}} | forced).json()["content"]
    assert [block["type"] for block in content] == ["thinking", "tool_use"]
    assert Turn.model_validate(content[1]["input"])
