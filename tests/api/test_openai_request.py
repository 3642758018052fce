"""OpenAI bodies become a Job."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from typing import Any

import httpx
import pytest

from mlxcache.types import DEFAULTED, OutputFormat
from tests.api.conftest import FakeEngine, reply
from tests.api.openai_bodies import CALL, USER, WEATHER, chat, events

DRAWN = {
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "xtc_probability": 0.5,
    "xtc_threshold": 0.0,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.2,
}
BARE = {"type": "function", "function": {"name": "f", "strict": "true"}}
EMPTY = {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
CALLED = [{"function": {"name": "f"}}]


def ended(**fields: Any) -> dict[str, Any]:
    """A body whose last message is the assistant's."""
    more = {key: fields.pop(key) for key in list(fields) if key.endswith(("message", "prompt"))}
    return {"messages": [*USER, {"role": "assistant", **fields}], **more}


@pytest.mark.parametrize(
    ("body", "job"),
    [
        ({}, {"max_tokens": None, "stop": (), "tools": None, "top_logprobs": None, "api": "chat"}),
        ({}, {"sampling.temperature": 1.0, "sampling.top_p": 1.0, "sampling.seed": None}),
        ({}, {"sampling.unset": set(DEFAULTED), "format": None}),
        (DRAWN, {f"sampling.{name}": value for name, value in DRAWN.items()}),
        (DRAWN, {"sampling.unset": frozenset()}),
        ({"repetition_context_size": 20}, {"sampling.repetition_context": 20}),
        ({"logit_bias": {"42": -100}}, {"sampling.logit_bias": ((42, -100.0),)}),
        ({"seed": -1}, {"sampling.seed": 2**63 - 1}),
        ({"top_p": 0, "temperature": 1}, {"sampling.temperature": 0.0}),
        ({"top_p": 0}, {"sampling.unset": {*DEFAULTED} - {"temperature", "top_p"}}),
        (
            {"temperature": 0, "top_k": -1, "min_p": 0},
            {"sampling.unset": {"top_p", "repetition_penalty"}, "sampling.top_k": 0},
        ),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"max_completion_tokens": 7, "max_tokens": 9}, {"max_tokens": 7}),
        ({"max_tokens": -1}, {"max_tokens": None}),
        ({"max_tokens": 10**30}, {"max_tokens": 2**31 - 1}),
        ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": None}),
        ({"tools": [WEATHER], "tool_choice": {"type": "auto"}}, {"tools": (WEATHER,)}),
        ({"tools": [WEATHER]}, {"parallel_tools": True}),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, {"parallel_tools": False}),
        ({"response_format": FORM}, {"format": OutputFormat("json_schema", '{"type":"object"}')}),
    ],
)
async def test_what_is_asked_reaches_the_engine(
    client: httpx.AsyncClient, engine: FakeEngine, body: Any, job: dict[str, Any]
) -> None:
    """A field by its name in the job."""
    assert (await chat(client, **body)).status_code == 200
    assert {name: attrgetter(name)(engine.jobs[0]) for name in job} == job


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"reasoning_effort": "none"}, {"template_args": {"enable_thinking": False}}),
        ({"reasoning_effort": "minimal"}, {"template_args": {"reasoning_effort": "low"}}),
        ({"reasoning_effort": "high"}, {"template_args": {"reasoning_effort": "high"}}),
        ({"enable_thinking": True}, {"template_args": {"enable_thinking": True}}),
        ({"thinking": {"type": "disabled"}}, {"template_args": {"enable_thinking": False}}),
        ({"chat_template_kwargs": {"x": [1]}}, {"template_args": {"x": [1]}}),
        ({"tools": [WEATHER], "tool_choice": "none"}, {"tools": (WEATHER,)}),
        ({"tools": [BARE]}, {"tools": ({"type": "function", "function": EMPTY},)}),
        ({"response_format": FORM}, {"messages": USER, "template_args": {}}),
        # As in llama.cpp; a client that says what it wants, as to vLLM, gets that.
        (ended(content="Well"), {"continue_final": True}),
        (ended(content="Well", continue_final_message=True), {"continue_final": True}),
        (ended(content="Well", add_generation_prompt=False), {"continue_final": True}),
        (ended(content="Well", continue_final_message=False), {"continue_final": False}),
        (ended(content="Well", add_generation_prompt=True), {"continue_final": False}),
        # What has no end of text is not continued, and what is empty is left out.
        (ended(content=""), {"continue_final": False, "messages": USER}),
        (ended(content=[{"type": "text", "text": ""}]), {"messages": USER}),
        (ended(content=None, reasoning_content="Hm"), {"continue_final": False}),
        (ended(content="", tool_calls=CALLED), {"continue_final": False}),
        (ended(content="Text", tool_calls=CALLED), {"continue_final": False}),
    ],
)
async def test_what_is_asked_is_rendered(
    client: httpx.AsyncClient, engine: FakeEngine, body: Any, expected: dict[str, Any]
) -> None:
    """A field by its name in the chat, which keeps a last message that is not empty."""
    assert (await chat(client, **body)).status_code == 200
    (made,) = engine.chats
    assert {name: getattr(made, name) for name in expected} == expected
    assert len(made.messages) == len(expected.get("messages", body.get("messages", USER)))


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
            {"role": "user", "content": "ab", "texts": ("a", "b")},
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

    async def test_results_of_parallel_calls_take_the_order_of_the_calls(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        calls = [{"id": id, "function": {"name": "f", "arguments": "{}"}} for id in "abc"]
        asked = {"role": "assistant", "content": "", "tool_calls": calls}
        results = [{"role": "tool", "tool_call_id": id, "content": id} for id in "cxab"]
        await chat(client, messages=[*USER, asked, *results, *USER, asked, *results[::-1]])
        order = [m["content"] for m in engine.chats[0].messages if m["role"] == "tool"]
        assert "".join(order) == "abcxabcx"

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

    @pytest.mark.parametrize(
        ("asked", "budget"),
        [
            ({}, None),
            ({"thinking_budget": 0}, 0),
            ({"thinking_budget": -1, "reasoning_effort": "low"}, None),
            ({"thinking_token_budget": 99}, 99),
            ({"thinking": {"type": "enabled", "budget_tokens": 50}}, 50),
            ({"reasoning": {"max_tokens": 70}}, 70),
            ({"reasoning": {"effort": "medium"}}, 8192),
            ({"reasoning_effort": "minimal"}, 512),
            ({"reasoning_effort": "low"}, 1024),
            ({"reasoning_effort": "high"}, 24_576),
            ({"reasoning_effort": "xhigh"}, None),
            ({"reasoning_effort": "low", "thinking_budget": 7}, 7),
            ({"reasoning_effort": "none"}, 0),
            ({"enable_thinking": False, "thinking_budget": 7}, 0),
        ],
        ids=str,
    )
    async def test_thinking_budgets_reach_the_engine(
        self, client: httpx.AsyncClient, engine: FakeEngine, asked: Any, budget: int | None
    ) -> None:
        """An effort is a budget unless the template takes it."""
        await chat(client, **asked)
        assert engine.jobs[0].thinking_budget == budget
        effort = asked.get("reasoning_effort") or asked.get("reasoning", {}).get("effort")
        assert ("reasoning_effort" in engine.chats[0].template_args) == (
            effort not in (None, "none")
        )
        assert engine.info is not None
        engine.info = replace(engine.info, takes_effort=True)
        await chat(client, **asked)
        by_effort = effort not in (None, "none") and "thinking_budget" not in asked
        assert engine.jobs[1].thinking_budget == (None if by_effort else budget)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("choice", "reason"),
        [
            ("required", "tool_calls"),
            ({"type": "function", "function": {"name": "weather"}}, "stop"),
        ],
    )
    async def test_a_forced_call_ends_with_the_reason_that_openai_gives(
        self,
        client: httpx.AsyncClient,
        engine: FakeEngine,
        choice: Any,
        reason: str,
        stream: bool,
    ) -> None:
        engine.script = reply(CALL)
        response = await chat(client, tools=[WEATHER], tool_choice=choice, stream=stream)
        bodies = events(response.text)[:-1] if stream else [response.json()]
        assert bodies[-1]["choices"][0]["finish_reason"] == reason
        assert engine.jobs[0].tool_choice.required

    async def test_a_forced_call_that_was_cut_says_so(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply("{", reason="length")
        choice = {"type": "function", "function": {"name": "weather"}}
        response = await chat(client, tools=[WEATHER], tool_choice=choice)
        assert response.json()["choices"][0]["finish_reason"] == "length"

    async def test_a_loop_in_a_format_is_a_cut_and_not_an_end(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """After `stop` a client would parse it."""
        engine.script = reply("[0, 0", reason="repetition")
        for body, reason in (({}, "stop"), ({"guided_regex": "[0, ]*"}, "length")):
            choice = (await chat(client, **body)).json()["choices"][0]
            assert (choice["finish_reason"], choice["stop_reason"]) == (reason, "repetition")

    async def test_a_text_completion_takes_a_format_too(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        body = {"prompt": "Hi", "structured_outputs": {"choice": ["yes", "no"]}}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert engine.jobs[0].format == OutputFormat("choice", '["yes","no"]')

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

    async def test_a_format_holds_for_the_new_text_of_a_continued_message(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        messages = [*USER, {"role": "assistant", "content": "Number:"}]
        assert (await chat(client, messages=messages, guided_regex="[0-9]+")).status_code == 200
        assert engine.chats[0].continue_final
        assert engine.jobs[0].format is not None
