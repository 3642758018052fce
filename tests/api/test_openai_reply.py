"""Chat completions, whole and streamed, through OpenAI's SDK."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from mlxcache.types import Text, Thinking, TokenLogprob, ToolCall
from tests.api.conftest import FakeEngine, reply
from tests.api.openai_bodies import CALL, USER, WEATHER, chat, events


class TestReplies:
    async def test_a_whole_reply_has_its_text_its_end_and_true_counts(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.cached_tokens = 2
        answer: Any = await openai_sdk.chat.completions.create(model="any-name", messages=USER)
        assert answer.id.startswith("chatcmpl-")
        assert answer.object == "chat.completion"
        assert answer.model == "any-name"
        choice = answer.choices[0]
        assert (choice.message.role, choice.message.content) == ("assistant", "Hello, world")
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 3, 7)
        assert usage.prompt_tokens_details.cached_tokens == 2
        assert usage.completion_tokens_details.reasoning_tokens == 0
        assert engine.streams[0].closed.is_set()
        assert not engine.streams[0].cancelled

    async def test_an_absent_model_is_the_one_that_is_served(
        self, client: httpx.AsyncClient
    ) -> None:
        assert (await chat(client)).json()["model"] == "org/model-4bit"

    async def test_chunks_add_up_to_the_reply(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.script = reply(Thinking("Hm"), Thinking("m"), "Hello", " you")
        stream: Any = await openai_sdk.chat.completions.create(
            model="m", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[0].choices[0].delta.role == "assistant"
        deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
        assert "".join(d.content or "" for d in deltas) == "Hello you"
        thoughts = [getattr(d, "reasoning_content", None) or "" for d in deltas]
        assert "".join(thoughts) == "Hmm"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].choices == []
        assert chunks[-1].usage.completion_tokens == 4
        assert chunks[-1].usage.completion_tokens_details.reasoning_tokens == 2

    async def test_a_stream_ends_with_done_and_has_no_usage_unasked(
        self, client: httpx.AsyncClient
    ) -> None:
        response = await chat(client, stream=True)
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(response.text)
        assert done == "[DONE]"
        assert all("usage" not in chunk for chunk in chunks)
        assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)

    async def test_a_whole_tool_call_has_null_content(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.script = reply(Thinking("Weather."), CALL)
        answer: Any = await openai_sdk.chat.completions.create(
            model="m", messages=USER, tools=[WEATHER]
        )
        message = answer.choices[0].message
        assert message.content is None
        assert message.reasoning_content == "Weather."
        assert message.tool_calls[0].id == "call_1"
        assert message.tool_calls[0].function.name == "weather"
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Oslo"}
        assert answer.choices[0].finish_reason == "tool_calls"

    async def test_a_streamed_tool_call_opens_with_its_name_and_no_arguments(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        second = ToolCall(1, "call_2", "weather", "{}")
        engine.script = reply("Let me see.", CALL, second)
        chunks = events((await chat(client, stream=True, tools=[WEATHER])).text)[:-1]
        deltas = [call for c in chunks for call in c["choices"][0]["delta"].get("tool_calls", ())]
        opening = {"name": "weather", "arguments": ""}
        assert deltas == [
            {"index": 0, "id": "call_1", "type": "function", "function": opening},
            {"index": 0, "function": {"arguments": '{"city": "Oslo"}'}},
            {"index": 1, "id": "call_2", "type": "function", "function": opening},
            {"index": 1, "function": {"arguments": "{}"}},
        ]
        assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"

    async def test_the_sdk_gathers_streamed_tool_calls(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.script = reply(CALL)
        async with openai_sdk.chat.completions.stream(
            model="m", messages=USER, tools=[WEATHER]
        ) as stream:
            answer: Any = await stream.get_final_completion()
        call = answer.choices[0].message.tool_calls[0]
        assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Oslo"}')

    @pytest.mark.parametrize(
        ("reason", "finish"),
        [("stop", "stop"), ("stop_sequence", "stop"), ("length", "length")],
    )
    async def test_each_end_has_openais_word(
        self, client: httpx.AsyncClient, engine: FakeEngine, reason: Any, finish: str
    ) -> None:
        engine.script = reply("Hi", reason=reason)
        assert (await chat(client)).json()["choices"][0]["finish_reason"] == finish
        chunks = events((await chat(client, stream=True)).text)
        assert chunks[-2]["choices"][0]["finish_reason"] == finish

    async def test_a_loop_is_a_stop_with_a_reason(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        """The SDK takes it, and agents do not ask for more."""
        engine.script = reply("a a a a", reason="repetition")
        answer: Any = await openai_sdk.chat.completions.create(model="m", messages=USER)
        assert answer.choices[0].finish_reason == "stop"
        assert answer.choices[0].stop_reason == "repetition"
        stream: Any = await openai_sdk.chat.completions.create(
            model="m", messages=USER, stream=True
        )
        *_, last = [chunk async for chunk in stream]
        choice = last.choices[0]
        assert (choice.finish_reason, choice.stop_reason) == ("stop", "repetition")
        engine.script = reply("a", CALL, reason="repetition")
        answer = await openai_sdk.chat.completions.create(model="m", messages=USER)
        assert answer.choices[0].finish_reason == "tool_calls"

    async def test_a_call_cut_by_the_limit_still_says_length(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply(CALL, reason="length")
        assert (await chat(client)).json()["choices"][0]["finish_reason"] == "length"

    async def test_logprobs_come_with_bytes_and_alternatives(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        token = TokenLogprob("é", 5, -0.25, (("é", 5, -0.25), ("e", 6, float("-inf"))))
        engine.script = reply(Text("é", (token,)))
        answer: Any = await openai_sdk.chat.completions.create(
            model="m", messages=USER, logprobs=True, top_logprobs=2
        )
        content = answer.choices[0].logprobs.content[0]
        assert (content.token, content.logprob) == ("é", -0.25)
        assert bytes(content.bytes).decode() == "é"
        assert [(t.token, t.logprob) for t in content.top_logprobs] == [
            ("é", -0.25),
            ("e", -9999.0),
        ]
        assert engine.jobs[0].top_logprobs == 2

    async def test_streamed_logprobs_ride_on_their_text(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply(Text("a", (TokenLogprob("a", 1, -0.5),)), Text("", ()))
        chunks = events((await chat(client, stream=True, logprobs=True)).text)
        carried = [c["choices"][0]["logprobs"] for c in chunks[:-1]]
        assert [c["content"][0]["logprob"] for c in carried if c] == [-0.5]
        assert engine.jobs[0].top_logprobs == 0
