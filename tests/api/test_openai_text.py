"""Text completions, whole and streamed."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from mlxcache.types import Text, TokenLogprob
from tests.api.conftest import FakeEngine, reply
from tests.api.openai_bodies import events


class TestText:
    async def test_a_text_is_continued(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        answer = await openai_sdk.completions.create(model="m", prompt="Once upon a", stop=["."])
        assert answer.id.startswith("cmpl-")
        assert answer.choices[0].text == "Hello, world"
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.total_tokens == 6
        assert engine.texts == ["Once upon a"]
        assert (engine.jobs[0].max_tokens, engine.jobs[0].stop) == (16, (".",))
        assert engine.jobs[0].api == "completions"

    async def test_a_streamed_text_adds_up(self, openai_sdk: openai.AsyncOpenAI) -> None:
        stream = await openai_sdk.completions.create(
            model="m", prompt=["Once"], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(c.choices[0].text for c in chunks if c.choices) == "Hello, world"
        assert chunks[-2].choices[0].finish_reason == "stop"
        assert chunks[-1].usage is not None
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
