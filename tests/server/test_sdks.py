"""The SDKs of both APIs against a real model: streams, stops, seeds, log-probabilities, usage."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest

from tests.server.api import END_IDS, Api, user, words

QUESTION = [{"role": "system", "content": "You are helpful."}, user("Tell me about lists.")]
TOOL = {"name": "read", "description": "Reads a file.", "input_schema": {"type": "object"}}
FUNCTION = {"name": "read", "description": "Reads a file.", "parameters": {"type": "object"}}


@pytest.fixture
def ask(llama: Api) -> Any:
    """A greedy chat completion of 40 tokens, by the SDK."""
    client = openai.OpenAI(base_url=f"{llama.url}/v1", api_key="any", max_retries=0)

    def create(**extra: Any) -> Any:
        wishes: dict[str, Any] = {"max_tokens": 40, "temperature": 0, "messages": QUESTION}
        return client.chat.completions.create(model="any", **(wishes | extra))

    return create


@pytest.fixture
def claude(thinking: Api) -> anthropic.Anthropic:
    """The SDK on the model that reasons."""
    return anthropic.Anthropic(base_url=thinking.url, api_key="any", max_retries=0)


def text_of(chunks: Any) -> tuple[str, Any]:
    text, usage = "", None
    for chunk in chunks:
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    return text, usage


class TestOpenAI:
    def test_a_stream_says_what_a_whole_reply_says(self, ask: Any) -> None:
        tools = [{"type": "function", "function": FUNCTION}]
        whole = ask(tools=tools)
        options = {"include_usage": True}
        text, usage = text_of(ask(tools=tools, stream=True, stream_options=options))
        assert text == whole.choices[0].message.content
        assert usage.prompt_tokens == whole.usage.prompt_tokens
        assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1
        assert usage.completion_tokens == whole.usage.completion_tokens == 40

    def test_a_seed_draws_the_same_alone_and_beside_others(self, ask: Any) -> None:
        def drawn(seed: int) -> str:
            return str(ask(seed=seed, temperature=1).choices[0].message.content)

        alone = [drawn(seed) for seed in range(6)]
        with ThreadPoolExecutor(6) as pool:
            assert list(pool.map(drawn, range(6))) == alone
        assert len(set(alone)) == 6

    def test_a_continued_completion_of_token_ids(self, llama: Api) -> None:
        client = openai.OpenAI(base_url=f"{llama.url}/v1", api_key="any", max_retries=0)
        wishes: dict[str, Any] = {"model": "any", "max_tokens": 6, "temperature": 0}
        reply = client.completions.create(prompt=[40, 41, 42], **wishes)
        assert reply.usage
        assert reply.usage.prompt_tokens == 3
        again = client.completions.create(prompt=[40, 41, 42], stream=True, **wishes)
        assert "".join(chunk.choices[0].text for chunk in again) == reply.choices[0].text


class TestAnthropic:
    def test_reasoning_is_signed_and_comes_back_unharmed(self, claude: anthropic.Anthropic) -> None:
        """Every turn after the first feeds only what is new, with tools and with reasoning."""
        messages: list[Any] = [user(words(1, 100))]
        before = 0
        seen = set()
        for turn in range(4):
            reply = claude.messages.create(
                model="any",
                max_tokens=200,
                messages=messages,
                tools=[TOOL],  # type: ignore[list-item]
                extra_body={"temperature": 0},
            )
            usage = reply.usage
            cached = usage.cache_read_input_tokens or 0
            prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
            if turn:
                assert prompt - cached <= prompt - before + 64
            before = prompt
            seen |= {block.type for block in reply.content}
            blocks = [block.to_dict() for block in reply.content]
            messages += [{"role": "assistant", "content": blocks or "."}, user(words(turn + 2, 9))]
        assert seen == {"thinking", "text"}

    def test_counts_are_disjoint_and_add_up(self, claude: anthropic.Anthropic) -> None:
        """Read, created up to the mark, and the rest; count_tokens says the same sum."""
        mark: Any = {"type": "ephemeral"}
        conversation: dict[str, Any] = {
            "model": "any",
            "system": [{"type": "text", "text": words(50, 60), "cache_control": mark}],
            "messages": [user(words(51, 20))],
        }
        usage = claude.messages.create(max_tokens=2, **conversation).usage
        parts = (
            usage.input_tokens,
            usage.cache_creation_input_tokens or 0,
            usage.cache_read_input_tokens or 0,
        )
        assert parts[1] > 100
        assert parts[0] > 40
        assert sum(parts) == claude.messages.count_tokens(**conversation).input_tokens
        again = claude.messages.create(max_tokens=2, **conversation).usage
        assert (again.input_tokens, again.cache_creation_input_tokens) == (1, 0)
        assert again.cache_read_input_tokens == sum(parts) - 1

    @pytest.mark.parametrize("mode", ["adaptive", "disabled"])
    def test_a_reply_that_comes_back_with_its_thinking_is_counted(self, claude, mode):
        """With tools, a document, an effort and a text to go on with."""
        source = {"type": "text", "media_type": "text/plain", "data": words(61, 30)}
        document = {"type": "document", "title": "T", "source": source}
        conversation: dict[str, Any] = {
            "model": "any",
            "system": [{"type": "text", "text": words(62, 20)}],
            "messages": [{"role": "user", "content": [document]}],
            "tools": [{"name": "f", "input_schema": {"type": "object"}, "input_examples": [{}]}],
            "thinking": {"type": mode},
            "output_config": {"effort": "low"},
        }
        first = claude.messages.create(max_tokens=30, **conversation)
        conversation["messages"] += [
            {"role": "assistant", "content": first.content},
            user("Go on."),
            {"role": "assistant", "content": "Well:"},
        ]
        count = claude.messages.count_tokens(**conversation).input_tokens
        usage = claude.messages.create(max_tokens=2, **conversation).usage
        read, made = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        assert count == usage.input_tokens + (read or 0) + (made or 0)

    def test_no_token_makes_the_next_request_warm(self, claude: anthropic.Anthropic) -> None:
        asked: dict[str, Any] = {"model": "any", "messages": [user(words(63, 60))]}
        warmed = claude.messages.create(max_tokens=0, **asked)
        assert (warmed.content, warmed.stop_reason) == ([], "max_tokens")
        assert warmed.usage.output_tokens == 0
        usage = claude.messages.create(max_tokens=2, **asked).usage
        length = warmed.usage.input_tokens + (warmed.usage.cache_read_input_tokens or 0)
        assert (usage.input_tokens, usage.cache_read_input_tokens) == (1, length - 1)

    def test_a_chat_is_warmed_where_the_model_would_think(self, thinking: Api) -> None:
        system, messages = words(64, 9), [user(words(65, 30))]
        body = {"model": "any", "system": system, "messages": messages}
        warmed = thinking.post("/v1/cache/warm", body)
        assert warmed.status_code == 200, warmed.text
        answer = thinking.message(messages, system=system)
        assert answer.cached == answer.prompt - 1 == warmed.json()["prompt_tokens"] - 1

    def test_what_this_server_does_not_have_is_not_found(self, claude: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.NotFoundError, match="batches is not supported") as missing:
            claude.messages.batches.list()
        assert missing.value.type == "not_found_error"
        (model,) = claude.models.list()
        assert model.max_input_tokens == claude.models.retrieve("any").max_input_tokens


class TestLabels:
    def test_a_prompt_cache_key_is_a_label(self, llama: Api) -> None:
        """The last of all, and never a key of the cache."""
        answers = [llama.chat([user(words(60, 30))], prompt_cache_key=key) for key in ("a", "b")]
        assert [llama.record(answer.id)["session"] for answer in answers] == ["a", "b"]
        assert answers[1].fed == 1


def test_a_reply_that_never_ends_by_itself_ends_at_its_limit(llama: Api) -> None:
    """A bias is obeyed, and no limit beyond the context is refused."""
    answer = llama.chat([user("Hi")], tokens=300, logit_bias=END_IDS)
    assert answer.generated == 300
