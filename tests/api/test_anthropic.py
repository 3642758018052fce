"""Anthropic's endpoints, through Anthropic's SDK and as raw events."""

from __future__ import annotations

import asyncio
import json
from operator import attrgetter
from typing import Any

import anthropic
import httpx
import pytest

from mlxcache.types import (
    DEFAULTED,
    WARMING,
    OutputFormat,
    Text,
    Thinking,
    ToolCall,
    ToolChoice,
)
from tests.api.conftest import FakeEngine, reply
from tests.api.messages import HELLO, events, post
from tests.wire.anthropic_bodies import MARK, assistant, result, text, tool, use, user

WEATHER: Any = tool("weather")
CALL = ToolCall(0, "call_1", "weather", '{"city": "Oslo"}')
OMITTED: Any = {"type": "adaptive", "display": "omitted"}


class TestReplies:
    async def test_a_whole_reply(self, sdk: anthropic.AsyncAnthropic, engine: FakeEngine) -> None:
        engine.cached_tokens = 2
        answer = await sdk.messages.create(model="claude-any", max_tokens=9, messages=HELLO)
        assert answer.id.startswith("msg_")
        assert (answer.type, answer.role, answer.model) == ("message", "assistant", "claude-any")
        assert [b.model_dump(exclude_none=True) for b in answer.content] == [
            {"type": "text", "text": "Hello, world"}
        ]
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        counts = answer.usage
        assert (counts.input_tokens, counts.cache_creation_input_tokens) == (2, 0)
        assert (counts.cache_read_input_tokens, counts.output_tokens) == (2, 3)
        assert engine.streams[0].closed.is_set()
        assert not engine.streams[0].cancelled

    async def test_a_streamed_reply_is_the_whole_one(
        self, sdk: anthropic.AsyncAnthropic, engine: FakeEngine
    ) -> None:
        engine.script = reply(Thinking("Hm"), Thinking("m"), "Let ", "me see.", CALL, cached=0)
        asked: Any = {"model": "m", "max_tokens": 9, "messages": HELLO, "tools": [WEATHER]}
        whole = await sdk.messages.create(**asked)
        async with sdk.messages.stream(**asked) as stream:
            streamed = await stream.get_final_message()
        blocks = [[b.model_dump(exclude_none=True) for b in m.content] for m in (streamed, whole)]
        assert blocks[0] == blocks[1]
        assert streamed.usage == whole.usage
        assert streamed.stop_reason == whole.stop_reason == "tool_use"
        assert [b.type for b in whole.content] == ["thinking", "text", "tool_use"]

    async def test_the_events_come_in_anthropics_order(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply(Thinking("Hm"), "Yes", CALL)
        response = await post(client, stream=True, tools=[WEATHER])
        assert response.headers["content-type"].startswith("text/event-stream")
        found = events(response.text)
        assert all(name == data["type"] for name, data in found)
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        thinking = [block[0], block[1], block[1], block[2]]
        ends = ["message_delta", "message_stop"]
        assert [n for n, _ in found if n != "ping"] == [
            "message_start",
            *thinking,
            *block,
            *block,
            *ends,
        ]
        start = found[0][1]["message"]
        assert start["id"] == "msg_" + response.headers["x-mlxcache-request"].removeprefix("req_")
        assert (start["content"], start["stop_reason"]) == ([], None)
        assert {d["index"] for _, d in found if "index" in d} == {0, 1, 2}

    async def test_usage_is_exact_from_the_start_and_whole_at_the_end(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.cached_tokens = 1
        marked = [user("one"), user(text("two", **MARK))]
        response = await post(client, stream=True, messages=marked)
        found = dict(events(response.text))
        expected = {
            "input_tokens": 3,
            "cache_creation_input_tokens": 1,
            "cache_read_input_tokens": 1,
        }
        assert found["message_start"]["message"]["usage"] == expected | {"output_tokens": 0}
        assert found["message_delta"]["usage"] == expected | {"output_tokens": 3}

    @pytest.mark.parametrize("stream", [False, True])
    async def test_an_empty_reply_has_no_content(
        self, client: httpx.AsyncClient, engine: FakeEngine, stream: bool
    ) -> None:
        engine.script = reply(Text(""))
        response = await post(client, stream=stream)
        if stream:
            names = [name for name, _ in events(response.text) if name != "ping"]
            assert names == ["message_start", "message_delta", "message_stop"]
        else:
            assert response.json()["content"] == []

    @pytest.mark.parametrize(
        ("reason", "expected"),
        [("stop", "end_turn"), ("length", "max_tokens"), ("stop_sequence", "stop_sequence")],
    )
    async def test_why_it_stopped(
        self, client: httpx.AsyncClient, engine: FakeEngine, reason: Any, expected: str
    ) -> None:
        stop = "END" if reason == "stop_sequence" else None
        engine.script = reply("a", reason=reason, stop_sequence=stop)
        answer = (await post(client)).json()
        assert (answer["stop_reason"], answer["stop_sequence"]) == (expected, stop)

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_loop_is_an_end_of_turn_with_details(
        self, sdk: anthropic.AsyncAnthropic, engine: FakeEngine, stream: bool
    ) -> None:
        """The SDK takes it, and agents do not ask for more."""
        engine.script = reply("a a a a", reason="repetition")
        asked: Any = {"model": "m", "max_tokens": 9, "messages": [user("hi")]}
        if stream:
            async with sdk.messages.stream(**asked) as found:
                answer: Any = await found.get_final_message()
        else:
            answer = await sdk.messages.create(**asked)
        assert answer.stop_reason == "end_turn"
        assert answer.stop_details.type == "repetition"
        assert "again and again" in answer.stop_details.explanation

    async def test_a_tool_call_and_its_result_make_the_next_turn(
        self, sdk: anthropic.AsyncAnthropic, engine: FakeEngine
    ) -> None:
        engine.script = reply(Thinking("Weather."), CALL)
        asked: Any = {"model": "m", "max_tokens": 9, "tools": [WEATHER], "thinking": OMITTED}
        first = await sdk.messages.create(messages=HELLO, **asked)
        call = first.content[1]
        assert call.type == "tool_use"
        assert (call.name, call.input) == ("weather", {"city": "Oslo"})
        history: Any = [
            *HELLO,
            {"role": "assistant", "content": first.content},
            user(result("Rain", call.id)),
        ]
        await sdk.messages.create(messages=history, **asked)
        _, turn, outcome = engine.chats[1].messages
        assert turn["reasoning_content"] == "Weather."
        assert turn["tool_calls"][0]["id"] == outcome["tool_call_id"] == "call_1"
        assert turn["tool_calls"][0]["function"]["arguments"] == {"city": "Oslo"}

    async def test_omitted_thinking_is_never_on_the_wire(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply(Thinking("a secret thought"), "Yes")
        response = await post(client, stream=True, thinking=OMITTED)
        assert "a secret thought" not in response.text
        kinds = [
            d["delta"]["type"] for _, d in events(response.text) if "index" in d and "delta" in d
        ]
        assert kinds == ["signature_delta", "text_delta"]


class TestSettingsOfTheReply:
    @pytest.mark.parametrize("stream", [False, True])
    async def test_edits_of_the_context_are_reported_as_not_applied(
        self, sdk: anthropic.AsyncAnthropic, client: httpx.AsyncClient, stream: bool
    ) -> None:
        edits: Any = {"edits": [{"type": "clear_tool_uses_20250919"}]}
        asked: Any = {"model": "m", "max_tokens": 9, "messages": HELLO}
        if stream:
            async with sdk.beta.messages.stream(**asked, context_management=edits) as found:
                answer: Any = await found.get_final_message()
        else:
            answer = await sdk.beta.messages.create(**asked, context_management=edits)
        assert answer.context_management.applied_edits == []
        assert "context_management" not in (await post(client, stream=stream)).text
        del asked["max_tokens"]
        count = await sdk.beta.messages.count_tokens(**asked, context_management=edits)
        assert count.context_management is not None
        assert count.context_management.original_input_tokens == count.input_tokens

    @pytest.mark.parametrize("display", ["omitted", "updates", "summarized"])
    async def test_reasoning_is_sent_as_it_was_asked_for(
        self, client: httpx.AsyncClient, engine: FakeEngine, display: str
    ) -> None:
        """Updates are notes between calls, not reasoning."""
        engine.script = reply(Thinking("Hm"), "Yes")
        answer = (await post(client, thinking={"type": "adaptive", "display": display})).json()
        assert answer["content"][0]["thinking"] == ("Hm" if display == "summarized" else "")

    async def test_no_token_is_a_prompt_that_is_computed_and_not_answered(
        self, sdk: anthropic.AsyncAnthropic, engine: FakeEngine
    ) -> None:
        """Whatever else the request says about the reply."""
        engine.cached_tokens = 1
        form: Any = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
        answer = await sdk.messages.create(
            model="m",
            max_tokens=0,
            messages=HELLO,
            tools=[WEATHER],
            tool_choice={"type": "any"},
            output_config=form,
        )
        assert (answer.content, answer.stop_reason) == ([], "max_tokens")
        counts = answer.usage
        assert (counts.input_tokens, counts.cache_read_input_tokens) == (3, 1)
        assert counts.output_tokens == 0
        (job,) = engine.jobs
        assert (job.api, job.raw, job.max_tokens) == (WARMING, True, 1)
        assert (job.tools, job.format, job.tool_choice) == (None, None, ToolChoice())
        assert engine.streams[0].closed.is_set()

    async def test_the_sdk_knows_the_requests_id(self, sdk: anthropic.AsyncAnthropic) -> None:
        answer = await sdk.messages.create(model="m", max_tokens=9, messages=HELLO)
        assert answer._request_id == "req_" + answer.id.removeprefix("msg_")
        with pytest.raises(anthropic.BadRequestError) as refused:
            await sdk.messages.create(model="m", max_tokens=9, messages=[])
        assert refused.value.request_id == refused.value.body["request_id"]  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "job"),
    [
        ({}, {"max_tokens": 9, "api": "messages", "tools": None, "stop": ()}),
        ({}, {"sampling.temperature": 1.0, "sampling.top_p": 1.0, "sampling.top_k": 0}),
        ({}, {"sampling.unset": set(DEFAULTED), "parallel_tools": True}),
        ({"temperature": 0.5, "top_k": 40}, {"sampling.temperature": 0.5, "sampling.top_k": 40}),
        (
            {"temperature": 0.5, "top_p": 0.9, "top_k": 40},
            {"sampling.unset": {"min_p", "repetition_penalty"}, "sampling.top_p": 0.9},
        ),
        ({"top_p": 0}, {"sampling.top_k": 1, "sampling.top_p": 1.0}),
        ({"top_p": 0}, {"sampling.unset": {*DEFAULTED} - {"top_k", "top_p"}}),
        ({"stop_sequences": ["END"]}, {"stop": ("END",)}),
        ({"tools": [WEATHER], "tool_choice": {"type": "none"}}, {"tools": None}),
        (
            {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}},
            {"parallel_tools": False},
        ),
        ({"output_config": {"effort": "medium"}}, {"thinking_budget": 8192}),
    ],
)
async def test_what_is_asked_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, body: Any, job: dict[str, Any]
) -> None:
    """A field by its name in the job; tools are in the head, whatever may be called."""
    assert (await post(client, **body)).status_code == 200
    assert {name: attrgetter(name)(engine.jobs[0]) for name in job} == job
    assert len(engine.chats[0].tools) == len(body.get("tools", ()))


class TestJobs:
    async def test_a_format_and_a_forced_tool_reach_the_engine_and_change_no_prompt(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """Also with thinking, which comes before the call."""
        form = {"type": "json_schema", "schema": {"type": "object"}}
        thinking = {"type": "enabled", "budget_tokens": 1024}
        await post(client, tools=[WEATHER], thinking=thinking)
        await post(client, tools=[WEATHER], thinking=thinking, output_config={"format": form})
        choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        strict = WEATHER | {"strict": True}
        await post(client, tools=[strict], thinking=thinking, tool_choice=choice)
        free, formed, forced = engine.jobs
        assert (free.format, free.tool_choice) == (None, ToolChoice())
        assert formed.format == OutputFormat("json_schema", '{"type":"object"}')
        assert forced.tool_choice == ToolChoice(required=True, names=("weather",))
        assert forced.tools
        assert forced.tools[0]["function"]["strict"]
        assert (free.parallel_tools, forced.parallel_tools) == (True, False)
        assert engine.chats[0] == engine.chats[1] == engine.chats[2]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_loop_in_a_format_is_a_cut_and_not_an_end(
        self, client: httpx.AsyncClient, engine: FakeEngine, stream: bool
    ) -> None:
        """After `end_turn` a client would parse it."""
        engine.script = reply("[0, 0", reason="repetition")
        form = {"type": "json_schema", "schema": {"type": "array"}}
        for body, reason in (({}, "end_turn"), ({"output_format": form}, "max_tokens")):
            response = await post(client, stream=stream, **body)
            end = events(response.text)[-2][1]["delta"] if stream else response.json()
            assert end["stop_reason"] == reason
            assert end["stop_details"]["type"] == "repetition"

    @pytest.mark.parametrize("field", ["output_config", "output_format"])
    async def test_a_format_is_no_form_for_a_message_that_is_continued(
        self, client: httpx.AsyncClient, engine: FakeEngine, field: str
    ) -> None:
        form = {"type": "json_schema", "schema": {}}
        messages = [*HELLO, {"role": "assistant", "content": "{"}]
        value = {"format": form} if field == "output_config" else form
        response = await post(client, messages=messages, **{field: value})
        assert response.status_code == 400
        assert field in response.json()["error"]["message"]
        assert engine.jobs == []

    async def test_the_session_and_the_client_are_named(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        client.headers["user-agent"] = "claude-cli/2.1.329 (external, cli)"
        await post(client, metadata={"user_id": json.dumps({"session_id": "from-metadata"})})
        client.headers["x-claude-code-session-id"] = "from-header"
        await post(client, metadata={"user_id": json.dumps({"session_id": "from-metadata"})})
        assert [job.session for job in engine.jobs] == ["from-metadata", "from-header"]
        assert engine.sessions == ["from-metadata", "from-header"]
        assert engine.jobs[0].client == "claude-cli/2.1.329"


class TestCounting:
    async def test_tokens_are_counted_without_generation(
        self, sdk: anthropic.AsyncAnthropic, engine: FakeEngine
    ) -> None:
        count = await sdk.messages.count_tokens(model="m", messages=HELLO, system="Be brief")
        assert count.input_tokens == 7
        assert engine.jobs == []

    async def test_the_count_is_the_prompts_length(self, client: httpx.AsyncClient) -> None:
        body = {"model": "m", "messages": [user("a b", "c")], "system": [text("s", **MARK)]}
        counted = (await client.post("/v1/messages/count_tokens?beta=true", json=body)).json()
        answer = (await client.post("/v1/messages", json=body | {"max_tokens": 1})).json()
        parts = {k: v for k, v in answer["usage"].items() if k != "output_tokens"}
        assert counted == {"input_tokens": sum(parts.values())}

    async def test_fifty_at_once(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        bodies = [{"model": "m", "messages": [user("word " * n)]} for n in range(50)]
        path = "/v1/messages/count_tokens"
        answers = await asyncio.gather(*(client.post(path, json=body) for body in bodies))
        assert [a.json()["input_tokens"] for a in answers] == [n + 2 for n in range(50)]
        assert engine.jobs == []

    async def test_a_conversation_that_could_not_be_continued_is_counted(
        self, client: httpx.AsyncClient
    ) -> None:
        body = {"model": "m", "messages": [user("a"), assistant(use())]}
        assert (await client.post("/v1/messages/count_tokens", json=body)).status_code == 200
        assert (await post(client, messages=body["messages"])).status_code == 400
