"""A count of a prompt's tokens is what a request with the same body then reports."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxcache.api.app import create_app
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.types import Chat, Prompt
from tests.api.conftest import INFO, FakeEngine
from tests.api.fake import OneModel
from tests.prompt.families import FAMILIES
from tests.prompt.replaying import Served
from tests.prompt.test_images import BUILDER as TAKES_IMAGES
from tests.wire.anthropic_bodies import MARK, assistant, result, text, tool, use, user

COUNT, MESSAGES = "/v1/messages/count_tokens", "/v1/messages"
STATUS = "gitStatus: This is the git status.\n\nCurrent branch: main\n\nStatus:\n"


class Renders(FakeEngine):
    """An engine without a model that renders with a family's real template and tokenizer.

    `prompts` has all prompts, in order.
    """

    def __init__(self, builder: PromptBuilder):
        super().__init__()
        self._builder = builder
        self.prompts: list[list[int]] = []
        self.info = replace(INFO, has_images=builder.takes_images, takes_effort=True)

    async def render(
        self, chat: Chat, *, session: str | None = None, stop: Sequence[str] = ()
    ) -> Prompt:
        prompt = self._builder.chat(chat, session, stop)
        self.prompts.append(prompt.ids.tolist())
        return prompt


@cache
def family(name: str) -> Renders:
    return Renders(TAKES_IMAGES if name == "images" else Served(name).builder)


def send(engine: Renders, path: str, body: Mapping[str, Any], **headers: str) -> httpx.Response:
    async def post() -> httpx.Response:
        transport = httpx.ASGITransport(create_app(OneModel(engine)))  # type: ignore[arg-type]
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, content=json.dumps(body), headers=headers)

    return asyncio.run(post())


def counted(engine: Renders, body: Mapping[str, Any], **headers: str) -> int:
    response = send(engine, COUNT, body, **headers)
    assert response.status_code == 200, response.text
    return int(response.json()["input_tokens"])


def reported(engine: Renders, body: Mapping[str, Any], **headers: str) -> int:
    response = send(engine, MESSAGES, {"max_tokens": 1, **body}, **headers)
    assert response.status_code == 200, response.text
    usage = response.json()["usage"]
    kinds = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    assert usage["cache_read_input_tokens"] == engine.cached_tokens
    return sum(usage[kind] for kind in kinds)


# -- bodies ----------------------------------------------------------------------------------

PICTURE = {
    "type": "image",
    "source": {"type": "base64", "data": base64.b64encode(b"a picture").decode()},
}
WORDS = st.sampled_from(["", "one", "two\nlines", " padded ", "</think>", "é 🦀", "a b " * 9])
MARKS = st.sampled_from([{}, MARK])
TEXTS = st.builds(lambda words, mark: text(words, **mark), WORDS, MARKS)
DOCUMENTS = st.builds(
    lambda title, data: {
        "type": "document",
        "title": title,
        "source": {"type": "text", "data": data},
    },
    WORDS,
    WORDS,
)
FOUND = st.builds(
    lambda title, blocks: {
        "type": "search_result",
        "title": title,
        "source": "https://example.org",
        "content": blocks,
    },
    WORDS,
    st.lists(TEXTS, max_size=2),
)
CALLED = {"type": "tool_reference", "tool_name": "Later"}
ROUNDS = st.builds(
    lambda thought, said, args, found, after: [
        assistant({"type": "thinking", "thinking": thought, "signature": ""}, said, use(**args)),
        user(result(found), *after),
    ],
    WORDS,
    WORDS,
    st.dictionaries(st.sampled_from(["path", "mode"]), WORDS, max_size=2),
    st.lists(TEXTS | DOCUMENTS | FOUND | st.just(CALLED), min_size=1, max_size=3),
    st.lists(TEXTS, max_size=1),
)
REPLIES = WORDS.map(lambda words: [assistant(words), user("and now?")])
NOTES = st.builds(
    lambda words, until, effort: [
        assistant("hm"),
        user("so?"),
        {
            "role": "system",
            "content": words,
            "clear_at": until,
            "output_config": {"effort": effort},
        },
    ],
    WORDS,
    st.sampled_from([None, "never", "next_user_message"]),
    st.sampled_from([None, "low"]),
)
ENDS = st.sampled_from([[], [assistant("Sure: {")], [assistant("")]])
CONVERSATIONS = st.builds(
    lambda first, parts, end: [user("Hi", *first), *chain(*parts), *end],
    st.lists(TEXTS | DOCUMENTS | FOUND, max_size=3),
    st.lists(ROUNDS | REPLIES | NOTES, max_size=4),
    ENDS,
)
TOOLS = [
    tool("Read", **MARK),
    tool("Later", defer_loading=True),
    tool("Strict", strict=True, input_examples=[{"path": "a"}]),
    {"type": "bash_20250124", "name": "bash"},
]
CHOICES: list[dict[str, Any]] = [{"type": kind} for kind in ("auto", "any", "none")]
CHOICES.append({"type": "tool", "name": "Strict", "disable_parallel_tool_use": True})
FORMAT = {"type": "json_schema", "schema": {"type": "object"}}
WITH_TOOLS = st.fixed_dictionaries(
    {"tools": st.permutations(TOOLS)}, optional={"tool_choice": st.sampled_from(CHOICES)}
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "system": WORDS | st.lists(TEXTS, max_size=3),
        "thinking": st.sampled_from(
            [
                {"type": "enabled", "budget_tokens": 1024},
                {"type": "adaptive", "display": "omitted"},
                {"type": "disabled"},
                {"type": "between_tools"},
            ]
        ),
        "output_config": st.fixed_dictionaries(
            {}, optional={"effort": st.sampled_from(["low", "high"]), "format": st.just(FORMAT)}
        ),
        "output_format": st.just(FORMAT),
        "context_management": st.just({"edits": [{"type": "clear_thinking_20251015"}]}),
        "cache_control": st.just({"type": "ephemeral"}),
        "service_tier": st.just("standard_only"),
    },
)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*FAMILIES, "images"]),
    CONVERSATIONS,
    SETTINGS,
    WITH_TOOLS | st.just({}),
    st.booleans(),
)
def test_a_count_is_what_a_request_reports(
    name: str, messages: list[Any], settings: dict[str, Any], tools: dict[str, Any], warm: bool
) -> None:
    """Whatever is in the body, in the templates of all families, before and after the request."""
    engine = family(name)
    if name == "images":
        messages = [user(PICTURE, "and"), *messages]
    body = {"model": "m", "messages": messages, **tools, **settings}
    refused = send(engine, MESSAGES, {"max_tokens": 1, **body}).status_code != 200
    if refused:  # a format for a message that is continued, or a message that the family refuses
        return
    before = counted(engine, body)
    engine.cached_tokens = before // 2 if warm else 0
    assert reported(engine, body) == before == counted(engine, body)


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gemma3", "mistral"])
def test_a_reply_with_odd_tokens_is_counted_as_it_will_be_fed(name: str) -> None:
    """The model's own tokens come back, which are more than those of its text."""
    served = Served(name, seed=3)
    engine = Renders(served.builder)
    first: dict[str, Any] = {"model": "m", "messages": [user("Write a long story.")]}
    prompt = served.builder.chat(Chat([{"role": "user", "content": "Write a long story."}]), "s")
    story = "Once there was a programmer who wrote tests all day.\n" * 4
    said, _ = served.reply(prompt, served.writes("Hm.", story.strip(), []), [])
    thought = {"type": "thinking", "thinking": said.get("reasoning_content", ""), "signature": ""}
    turn = [assistant(thought, said["content"]), user("Go on.")]
    body = first | {"messages": [*first["messages"], *turn]}
    count = counted(engine, body)
    assert count == reported(engine, body)
    fresh = counted(Renders(Served(name).builder), body)
    if name == "qwen3":  # its template drops earlier thinking: no KV follows that could be reused
        assert count == fresh
    else:
        assert count > fresh


def test_what_the_session_remembers_is_counted_too() -> None:
    """An older git status is where it was new in this session."""
    served = Served("qwen3", rules={"git_status": True})
    engine = Renders(served.builder)
    label = {"X-Claude-Code-Session-Id": "a"}

    def body(status: str, *messages: dict[str, Any]) -> dict[str, Any]:
        system = f"You are an agent.\n\n{STATUS}{status}"
        return {"model": "m", "system": system, "messages": [*messages]}

    reported(engine, body(" M old.py", user("a")), **label)
    later = body(" M new.py", user("a"), assistant("b"), user("c"))
    count = counted(engine, later, **label)
    assert count == reported(engine, later, **label)
    assert count > counted(engine, later)


def test_stop_strings_that_keep_a_text_as_it_is_are_counted_too() -> None:
    """A path whose UUID is part of a stop string is not rewritten."""
    uuid = "0a1b2c3d-1111-4222-8333-444455556666"
    engine = Renders(Served("qwen3", rules={"uuid": True}).builder)
    system = f"Session folder: /tmp/claude-501/-home-a/{uuid}/scratchpad"
    body = {"model": "m", "system": system, "messages": [user("a")], "stop_sequences": [uuid]}
    assert counted(engine, body) == reported(engine, body)
    counted(engine, body | {"stop_sequences": []})
    count, request, without = engine.prompts
    assert count == request != without


@pytest.mark.parametrize(
    "wrong", [{"output_format": {"type": "x"}}, {"tool_choice": {"type": "x"}}], ids=str
)
async def test_what_a_message_may_not_ask_for_is_not_counted(
    client: httpx.AsyncClient, wrong: dict[str, Any]
) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **wrong}
    assert (await client.post("/v1/messages/count_tokens", json=body)).status_code == 400
