"""Several choices, log-probabilities and continued messages, by the SDKs from a real model."""

from __future__ import annotations

import re
from typing import Any

import anthropic
import mlx.core as mx
import openai
import pytest
from mlx_lm import load as mlx_lm_load

from tests.conftest import ToyMaker
from tests.server.api import Api, user, words


@pytest.fixture
def client(llama: Api) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{llama.url}/v1", api_key="any", max_retries=0)


def gathered(chunks: Any) -> dict[int, dict[str, Any]]:
    """Text, ends and log-probabilities of each choice of a stream."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            one = found.setdefault(choice.index, {"text": "", "logprobs": [], "end": None})
            text = choice.text if hasattr(choice, "text") else choice.delta.content or ""
            one["text"] += text
            one["end"] = choice.finish_reason or one["end"]
            if choice.logprobs is not None:
                one["logprobs"].append(choice.logprobs)
    return found


def shown(reply: Any) -> str:
    """The text that the bytes of its tokens make."""
    text = b"".join(bytes(t.bytes) for t in reply).decode(errors="replace").lstrip()
    return text.replace("\0", "\u0100")  # mlx-lm's detokenizer spells the byte 0 so


class TestSeveral:
    def test_the_prompt_is_computed_once_and_each_choice_has_its_seed(self, llama, client):
        body: dict[str, Any] = {
            "model": "m",
            "messages": [user(words(700, 400))],
            "max_tokens": 20,
            "temperature": 1,
        }
        response = client.chat.completions.with_raw_response.create(**body, n=4, seed=5)
        reply = response.parse()
        texts = [choice.message.content for choice in reply.choices]
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        assert len(set(texts)) == 4
        id = response.headers["x-mlxcache-request"]
        records = [llama.record(f"{id}-{i}" if i else id) for i in range(4)]
        length = records[0]["prompt_tokens"]
        assert length > 400
        records.sort(key=lambda record: -record["fed_tokens"])  # any of them may come first
        assert [record["fed_tokens"] for record in records[1:]] == [1, 1, 1]
        assert records[0]["fed_tokens"] > 400
        assert {record["cached_tokens"] for record in records[1:]} == {length - 1}
        assert reply.usage is not None
        assert reply.usage.prompt_tokens == length
        assert reply.usage.completion_tokens == sum(r["generated_tokens"] for r in records)
        assert reply.usage.prompt_tokens_details is not None
        assert reply.usage.prompt_tokens_details.cached_tokens == records[0]["cached_tokens"]

        alone = client.chat.completions.create(**body, seed=7)
        assert alone.choices[0].message.content == texts[2]
        streamed = gathered(client.chat.completions.create(**body, n=4, seed=5, stream=True))
        assert [streamed[i]["text"] for i in range(4)] == texts
        greedy = client.chat.completions.create(**body | {"temperature": 0}, n=3)
        assert len({choice.message.content for choice in greedy.choices}) == 1

    def test_several_prompts_are_each_completed_as_alone(self, llama, client):
        wishes: dict[str, Any] = {"model": "m", "max_tokens": 8, "temperature": 0}
        prompts = [words(710, 20), words(711, 5), words(710, 20) + " and"]
        alone = [client.completions.create(prompt=one, **wishes) for one in prompts]
        together = client.completions.create(prompt=prompts, **wishes)
        assert [c.text for c in together.choices] == [one.choices[0].text for one in alone]
        used = [one.usage.prompt_tokens for one in (together, *alone) if one.usage]
        assert used[0] == sum(used[1:])
        echoed = client.completions.create(prompt=prompts, stream=True, echo=True, **wishes)
        found = gathered(echoed)
        assert [found[i]["text"] for i in range(3)] == [
            prompt + choice.text for prompt, choice in zip(prompts, together.choices, strict=True)
        ]


class TestLogprobs:
    def test_of_a_chat_they_make_up_the_text(self, client: openai.OpenAI) -> None:
        body: dict[str, Any] = {
            "model": "m",
            "messages": [user("Tell me about lists.")],
            "max_tokens": 30,
            "n": 2,
            "seed": 3,
            "logprobs": True,
            "top_logprobs": 2,
        }
        whole = client.chat.completions.create(**body).choices
        streamed = gathered(client.chat.completions.create(**body, stream=True))
        for choice in whole:
            assert choice.logprobs is not None
            tokens = choice.logprobs.content or []
            assert shown(tokens) == (choice.message.content or "").lstrip()
            assert all(len(token.top_logprobs) == 2 for token in tokens)
            parts = [token for part in streamed[choice.index]["logprobs"] for token in part.content]
            assert parts == tokens

    def test_of_a_text_they_have_the_places_of_their_tokens(self, client: openai.OpenAI) -> None:
        body: dict[str, Any] = {
            "model": "m",
            "prompt": ["Once upon", "A list of"],
            "max_tokens": 30,
            "seed": 3,
            "logprobs": 2,
        }
        whole = client.completions.create(**body).choices
        streamed = gathered(client.completions.create(**body, stream=True))
        for choice in whole:
            found: Any = choice.logprobs
            assert len(found.tokens) == 30
            for token, at in zip(found.tokens, found.text_offset, strict=True):
                assert token.startswith("bytes:") or choice.text.startswith(token, at)
            for token, value, top in zip(
                found.tokens, found.token_logprobs, found.top_logprobs, strict=True
            ):
                assert top[token] == value
                assert 2 <= len(top) <= 3
            parts = streamed[choice.index]["logprobs"]
            assert [t for part in parts for t in part.tokens] == found.tokens
            assert [at for part in parts for at in part.text_offset] == found.text_offset

    @pytest.mark.parametrize("tokens", [0, 1])
    def test_of_a_prompt_they_are_those_of_a_forward_pass_of_all_of_it(
        self, client: openai.OpenAI, llama: Api, toy: ToyMaker, tokens: int
    ) -> None:
        """Whether or not its KV is cached; nothing of the request is kept."""
        model, tokenizer = mlx_lm_load(str(toy("llama")))
        told = ["A list of things", words(720, 120), "A"]
        ids = [tokenizer.encode(one) for one in told]
        body: dict[str, Any] = {"model": "m", "max_tokens": tokens, "temperature": 0}
        client.completions.create(prompt=told[1], **body | {"max_tokens": 1})
        before = llama.http.get("/v1/cache").json()["tokens"]["cached"]
        assert len(ids[2]) == 1
        asked: list[Any] = [told, ids, told[0], ids[0]]
        for prompt in asked:
            wishes = body | {"prompt": prompt, "echo": True, "logprobs": 2}
            reply = client.completions.create(**wishes)
            streamed = gathered(client.completions.create(**wishes, stream=True))
            assert len(reply.choices) == (3 if prompt in (told, ids) else 1)
            assert reply.usage is not None
            assert reply.usage.completion_tokens == tokens * len(reply.choices)
            for choice in reply.choices:
                found: Any = choice.logprobs
                fed = ids[choice.index]
                rows = mx.softmax(model(mx.array([fed]))[0].astype(mx.float32), axis=-1)
                right = [mx.log(rows[i, t]).item() for i, t in enumerate(fed[1:])]
                assert choice.text.startswith(told[choice.index])
                assert choice.finish_reason == "length"
                assert found.token_logprobs[0] is found.top_logprobs[0] is None
                assert found.token_logprobs[1 : len(fed)] == pytest.approx(right, abs=2e-4)
                assert len(found.tokens) == len(fed) + tokens
                for token, at in zip(found.tokens, found.text_offset, strict=True):
                    assert token.startswith("bytes:") or choice.text.startswith(token, at)
                for value, top in zip(
                    found.token_logprobs[1:], found.top_logprobs[1:], strict=True
                ):
                    assert value <= max(top.values()) + 1e-6
                    assert 2 <= len(top) <= 3
                parts = streamed[choice.index]["logprobs"]
                assert [t for part in parts for t in part.tokens] == found.tokens
                assert [v for part in parts for v in part.token_logprobs] == found.token_logprobs
        assert llama.http.get("/v1/cache").json()["tokens"]["cached"] == before

    def test_those_of_a_stop_string_are_left_out(self, client: openai.OpenAI) -> None:
        body: dict[str, Any] = {
            "model": "m",
            "messages": [user("Tell me about lists.")],
            "max_tokens": 30,
            "temperature": 0,
            "logprobs": True,
        }
        full = client.chat.completions.create(**body).choices[0].message.content or ""
        stop = full[len(full) // 2 :][:5]
        for stream in (False, True):
            reply: Any = client.chat.completions.create(**body, stop=[stop], stream=stream)
            if stream:
                (one,) = gathered(reply).values()
                text = one["text"]
                tokens = [token for part in one["logprobs"] for token in part.content]
            else:
                text, tokens = reply.choices[0].message.content, reply.choices[0].logprobs.content
                assert reply.choices[0].stop_reason == stop
            assert text == full[: full.index(stop)]
            assert shown(tokens).startswith(text.lstrip())
            assert len(shown(tokens)) < len(text) + len(stop)

    def test_of_a_reply_that_thinks_they_are_those_of_its_text(self, thinking: Api) -> None:
        client = openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="any", max_retries=0)
        body: dict[str, Any] = {"model": "m", "messages": [user("Hi")], "max_tokens": 120}
        for seed in range(3):
            reply = client.chat.completions.create(**body, seed=seed, logprobs=True).choices[0]
            assert reply.logprobs is not None
            tokens = reply.logprobs.content or []
            assert shown(tokens).strip() == (reply.message.content or "").strip()


class TestContinued:
    def test_a_format_holds_for_the_new_text(self, llama: Api, client: openai.OpenAI) -> None:
        """The text that was begun is not a part of it."""
        messages: list[Any] = [user("Hi"), {"role": "assistant", "content": "A number:"}]
        reply = client.chat.completions.create(
            model="m", messages=messages, max_tokens=30, extra_body={"guided_regex": " [0-9]{1,4}"}
        )
        assert re.fullmatch(" [0-9]{1,4}", reply.choices[0].message.content or "")

    def test_both_sdks_get_the_rest_of_a_message_and_its_next_turn_is_warm(self, thinking):
        """A model that thinks first does not, where its answer was begun."""
        openai_sdk = openai.OpenAI(base_url=f"{thinking.url}/v1", api_key="any", max_retries=0)
        claude = anthropic.Anthropic(base_url=thinking.url, api_key="any", max_retries=0)
        messages: list[Any] = [user(words(720, 120)), {"role": "assistant", "content": "The list:"}]
        wishes: dict[str, Any] = {"model": "m", "max_tokens": 30, "messages": messages}
        reply = openai_sdk.chat.completions.create(**wishes, temperature=0)
        text = reply.choices[0].message.content or ""
        assert text
        assert not text.startswith("The list:")
        assert getattr(reply.choices[0].message, "reasoning_content", None) is None
        same = claude.messages.create(**wishes, extra_body={"temperature": 0})
        assert [block.to_dict() for block in same.content] == [{"type": "text", "text": text}]
        with claude.messages.stream(**wishes, extra_body={"temperature": 0}) as stream:
            assert stream.get_final_text() == text
        assert same.usage.cache_read_input_tokens == reply.usage.prompt_tokens - 1
        other = openai_sdk.chat.completions.create(
            **wishes, temperature=0, extra_body={"continue_final_message": False}
        )
        assert other.usage.prompt_tokens > reply.usage.prompt_tokens

    def test_a_tool_call_cannot_be_continued(self, thinking: Api) -> None:
        claude = anthropic.Anthropic(base_url=thinking.url, api_key="any", max_retries=0)
        call: Any = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {}}
        messages: list[Any] = [user("Hi"), {"role": "assistant", "content": [call]}]
        with pytest.raises(anthropic.BadRequestError, match="ends in tool_use"):
            claude.messages.create(model="m", max_tokens=5, messages=messages)
