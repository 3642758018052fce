"""Several choices in one answer: whole and streamed, of one prompt and of several."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest

from mlxcache.api import openai as api
from mlxcache.api.exchange import merge
from mlxcache.errors import GenerationFailed
from mlxcache.types import Job, Prompt, Text, token_ids
from tests.api.conftest import FakeEngine, eventually, reply
from tests.api.openai_bodies import USER, chat, events


async def complete(client: httpx.AsyncClient, **body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=body)


def texts(chunks: list[Any]) -> dict[int, str]:
    """The text of each choice of a streamed answer."""
    found: dict[int, str] = {}
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


class TestChat:
    async def test_each_choice_is_a_sample_of_its_own_of_one_prompt(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.cached_tokens = 2
        engine.scripts = [reply("a", "b"), reply("c"), reply("d", reason="length")]
        answer: Any = await openai_sdk.chat.completions.create(
            model="m", messages=USER, n=3, seed=2**63 - 1
        )
        assert [(c.index, c.message.content) for c in answer.choices] == [
            (0, "ab"),
            (1, "c"),
            (2, "d"),
        ]
        assert [c.finish_reason for c in answer.choices] == ["stop", "stop", "length"]
        assert [job.sampling.seed for job in engine.jobs] == [2**63 - 1, 0, 1]
        assert [job.choice for job in engine.jobs] == [0, 1, 2]
        assert len({job.id for job in engine.jobs}) == 3
        assert len(engine.chats) == 1
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (4, 4, 8)
        assert usage.prompt_tokens_details.cached_tokens == 2
        assert not any(stream.cancelled for stream in engine.streams)

    async def test_without_a_seed_each_choice_draws_its_own(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        await chat(client, n=2)
        assert [job.sampling.seed for job in engine.jobs] == [None, None]

    async def test_streamed_choices_come_interleaved_and_each_is_whole(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        first, second = reply("a", "b", stop_sequence="x"), reply("c", "d")
        engine.scripts = [[*first[:2], 0.05, *first[2:]], [*second[:2], 0.1, *second[2:]]]
        stream: Any = await openai_sdk.chat.completions.create(
            model="m", messages=USER, n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        found: dict[int, str] = {}
        for chunk in chunks:
            for choice in chunk.choices:
                found[choice.index] = found.get(choice.index, "") + (choice.delta.content or "")
        assert found == {0: "ab", 1: "cd"}
        order = [c.choices[0].index for c in chunks if c.choices and c.choices[0].delta.content]
        assert order == [0, 1, 0, 1]
        ends = [c.choices[0] for c in chunks if c.choices and c.choices[0].finish_reason]
        assert [(end.index, end.stop_reason) for end in ends] == [(0, "x"), (1, None)]
        assert [c.usage.completion_tokens for c in chunks if c.usage] == [4]
        assert chunks[-1].usage.prompt_tokens == 4

    async def test_the_sdk_gathers_streamed_choices(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.scripts = [reply("a"), reply("b", "c")]
        async with openai_sdk.chat.completions.stream(model="m", messages=USER, n=2) as stream:
            answer = await stream.get_final_completion()
        assert [c.message.content for c in answer.choices] == ["a", "bc"]

    @pytest.mark.parametrize("stream", [False, True])
    async def test_a_choice_that_fails_ends_all(
        self, client: httpx.AsyncClient, engine: FakeEngine, stream: bool
    ) -> None:
        failing = [*reply("a")[:2], GenerationFailed("The model raised.")]
        engine.scripts = [[*reply("b")[:2], 30.0], failing]
        response = await chat(client, n=2, stream=stream)
        error = events(response.text)[-1] if stream else response.json()
        assert error["error"]["message"] == "The model raised."
        assert response.status_code == (200 if stream else 500)
        assert [one.cancelled for one in engine.streams] == [True, False]
        assert all(one.closed.is_set() for one in engine.streams)

    async def test_a_choice_that_is_refused_ends_those_before(
        self, client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        submit = engine.submit

        async def second_fails(job: Any) -> Any:
            if job.choice:
                raise GenerationFailed("No.")
            return await submit(job)

        monkeypatch.setattr(engine, "submit", second_fails)
        assert (await chat(client, n=2)).status_code == 500
        assert engine.streams[0].cancelled

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_ends_all(
        self, live: str, engine: FakeEngine, stream: bool
    ) -> None:
        engine.script = [*reply("a")[:2], 30.0]
        body = {"messages": USER, "n": 3, "stream": stream}
        with (
            httpx.Client(base_url=live, timeout=0.5) as client,
            pytest.raises(httpx.ReadTimeout),
            client.stream("POST", "/v1/chat/completions", json=body) as response,
        ):
            response.read()
        eventually(lambda: len(engine.streams) == 3 and all(s.cancelled for s in engine.streams))

    async def test_of_a_client_that_stalls_little_is_read_ahead(self, engine: FakeEngine) -> None:
        engine.script = [Text("a")] * 100
        job = Job("req_1", Prompt(token_ids(range(3))))
        streams: Any = [await engine.submit(job) for _ in range(2)]
        items = merge(streams)
        await anext(items)
        await asyncio.sleep(0.02)
        assert sum(stream.yielded for stream in streams) <= 4
        await items.aclose()


class TestText:
    async def test_several_texts_are_completed_in_order(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.scripts = [reply("a"), reply("b"), reply("c"), reply("d")]
        answer = await openai_sdk.completions.create(
            model="m", prompt=["one", "two words"], n=2, best_of=2, seed=5
        )
        assert [(c.index, c.text) for c in answer.choices] == list(enumerate("abcd"))
        assert engine.texts == ["one", "two words"]
        assert [job.sampling.seed for job in engine.jobs] == [5, 6, 5, 6]
        assert [job.title for job in engine.jobs] == ["one", "one", "two words", "two words"]
        assert answer.usage is not None
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 4)

    async def test_lists_of_token_ids_are_completed_in_order(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        response = await complete(client, prompt=[[5, 6], [7]])
        assert [c["index"] for c in response.json()["choices"]] == [0, 1]
        assert [job.prompt.ids.tolist() for job in engine.jobs] == [[5, 6], [7]]

    async def test_a_stream_of_several_adds_up(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.scripts = [reply("a", "b"), reply("c", "d")]
        options = {"include_usage": True}
        response = await complete(
            client, prompt=["x", "y"], stream=True, stream_options=options, echo=True
        )
        chunks = events(response.text)
        assert texts(chunks) == {0: "xab", 1: "ycd"}
        assert chunks[-2]["usage"]["prompt_tokens"] == 2

    @pytest.mark.parametrize(("prompt", "shown"), [("One ", "One "), ([4, 5], "4 5")])
    async def test_the_prompt_is_repeated_on_request(
        self, client: httpx.AsyncClient, prompt: Any, shown: str
    ) -> None:
        whole = (await complete(client, prompt=prompt, echo=True)).json()
        assert whole["choices"][0]["text"] == f"{shown}Hello, world"

    async def test_an_answer_has_a_limited_number_of_log_probabilities_of_prompts(
        self, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(api, "MAX_PROMPT_LOGPROBS", 23)
        body = {"prompt": [[5, 6], [7, 8]], "n": 2, "logprobs": 2}
        assert (await complete(client, **body)).status_code == 200
        refused = await complete(client, **body, echo=True)
        assert refused.status_code == 400
        assert "of 8 prompt tokens are too many" in refused.json()["error"]["message"]
        assert (await complete(client, **{**body, "logprobs": 1}, echo=True)).status_code == 200

    async def test_the_stop_string_is_named(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply("a", reason="stop_sequence", stop_sequence="\n\n")
        choice = (await complete(client, prompt="x", stop="\n\n")).json()["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "\n\n")
