"""Warm greedy output equals mlx-lm's for the whole prompt, token for token, over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from mlx_lm import generate, load

from tests.conftest import ToyMaker
from tests.server.api import CHAT, MESSAGES, Answer, Api, request, user, words
from tests.server.conftest import ENCODES_ANEW, Start

NEW = 64
"""Tokens beside what is new that a turn may feed."""

every_family = pytest.mark.parametrize(
    "family", ["llama", pytest.param("gemma3", marks=pytest.mark.slow), "qwen3_5"]
)


@pytest.fixture
def server(llama: Api, start: Start, toy: ToyMaker) -> Callable[[str], Api]:
    def of(family: str) -> Api:
        return (
            llama
            if family == "llama"
            else start(family, toy(family), "--prefill-chunk", "256", *ENCODES_ANEW)
        )

    return of


@lru_cache
def _loaded(model: Path) -> tuple[Any, Any]:
    return load(str(model))[:2]


def greedy(model: Path, messages: Sequence[Mapping[str, Any]], tokens: int = 24) -> str:
    """The likeliest `tokens` tokens after a conversation, as text."""
    network, tokenizer = _loaded(model)
    prompt = tokenizer.apply_chat_template(list(messages), add_generation_prompt=True)
    return str(generate(network, tokenizer, prompt, max_tokens=tokens))


def converse(api: Api, seed: int, turns: int) -> tuple[list[dict[str, Any]], Answer]:
    messages = [{"role": "system", "content": words(seed, 60)}]
    before = 0
    for turn in range(turns):
        messages.append(user(words(seed + turn, 30)))
        answer = api.chat(messages)
        record = api.record(answer.id)
        assert record["cached_tokens"] == answer.cached
        assert record["cached_tokens"] + record["fed_tokens"] == answer.prompt
        if before:
            assert answer.fed <= answer.prompt - before + NEW
        before = answer.prompt
        if turn < turns - 1:
            messages.append({"role": "assistant", "content": answer.text})
    return messages, answer


@every_family
def test_a_conversation_of_four_turns(server, toy, family):
    """Each turn feeds what is new, and the last one's reply is as if all had been fed."""
    messages, answer = converse(server(family), 1000, 4)
    assert answer.cached > 400
    assert answer.text == greedy(toy(family), messages)


@every_family
def test_six_conversations_at_once(server, toy, family):
    """Batched or in turn, no conversation's tokens depend on the others."""
    api = server(family)
    with ThreadPoolExecutor(6) as pool:
        ends = list(pool.map(lambda i: converse(api, 2000 + 10 * i, 2), range(6)))
    for messages, answer in ends:
        assert answer.cached > 200
        assert answer.text == greedy(toy(family), messages)


@pytest.mark.parametrize(
    ("family", "path", "stream"),
    [
        ("llama", CHAT, True),
        pytest.param("llama", CHAT, False, marks=pytest.mark.slow),
        ("llama", MESSAGES, True),
        pytest.param("llama", MESSAGES, False, marks=pytest.mark.slow),
        pytest.param("gemma3", MESSAGES, True, marks=pytest.mark.slow),
        ("qwen3_5", MESSAGES, True),
    ],
)
def test_a_cancelled_prefill_is_continued_by_its_retry(server, toy, family, path, stream):
    """A client that disconnects loses nothing: its retry continues from there."""
    api = server(family)
    session = f"{family}{path}{stream}"
    messages = [user(words(3000 + len(session), 400))]
    body = {"model": "m", "messages": messages, "max_tokens": 24, "temperature": 0}
    with api.raw(request(path, body | {"stream": stream}, f"X-Session-Id: {session}")):
        api.wait(session, "prefill", "decode")
    left = api.wait(session, "cancelled", seconds=10)
    retry = api.chat(messages) if path == CHAT else api.message(messages)
    assert retry.cached >= min(left["cached_tokens"] + left["fed_tokens"], retry.prompt - 16)
    assert retry.text == greedy(toy(family), messages)


@every_family
def test_a_cancelled_reply_is_continued_by_its_retry(server, toy, family):
    """Also in the middle of the reply: its prompt is not computed again."""
    api = server(family)
    messages = [user(words(4000, 50))]
    body = {"messages": messages, "max_tokens": 50_000, "temperature": 0, "stream": True}
    with api.http.stream("POST", CHAT, json=body, headers={"X-Session-Id": "half"}) as reply:
        for _, line in zip(range(20), reply.iter_lines(), strict=False):
            assert "error" not in line
    left = api.wait("half", "cancelled", seconds=10)
    assert left["generated_tokens"] > 0
    retry = api.chat(messages)
    assert retry.fed <= 16
    assert retry.text == greedy(toy(family), messages)
