"""OpenAI's endpoints, read by OpenAI's own client and, where the wire matters, raw."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import httpx2
import openai
import pytest

from mlxcache.api.http import ApiSettings
from mlxcache.errors import ContextLengthExceeded, GenerationFailed, QueueFull
from mlxcache.types import Text, Thinking, TokenLogprob, ToolCall
from tests.api.conftest import FakeEngine, reply

USER = [{"role": "user", "content": "Hi there"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = ToolCall(0, "call_1", "weather", '{"city": "Oslo"}')


@pytest.fixture
async def sdk(app: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx2.ASGITransport(app)
    http_client = httpx2.AsyncClient(transport=transport)
    async with openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="any", http_client=http_client, max_retries=0
    ) as client:
        yield client


async def chat(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/chat/completions", json={"messages": USER} | body)


def events(text: str) -> list[Any]:
    """The data of each event; comments are left out."""
    return [
        data if data == "[DONE]" else json.loads(data)
        for line in text.splitlines()
        if line.startswith("data: ") and (data := line.removeprefix("data: "))
    ]


async def refused(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    response = await chat(client, **body)
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error


class TestReplies:
    async def test_a_whole_reply_has_its_text_its_end_and_true_counts(
        self, sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.cached_tokens = 2
        answer = await sdk.chat.completions.create(model="any-name", messages=USER)
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
        self, sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.script = reply(Thinking("Hm"), Thinking("m"), "Hello", " you")
        stream = await sdk.chat.completions.create(
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
        self, sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.script = reply(Thinking("Weather."), CALL)
        answer = await sdk.chat.completions.create(model="m", messages=USER, tools=[WEATHER])
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
        self, sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.script = reply(CALL)
        async with sdk.chat.completions.stream(model="m", messages=USER, tools=[WEATHER]) as stream:
            answer = await stream.get_final_completion()
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

    async def test_a_call_cut_by_the_limit_still_says_length(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply(CALL, reason="length")
        assert (await chat(client)).json()["choices"][0]["finish_reason"] == "length"

    async def test_logprobs_come_with_bytes_and_alternatives(
        self, sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        token = TokenLogprob("é", 5, -0.25, (("é", 5, -0.25), ("e", 6, float("-inf"))))
        engine.script = reply(Text("é", (token,)))
        answer = await sdk.chat.completions.create(
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


class TestRequests:
    async def test_every_role_is_taken_and_content_becomes_a_string(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        messages = [
            {"role": "system", "content": "S"},
            {"role": "developer", "content": [{"type": "text", "text": "D"}]},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {
                "role": "assistant",
                "content": None,
                "reasoning_content": "why",
                "tool_calls": [
                    {
                        "id": "c1",
                        "type": "function",
                        "function": {"name": "f", "arguments": '{"b": 1, "a": [2.5]}'},
                    }
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "r"}]},
            {"role": "user", "content": "U", "name": "ann"},
        ]
        assert (await chat(client, messages=messages)).status_code == 200
        call = {
            "id": "c1",
            "type": "function",
            "function": {"name": "f", "arguments": {"b": 1, "a": [2.5]}},
        }
        assert engine.chats[0].messages == [
            {"role": "system", "content": "S"},
            {"role": "developer", "content": "D"},
            {"role": "user", "content": "ab"},
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "why",
                "tool_calls": [call],
            },
            {"role": "tool", "content": "r", "tool_call_id": "c1"},
            {"role": "user", "content": "U", "name": "ann"},
        ]
        sent = engine.chats[0].messages[3]["tool_calls"][0]["function"]["arguments"]
        assert list(sent) == ["b", "a"]

    async def test_the_older_function_messages_become_tool_messages(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        messages = [
            *USER,
            {"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}},
            {"role": "function", "name": "f", "content": "r"},
        ]
        assert (await chat(client, messages=messages)).status_code == 200
        _, call, result = engine.chats[0].messages
        assert call["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
        assert result == {"role": "tool", "name": "f", "content": "r"}

    @pytest.mark.parametrize(
        ("text", "arguments"),
        [
            ("", {}),
            (None, {}),
            ({"a": 1}, {"a": 1}),
            ("{oops", {"_raw": "{oops"}),
            ("[1]", {"_raw": "[1]"}),
            ("[" * 100_000, {"_raw": "[" * 100_000}),
        ],
        ids=["empty", "null", "object", "malformed", "list", "deep"],
    )
    async def test_arguments_that_are_no_object_are_kept_whole(
        self, client: httpx.AsyncClient, engine: FakeEngine, text: Any, arguments: Any
    ) -> None:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": text}}
        messages = [*USER, {"role": "assistant", "tool_calls": [call]}]
        assert (await chat(client, messages=messages)).status_code == 200
        assert engine.chats[0].messages[1]["tool_calls"][0]["function"]["arguments"] == arguments

    async def test_a_string_and_a_list_of_it_are_the_same_chat_with_or_without_cache_control(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        part = {"type": "text", "text": "Hi there"}
        marked = part | {"cache_control": {"type": "ephemeral"}}
        for content in ("Hi there", [part], [marked]):
            await chat(client, messages=[{"role": "user", "content": content}])
        assert engine.chats[0] == engine.chats[1] == engine.chats[2]

    async def test_sampling_fields_reach_the_engine(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await chat(
            client,
            temperature=0.5,
            top_p=0.9,
            top_k=40,
            min_p=0.05,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=-0.2,
            logit_bias={"42": -100},
            seed=-1,
            stop="END",
            max_completion_tokens=7,
            max_tokens=9,
        )
        job = engine.jobs[0]
        drawn = job.sampling
        assert (drawn.temperature, drawn.top_p, drawn.top_k, drawn.min_p) == (0.5, 0.9, 40, 0.05)
        assert (drawn.repetition_penalty, drawn.presence_penalty) == (1.1, 0.2)
        assert drawn.frequency_penalty == -0.2
        assert drawn.logit_bias == ((42, -100.0),)
        assert drawn.seed == 2**63 - 1
        assert (job.stop, job.max_tokens) == (("END",), 7)

    async def test_what_is_absent_takes_openais_defaults(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await chat(client)
        job = engine.jobs[0]
        assert (job.sampling.temperature, job.sampling.top_p) == (1.0, 1.0)
        assert (job.sampling.seed, job.max_tokens, job.stop) == (None, None, ())
        assert (job.tools, job.top_logprobs, job.api) == (None, None, "chat")

    async def test_top_p_0_is_greedy(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        await chat(client, top_p=0, temperature=1)
        assert engine.jobs[0].sampling.temperature == 0.0

    @pytest.mark.parametrize(("asked", "given"), [(-1, None), (10**30, 2**31 - 1), (5, 5)])
    async def test_limits_from_minus_one_to_absurd(
        self, client: httpx.AsyncClient, engine: FakeEngine, asked: int, given: int | None
    ) -> None:
        await chat(client, max_tokens=asked)
        assert engine.jobs[0].max_tokens == given

    async def test_tool_choice_none_renders_the_tools_and_parses_no_calls(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await chat(client, tools=[WEATHER], tool_choice="none")
        await chat(client, tools=[WEATHER], tool_choice={"type": "auto"})
        assert engine.chats[0].tools == engine.chats[1].tools == (WEATHER,)
        assert engine.jobs[0].tools is None
        assert engine.jobs[1].tools == (WEATHER,)
        assert engine.jobs[1].parallel_tools is True

    async def test_parallel_calls_can_be_switched_off(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await chat(client, tools=[WEATHER], parallel_tool_calls=False)
        assert engine.jobs[0].parallel_tools is False

    async def test_a_tool_without_description_or_parameters_gets_empty_ones(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        bare = {"type": "function", "function": {"name": "f", "strict": True}}
        await chat(client, tools=[bare])
        assert engine.chats[0].tools[0]["function"] == {
            "name": "f",
            "description": "",
            "parameters": {"type": "object", "properties": {}},
        }

    @pytest.mark.parametrize(
        ("body", "arguments"),
        [
            ({"reasoning_effort": "none"}, {"enable_thinking": False}),
            ({"reasoning_effort": "minimal"}, {"reasoning_effort": "low"}),
            ({"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
            ({"enable_thinking": True}, {"enable_thinking": True}),
            ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
            ({"chat_template_kwargs": {"x": [1]}}, {"x": [1]}),
        ],
    )
    async def test_reasoning_and_template_arguments(
        self, client: httpx.AsyncClient, engine: FakeEngine, body: Any, arguments: Any
    ) -> None:
        await chat(client, **body)
        assert engine.chats[0].template_args == arguments

    async def test_the_label_and_the_client_are_recorded(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        client.headers["user-agent"] = "OpenAI/Python 3.52.0"
        await chat(client, prompt_cache_key="mine")
        assert engine.sessions == ["mine"]
        assert (engine.jobs[0].session, engine.jobs[0].client) == ("mine", "OpenAI/Python 3.52.0")
        assert engine.jobs[0].render_s >= 0

    async def test_harmless_fields_are_ignored(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        response = await chat(
            client,
            store=False,
            metadata={"a": "b"},
            user="me",
            service_tier="auto",
            modalities=["text"],
            prediction={"type": "content", "content": "x"},
            verbosity="low",
            cache_prompt=True,
            safety_identifier="x",
            response_format={"type": "text"},
            n=1,
            functions=None,
            audio=None,
            ignore_eos=False,
            whatever={"deep": [1]},
        )
        assert response.status_code == 200

    async def test_a_message_of_the_assistants_can_be_continued(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        messages = [*USER, {"role": "assistant", "content": "Well"}]
        await chat(client, messages=messages, continue_final_message=True)
        await chat(client, messages=messages)
        assert [c.continue_final for c in engine.chats] == [True, False]


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"n": 2}, "n"),
            ({"audio": {"voice": "x"}}, "audio"),
            ({"functions": [{"name": "f"}]}, "functions"),
            ({"web_search_options": {"a": 1}}, "web_search_options"),
            ({"modalities": ["text", "audio"]}, "modalities"),
            ({"response_format": {"type": "json_object"}}, "response_format"),
            ({"response_format": {"type": "json_schema"}}, "response_format"),
            ({"tools": [WEATHER], "tool_choice": "required"}, "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
            ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
            ({"grammar": "root ::= x"}, "grammar"),
        ],
    )
    async def test_what_is_not_served_is_named(
        self, client: httpx.AsyncClient, body: Any, param: str
    ) -> None:
        error = await refused(client, **body)
        assert (error["code"], error["param"]) == ("unsupported", param)

    async def test_an_image_is_named(self, client: httpx.AsyncClient) -> None:
        image = {"type": "image_url", "image_url": {"url": "data:"}}
        messages = [{"role": "user", "content": [{"type": "text", "text": "See"}, image]}]
        error = await refused(client, messages=messages)
        assert error["param"] == "messages[0].content[1].type"
        assert "image_url" in error["message"]

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"messages": []}, "messages"),
            ({"messages": None}, "messages"),
            ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
            ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
            (
                {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
                "messages[0].content[0]",
            ),
            ({"temperature": -1}, "temperature"),
            ({"temperature": "hot"}, "temperature"),
            ({"top_p": 1.5}, "top_p"),
            ({"max_tokens": 0}, "max_tokens"),
            ({"max_tokens": 1.5}, "max_tokens"),
            ({"stop": ""}, "stop"),
            ({"stop": ["a"] * 17}, "stop"),
            ({"logit_bias": {"x": 1}}, "logit_bias"),
            ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
            ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
            ({"top_logprobs": 2}, "top_logprobs"),
            ({"tool_choice": 7}, "tool_choice"),
            ({"tools": [{"type": "function"}]}, "tools[0].function"),
            ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
            ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs.tokenize"),
            ({"continue_final_message": True}, "continue_final_message"),
            ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ],
    )
    async def test_what_is_wrong_is_named(
        self, client: httpx.AsyncClient, body: Any, param: str
    ) -> None:
        assert (await refused(client, **body))["param"] == param

    async def test_the_sdk_raises_its_own_error_for_a_prompt_that_is_too_long(
        self, sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.submit_error = ContextLengthExceeded("9000 tokens are more than 8192.")
        for stream in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await sdk.chat.completions.create(model="m", messages=USER, stream=stream)
            assert caught.value.code == "context_length_exceeded"
            assert caught.value.param == "messages"

    async def test_a_full_queue_says_when_to_come_again(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.submit_error = QueueFull("Too many wait.", retry_after=2.5)
        response = await chat(client, stream=True)
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"

    async def test_a_reply_that_fails_whole_is_a_500_of_the_right_shape(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = [*reply("Hi")[:2], GenerationFailed("The model raised.")]
        response = await chat(client)
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "The model raised."
        assert engine.streams[0].closed.is_set()

    async def test_a_reply_that_fails_late_ends_with_an_error_event(
        self, sdk: openai.AsyncOpenAI, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = [*reply("Hi")[:2], GenerationFailed("The model raised.")]
        sent = events((await chat(client, stream=True)).text)
        assert sent[1]["choices"][0]["delta"]["content"] == "Hi"
        assert sent[-1]["error"]["message"] == "The model raised."
        assert engine.streams[0].closed.is_set()
        stream = await sdk.chat.completions.create(model="m", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match=r"The model raised\."):
            _ = [chunk async for chunk in stream]

    async def test_a_bug_in_a_stream_is_an_error_event_that_tells_no_details(
        self, client: httpx.AsyncClient, engine: FakeEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.script = [*reply("Hi")[:2], RuntimeError("secret")]
        sent = events((await chat(client, stream=True)).text)
        assert sent[-1]["error"]["type"] == "server_error"
        assert "secret" not in sent[-1]["error"]["message"]
        assert "RuntimeError: secret" in caplog.text

    async def test_a_reply_cut_short_is_never_passed_off_as_whole(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply("Hi", reason="cancelled")
        assert (await chat(client)).status_code == 503
        assert "error" in events((await chat(client, stream=True)).text)[-1]


class TestText:
    async def test_a_text_is_continued(self, sdk: openai.AsyncOpenAI, engine: FakeEngine) -> None:
        answer = await sdk.completions.create(model="m", prompt="Once upon a", stop=["."])
        assert answer.id.startswith("cmpl-")
        assert answer.choices[0].text == "Hello, world"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage.total_tokens == 6
        assert engine.texts == ["Once upon a"]
        assert (engine.jobs[0].max_tokens, engine.jobs[0].stop) == (16, (".",))
        assert engine.jobs[0].api == "completions"

    async def test_a_streamed_text_adds_up(self, sdk: openai.AsyncOpenAI) -> None:
        stream = await sdk.completions.create(
            model="m", prompt=["Once"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks if c.choices) == "Hello, world"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage.completion_tokens == 3

    @pytest.mark.parametrize("prompt", [[5, 6, 7], [[5, 6, 7]]])
    async def test_token_ids_are_served_as_they_are(
        self, client: httpx.AsyncClient, engine: FakeEngine, prompt: Any
    ) -> None:
        response = await client.post("/v1/completions", json={"prompt": prompt})
        assert response.status_code == 200
        assert engine.jobs[0].prompt.ids.tolist() == [5, 6, 7]
        assert engine.texts == []

    async def test_logprobs_have_the_older_shape(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        one = TokenLogprob("ab", 1, -0.5, (("ab", 1, -0.5),))
        two = TokenLogprob("c", 2, -1.5, (("c", 2, -1.5),))
        engine.script = reply(Text("ab", (one,)), Text("c", (two,)))
        body = {"prompt": "x", "logprobs": 1}
        expected = {
            "tokens": ["ab", "c"],
            "token_logprobs": [-0.5, -1.5],
            "top_logprobs": [{"ab": -0.5}, {"c": -1.5}],
            "text_offset": [0, 2],
        }
        whole = (await client.post("/v1/completions", json=body)).json()
        assert whole["choices"][0]["logprobs"] == expected
        streamed = await client.post("/v1/completions", json=body | {"stream": True})
        pieces = [c["choices"][0]["logprobs"] for c in events(streamed.text)[:-2]]
        assert [p["text_offset"] for p in pieces] == [[0], [2]]

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, None),
            ({"prompt": ""}, "prompt"),
            ({"prompt": []}, "prompt"),
            ({"prompt": [[]]}, "prompt"),
            ({"prompt": ["a", "b"]}, "prompt"),
            ({"prompt": [1, "a"]}, "prompt"),
            ({"prompt": [1, -1]}, "prompt"),
            ({"prompt": [2**40]}, "prompt"),
            ({"prompt": "a", "suffix": "b"}, "suffix"),
            ({"prompt": "a", "best_of": 2}, "best_of"),
            ({"prompt": "a", "n": 0}, "n"),
            ({"prompt": "a", "echo": True}, "echo"),
        ],
    )
    async def test_what_is_wrong_is_named(
        self, client: httpx.AsyncClient, body: Any, param: str | None
    ) -> None:
        response = await client.post("/v1/completions", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


class TestDefaultLimit:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(default_max_tokens=77)

    async def test_the_servers_limit_holds_where_the_client_names_none(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await chat(client)
        await client.post("/v1/completions", json={"prompt": "a"})
        await chat(client, max_tokens=5)
        assert [job.max_tokens for job in engine.jobs] == [77, 77, 5]
