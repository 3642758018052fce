"""OpenAI bodies become a Job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import httpx
import pytest

from mlxcache.types import DEFAULTED, OutputFormat
from tests.api.conftest import FakeEngine, reply
from tests.api.openai_bodies import CALL, USER, WEATHER, chat, events


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
            repetition_context_size=20,
            xtc_probability=0.5,
            xtc_threshold=0.0,
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
        assert drawn.repetition_context == 20
        assert (drawn.xtc_probability, drawn.xtc_threshold) == (0.5, 0.0)
        assert drawn.unset == frozenset()
        assert drawn.logit_bias == ((42, -100.0),)
        assert drawn.seed == 2**63 - 1
        assert (job.stop, job.max_tokens) == (("END",), 7)

    async def test_what_is_absent_takes_openais_defaults(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await chat(client)
        job = engine.jobs[0]
        assert (job.sampling.temperature, job.sampling.top_p) == (1.0, 1.0)
        assert job.sampling.unset == set(DEFAULTED)
        assert (job.sampling.seed, job.max_tokens, job.stop) == (None, None, ())
        assert (job.tools, job.top_logprobs, job.api) == (None, None, "chat")

    async def test_top_p_0_is_greedy(self, client: httpx.AsyncClient, engine: FakeEngine) -> None:
        await chat(client, top_p=0, temperature=1)
        await chat(client, top_p=0)
        for job in engine.jobs:
            assert job.sampling.temperature == 0.0
            assert "temperature" not in job.sampling.unset

    async def test_what_is_switched_off_is_not_unset(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await chat(client, temperature=0, top_k=-1, min_p=0)
        assert engine.jobs[0].sampling.unset == {"top_p", "repetition_penalty"}
        assert engine.jobs[0].sampling.top_k == 0

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
            ({"reasoning_effort": "none"}, None),
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
        by_effort = effort is not None and "thinking_budget" not in asked
        assert engine.jobs[1].thinking_budget == (None if by_effort else budget)

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

    async def test_a_format_reaches_the_engine_and_changes_no_prompt(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
        await chat(client, response_format=form)
        await chat(client)
        assert [job.format for job in engine.jobs] == [
            OutputFormat("json_schema", '{"type":"object"}'),
            None,
        ]
        assert engine.chats[0] == engine.chats[1]

    async def test_a_text_completion_takes_a_format_too(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        body = {"prompt": "Hi", "structured_outputs": {"choice": ["yes", "no"]}}
        assert (await client.post("/v1/completions", json=body)).status_code == 200
        assert engine.jobs[0].format == OutputFormat("choice", '["yes","no"]')

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
        """As in llama.cpp; a client that says what it wants, as to vLLM, gets that."""
        messages = [*USER, {"role": "assistant", "content": "Well"}]
        await chat(client, messages=messages)
        await chat(client, messages=messages, continue_final_message=True)
        await chat(client, messages=messages, add_generation_prompt=False)
        await chat(client, messages=messages, continue_final_message=False)
        await chat(client, messages=messages, add_generation_prompt=True)
        assert [c.continue_final for c in engine.chats] == [True, True, True, False, False]
        assert all(c.messages[-1]["content"] == "Well" for c in engine.chats)

    @pytest.mark.parametrize(
        ("last", "kept"),
        [
            ({"content": ""}, False),
            ({"content": [{"type": "text", "text": ""}]}, False),
            ({"content": None, "reasoning_content": "Hm"}, True),
            ({"content": "", "tool_calls": [{"function": {"name": "f"}}]}, True),
            ({"content": "Text", "tool_calls": [{"function": {"name": "f"}}]}, True),
        ],
    )
    async def test_what_has_no_end_of_text_is_not_continued(
        self, client: httpx.AsyncClient, engine: FakeEngine, last: Any, kept: bool
    ) -> None:
        response = await chat(client, messages=[*USER, {"role": "assistant", **last}])
        assert response.status_code == 200
        assert not engine.chats[0].continue_final
        assert len(engine.chats[0].messages) == 1 + kept

    async def test_a_format_holds_for_the_new_text_of_a_continued_message(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        messages = [*USER, {"role": "assistant", "content": "Number:"}]
        assert (await chat(client, messages=messages, guided_regex="[0-9]+")).status_code == 200
        assert engine.chats[0].continue_final
        assert engine.jobs[0].format is not None
