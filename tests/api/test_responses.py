"""The Responses API over a scripted engine: objects, streams, stored responses."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pydantic
import pytest
from openai.types.responses import Response, ResponseStreamEvent

from mlxcache.api import responses
from mlxcache.api.http import ApiSettings
from mlxcache.api.responses import with_silences
from mlxcache.errors import BadRequest, ContextLengthExceeded, DiskFull, GenerationFailed, NotReady
from mlxcache.store.database import TemporaryDatabase
from mlxcache.store.reply_rows import StoredResponse
from mlxcache.store.sessions import Sessions
from mlxcache.types import Text, Thinking, TokenLogprob, ToolCall
from tests.api.conftest import FakeEngine, reply, soon

EVENT: pydantic.TypeAdapter[Any] = pydantic.TypeAdapter(ResponseStreamEvent)
CALL = ToolCall(0, "call_1", "read", '{"path": "a"}')
READ: Any = {"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": False}
PATCH = {"type": "custom", "name": "patch"}
FIELDS = {"store": False, "model": "m"}


class FakeBook(list[Any]):
    """The sessions of an engine, as far as responses are concerned; a list of the labels, too."""

    def __init__(self) -> None:
        super().__init__()
        self._rows = Sessions(TemporaryDatabase())
        self.full = False
        self.saving, self.go_on = asyncio.Event(), asyncio.Event()
        self.go_on.set()

    async def save_response(self, response: StoredResponse) -> None:
        self.saving.set()
        await self.go_on.wait()
        if self.full:
            raise DiskFull("The disk is full.")
        self._rows.save_response(response)

    async def response(self, id: str) -> StoredResponse:
        return self._rows.response(id, None)

    async def response_chain(self, id: str) -> Sequence[StoredResponse]:
        return self._rows.response_chain(id, None)

    async def delete_response(self, id: str) -> None:
        self._rows.delete_response(id, None)


@pytest.fixture
def book(engine: FakeEngine) -> FakeBook:
    engine.book = engine.sessions = FakeBook()
    book: FakeBook = engine.book
    return book


pytestmark = pytest.mark.usefixtures("book")


async def create(client: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    return await client.post("/v1/responses", json={"model": "m", "input": "Hi"} | fields)


async def stream(client: httpx.AsyncClient, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed response, each checked against the SDK's types."""
    text = (await create(client, stream=True, **fields)).text
    blocks = [block.splitlines() for block in text.strip().split("\n\n")]
    found = []
    for lines in blocks:
        if lines[0].startswith(":"):
            continue
        event = json.loads(lines[1].removeprefix("data: "))
        assert lines[0] == f"event: {event['type']}"
        EVENT.validate_python(event)
        found.append(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


def without_ids(response: dict[str, Any]) -> dict[str, Any]:
    """A response without what differs from one request to the next."""
    times = {"created_at": 0, "completed_at": 0, "id": ""}
    output = [{**item, "id": ""} for item in response["output"]]
    return {**response, **times, "output": output}


class TestReplies:
    @pytest.mark.parametrize(
        "pieces",
        [
            ["Hello", " there"],
            [Thinking("Let me"), Thinking(" see."), Text("Yes."), CALL],
            [CALL, ToolCall(1, "call_2", "patch", '{"input": "*** x\\n"}')],
            [Thinking("Only thought")],
            [],
        ],
    )
    async def test_a_stream_builds_what_a_whole_response_is(
        self, client: httpx.AsyncClient, engine: FakeEngine, pieces: list[Any]
    ) -> None:
        engine.script = reply(*pieces)
        fields = FIELDS | {"tools": [READ, PATCH], "include": ["reasoning.encrypted_content"]}
        whole = (await create(client, **fields)).json()
        Response.model_validate(whole)
        events = await stream(client, **fields)
        assert without_ids(events[-1]["response"]) == without_ids(whole)
        assert events[-1]["type"] == "response.completed"
        done = [e["item"] for e in events if e["type"] == "response.output_item.done"]
        assert done == events[-1]["response"]["output"]
        added = [e["item"]["id"] for e in events if e["type"] == "response.output_item.added"]
        assert added == [item["id"] for item in done]
        for item in done:
            field = {"function_call": "arguments", "custom_tool_call": "input"}.get(item["type"])
            text = item[field] if field else item["content"][0]["text"]
            deltas = [e["delta"] for e in events if e.get("item_id") == item["id"] and "delta" in e]
            assert "".join(deltas) == text

    async def test_usage_counts_what_was_cached(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script, engine.cached_tokens = reply(Thinking("Hm"), "Yes"), 2
        usage = (await create(client, input="one two three")).json()["usage"]
        assert usage["input_tokens"] == 5
        assert usage["input_tokens_details"]["cached_tokens"] == 2
        assert usage["output_tokens_details"]["reasoning_tokens"] == 1
        assert usage["total_tokens"] == 7

    @pytest.mark.parametrize(
        ("reason", "form", "status"),
        [
            ("stop", None, "completed"),
            ("length", None, "incomplete"),
            ("repetition", None, "completed"),
            ("repetition", {"type": "json_object"}, "incomplete"),
        ],
    )
    async def test_a_reply_cut_short_is_incomplete(
        self, client: httpx.AsyncClient, engine: FakeEngine, reason: Any, form: Any, status: str
    ) -> None:
        engine.script = reply("Hi", reason=reason)
        text = {"text": {"format": form}} if form else {}
        last = (await stream(client, **text))[-1]
        assert last["type"] == f"response.{status}"
        assert last["response"]["output"][0]["status"] == status
        details = {"reason": "max_output_tokens"} if status == "incomplete" else None
        assert last["response"]["incomplete_details"] == details

    async def test_log_probabilities_come_with_their_text(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        probs = [TokenLogprob(t, i, -0.5, ((t, i, -0.5),)) for i, t in enumerate(("a", "b"))]
        engine.script = reply(Text("a", (probs[0],)), Text("b", (probs[1],)))
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
        events = await stream(client, **asked)
        part = events[-1]["response"]["output"][0]["content"][0]
        assert [one["token"] for one in part["logprobs"]] == ["a", "b"]
        assert engine.jobs[0].top_logprobs == 1
        plain = (await create(client)).json()["output"][0]["content"][0]
        assert plain["logprobs"] == []

    async def test_tools_that_were_left_out_are_named(self, client: httpx.AsyncClient) -> None:
        tools = [READ, {"type": "web_search"}]
        response = (await create(client, tools=tools, metadata={"a": "b"})).json()
        assert response["metadata"] == {"a": "b", "mlxcache_left_out_tools": "web_search"}

    async def test_a_call_has_the_name_and_namespace_that_the_client_knows(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        space = {"type": "namespace", "name": "agents", "tools": [READ]}
        engine.script = reply(ToolCall(0, "call_1", "agents__read", "{}"))
        call = (await create(client, tools=[READ, space])).json()["output"][0]
        assert (call["name"], call["namespace"]) == ("read", "agents")

    async def test_arguments_that_a_custom_tool_does_not_have_are_not_lost(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply(ToolCall(0, "call_1", "patch", '{"text": "x"}'))
        call = (await create(client, tools=[PATCH])).json()["output"][0]
        assert call["input"] == '{"text": "x"}'

    async def test_the_label_is_the_prompt_cache_key(
        self, client: httpx.AsyncClient, engine: FakeEngine, book: FakeBook
    ) -> None:
        response = await create(client, prompt_cache_key="thread-1")
        assert engine.jobs[0].session == book[0] == "thread-1"
        assert engine.jobs[0].response == response.json()["id"]
        await create(client, store=False)
        assert engine.jobs[1].response is None


class TestTruncation:
    async def test_turns_that_do_not_fit_are_left_out(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """With a context of 8,192 tokens, and 1,001 in each turn."""
        items = [{"role": "user", "content": f"turn{i} " + "word " * 999} for i in range(30)]
        asked = {"input": items, "instructions": "Be brief.", "max_output_tokens": 100}
        await create(client, **asked, truncation="auto")
        messages = engine.chats[-1].messages
        assert messages[0]["content"] == "Be brief."
        assert messages[1]["content"].startswith("turn24 ")
        assert len(messages) == 7
        assert len(engine.jobs[0].prompt.ids) <= 8192 - 100
        await create(client, **asked)
        assert len(engine.chats[-1].messages) == 31

    async def test_a_limit_on_the_reply_leaves_half_of_the_context_to_the_prompt(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        items = [{"role": "user", "content": f"turn{i} " + "word " * 99} for i in range(30)]
        await create(client, input=items, max_output_tokens=8192, truncation="auto")
        assert len(engine.chats[-1].messages) == 30

    async def test_a_prompt_without_a_limit_on_the_reply_leaves_room_for_a_token(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """With 10 + 8,179 words and 3 more tokens, all is as long as the context."""
        items = [{"role": "user", "content": "word " * words} for words in (10, 8179)]
        await create(client, input=items, truncation="auto")
        assert len(engine.jobs[0].prompt.ids) == 8181


class TestFailures:
    async def test_the_sdk_raises_its_own_error_for_a_prompt_that_is_too_long(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.submit_error = ContextLengthExceeded("9000 tokens are more than 8192.")
        for streamed in (False, True):
            with pytest.raises(openai.BadRequestError) as caught:
                await openai_sdk.responses.create(model="m", input="x", stream=streamed)
            assert caught.value.code == "context_length_exceeded"

    @pytest.mark.parametrize(
        ("end", "code"),
        [
            (GenerationFailed("The model raised."), "server_error"),
            (NotReady("The server is stopping."), "server_error"),
            (BadRequest("The schema is too complex."), "invalid_prompt"),
        ],
    )
    async def test_a_reply_that_fails_late_ends_with_response_failed(
        self, client: httpx.AsyncClient, engine: FakeEngine, end: Any, code: str
    ) -> None:
        engine.script = [*reply("Hi")[:2], end]
        last = (await stream(client))[-1]
        assert last["type"] == "response.failed"
        assert last["response"]["error"] == {"code": code, "message": str(end)}
        assert engine.streams[0].closed.is_set()

    async def test_a_reply_that_fails_whole_is_an_error(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = [*reply("Hi")[:2], GenerationFailed("The model raised.")]
        assert (await create(client)).status_code == 500
        engine.script = reply("Hi", reason="cancelled")
        assert (await create(client)).status_code == 503

    async def test_a_full_disk_costs_the_storing_and_not_the_reply(
        self, client: httpx.AsyncClient, book: FakeBook, caplog: pytest.LogCaptureFixture
    ) -> None:
        book.full = True
        response = (await create(client)).json()
        assert response["status"] == "completed"
        assert response["store"] is False
        assert (await stream(client))[-1]["response"]["store"] is False
        assert "response not stored: The disk is full." in caplog.text


class TestSilence:
    @pytest.fixture
    def settings(self) -> ApiSettings:
        return ApiSettings(ping_seconds=0.05)

    async def test_a_long_silence_has_numbered_events(
        self, client: httpx.AsyncClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The model says nothing until three of them were sent."""
        progress, text, end = reply("Hi")
        over = asyncio.Event()

        async def counted(events: Any, seconds: float) -> Any:
            silences = 0
            async for event in with_silences(events, seconds):
                yield event
                silences += event is None
                if silences == 3:
                    over.set()

        monkeypatch.setattr(responses, "with_silences", counted)
        engine.script = [progress, over, text, end]
        kinds = [event["type"] for event in await stream(client)]
        before = kinds.index("response.output_item.added")
        assert kinds[:before].count("response.in_progress") >= 3

    async def test_a_reader_that_leaves_ends_the_source(self) -> None:
        closed = asyncio.Event()

        async def source() -> Any:
            try:
                yield 1
                await asyncio.sleep(60)
            finally:
                closed.set()

        events = with_silences(source(), 0.01)
        assert await anext(events) == 1
        assert await anext(events) is None
        await events.aclose()
        await soon(closed.is_set)


class TestStored:
    async def test_a_response_continues_another(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = reply(Thinking("Hm."), "Four.")
        first = (await create(client, input="Two and two?", instructions="Be brief.")).json()
        second = (await create(client, input="And three?", previous_response_id=first["id"])).json()
        await stream(client, input="Stop.", previous_response_id=second["id"])
        contents = [(m["role"], m["content"]) for m in engine.chats[2].messages]
        assert contents == [
            ("user", "Two and two?"),
            ("assistant", "Four."),
            ("user", "And three?"),
            ("assistant", "Four."),
            ("user", "Stop."),
        ]
        assert engine.chats[2].messages[1]["reasoning_content"] == "Hm."
        assert second["previous_response_id"] == first["id"]

    async def test_a_streamed_response_is_stored_before_its_end_is_sent(
        self, client: httpx.AsyncClient
    ) -> None:
        last = (await stream(client))[-1]["response"]
        assert (await client.get(f"/v1/responses/{last['id']}")).json() == last

    async def test_a_reference_stands_for_the_stored_item(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        """The AI SDK names the items of earlier replies in place of sending them."""
        engine.script = reply(Thinking("Hm."), Text("I read."), CALL)
        first = (await create(client, tools=[READ])).json()
        ids = [item["id"] for item in first["output"]]
        user: Any = {"role": "user", "content": "Hi"}
        result = {"type": "function_call_output", "call_id": "call_1", "output": "alpha"}
        refs = [{"type": "item_reference", "id": ids[0]}, {"id": ids[1]}, {"id": ids[2]}]
        second = (await create(client, tools=[READ], input=[user, *refs, result])).json()
        whole = [user, *first["output"], result]
        await create(client, tools=[READ], input=whole)
        assert engine.chats[1].messages == engine.chats[2].messages
        await create(client, input="More", previous_response_id=second["id"])
        assert engine.chats[3].messages[: len(engine.chats[2].messages)] == engine.chats[2].messages
        page = (await client.get(f"/v1/responses/{second['id']}/input_items?order=asc")).json()
        given = {"id": page["first_id"]}
        await create(client, input=[given, refs[1], refs[0]])
        assert [m["content"] for m in engine.chats[4].messages] == ["Hi", "I read.", ""]

    @pytest.mark.parametrize("id", ["msg_x", "msg_abc_0", "item_a_0", "x"])
    async def test_a_reference_to_what_is_not_stored_names_store(
        self, client: httpx.AsyncClient, id: str
    ) -> None:
        gone = (await create(client, store=False)).json()["output"][0]["id"]
        for one in (id, gone):
            items = [{"role": "user", "content": "x"}, {"type": "item_reference", "id": one}]
            refused = await create(client, input=items)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "input[1].id")
            assert error["code"] == "item_not_found"
            assert one in error["message"]
            assert "`store`" in error["message"]

    async def test_references_stand_for_no_more_than_a_conversation(
        self, client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A few bytes name an item of any size."""
        stored = [(await create(client)).json()["output"][0]["id"] for _ in range(2)]
        refs = [{"type": "item_reference", "id": id} for id in stored]
        assert (await create(client, input=refs)).status_code == 200
        error = (await create(client, input=[*refs, {"id": stored[0]}])).json()["error"]
        assert (error["param"], "Duplicate item" in error["message"]) == ("input[2].id", True)
        first = await client.get(f"/v1/responses/{(await create(client)).json()['id']}")
        monkeypatch.setattr(responses, "MAX_CHAIN_BYTES", 2 * len(first.content) - 1)
        assert (await create(client, input=refs[:1])).status_code == 200
        refused = (await create(client, input=refs)).json()["error"]
        assert "responses of more than" in refused["message"]
        last = (await create(client, previous_response_id=first.json()["id"])).json()["id"]
        monkeypatch.setattr("mlxcache.wire.decode.MAX_VALUES", 20)
        for refused in (
            await create(client, previous_response_id=last),
            await client.get(f"/v1/responses/{last}/input_items"),
        ):
            assert refused.status_code == 400
            assert "stored responses has more than 20 values" in refused.json()["error"]["message"]

    async def test_what_is_not_stored_cannot_be_continued(self, client: httpx.AsyncClient) -> None:
        first = (await create(client, store=False)).json()
        error = (await create(client, previous_response_id=first["id"])).json()["error"]
        assert error["code"] == "previous_response_not_found"
        assert error["param"] == "previous_response_id"
        assert first["id"] in error["message"]

    async def test_a_bad_item_of_the_body_is_named_by_its_place_in_the_body(
        self, client: httpx.AsyncClient
    ) -> None:
        first = (await create(client)).json()
        bad = await create(client, previous_response_id=first["id"], input=[{"type": "x"}])
        assert bad.json()["error"]["param"] == "input[0].type"

    async def test_the_sdk_retrieves_lists_and_deletes(
        self, openai_sdk: openai.AsyncOpenAI
    ) -> None:
        first = await openai_sdk.responses.create(model="m", input="One")
        items: Any = [{"role": "user", "content": f"item {i}"} for i in range(25)]
        second = await openai_sdk.responses.create(
            model="m", input=items, previous_response_id=first.id
        )
        assert (await openai_sdk.responses.retrieve(second.id)).output_text == "Hello, world"
        listed: list[Any] = [
            item async for item in openai_sdk.responses.input_items.list(second.id, order="asc")
        ]
        texts = [item.content[0].text for item in listed]
        assert texts == ["One", "Hello, world", *(f"item {i}" for i in range(25))]
        newest: Any = await openai_sdk.responses.input_items.list(second.id, limit=1)
        assert newest.data[0].content[0].text == "item 24"
        await openai_sdk.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await openai_sdk.responses.retrieve(second.id)

    @pytest.mark.parametrize("id", ["same", None, "", 7, ["a"]])
    async def test_a_list_ends_whatever_ids_the_items_came_with(
        self, openai_sdk: openai.AsyncOpenAI, client: httpx.AsyncClient, id: Any
    ) -> None:
        items = [{"role": "user", "content": f"item {i}", "id": id} for i in range(4)]
        stored = (await create(client, input=items)).json()["id"]
        pages: Any = openai_sdk.responses.input_items.list(stored, limit=1, order="asc")
        texts = []
        async for item in pages:
            texts.append(item.content[0].text)
            assert len(texts) <= len(items)
        assert texts == [f"item {i}" for i in range(4)]

    async def test_an_empty_previous_response_id_continues_nothing(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        first = (await create(client, previous_response_id="")).json()["id"]
        second = await create(client, previous_response_id=first)
        assert second.status_code == 200
        assert [m["content"] for m in engine.chats[-1].messages] == ["Hi", "Hello, world", "Hi"]
        listed = await client.get(f"/v1/responses/{first}/input_items")
        assert len(listed.json()["data"]) == 1

    @pytest.mark.parametrize("query", ["limit=0", "limit=101", "order=up", "after=item_9"])
    async def test_a_bad_page_is_refused(self, client: httpx.AsyncClient, query: str) -> None:
        first = (await create(client)).json()
        path = f"/v1/responses/{first['id']}/input_items?{query}"
        assert (await client.get(path)).status_code == 400

    async def test_a_stored_response_is_not_streamed_again(self, client: httpx.AsyncClient) -> None:
        first = (await create(client)).json()
        response = await client.get(f"/v1/responses/{first['id']}?stream=true")
        assert response.status_code == 400

    async def test_a_running_response_is_seen_and_cancelled(
        self, client: httpx.AsyncClient, engine: FakeEngine
    ) -> None:
        engine.script = [*reply("Hi")[:2], 30.0, *reply()[1:]]
        running = asyncio.ensure_future(create(client))
        await soon(lambda: engine.streams and engine.streams[0].yielded == 2)
        id = engine.jobs[0].response
        assert (await client.get(f"/v1/responses/{id}")).json()["status"] == "in_progress"
        cancelled = (await client.post(f"/v1/responses/{id}/cancel")).json()
        assert cancelled["status"] == "cancelled"
        assert (await running).json()["status"] == "cancelled"
        assert engine.streams[0].cancelled
        assert (await client.get(f"/v1/responses/{id}")).json()["status"] == "cancelled"
        assert (await client.post(f"/v1/responses/{id}/cancel")).json()["status"] == "cancelled"

    @pytest.mark.parametrize("streamed", [False, True])
    async def test_a_reply_that_has_ended_cannot_be_cancelled_while_it_is_stored(
        self, client: httpx.AsyncClient, engine: FakeEngine, book: FakeBook, streamed: bool
    ) -> None:
        """What the client of `cancel` is told is what is stored."""
        book.go_on.clear()
        running = asyncio.ensure_future(create(client, stream=streamed))
        await asyncio.wait_for(book.saving.wait(), 5)
        id = engine.jobs[0].response
        told = (await client.post(f"/v1/responses/{id}/cancel")).json()
        book.go_on.set()
        await running
        assert told["status"] == "completed"
        assert (await client.get(f"/v1/responses/{id}")).json()["status"] == "completed"

    async def test_tokens_are_counted_without_a_reply(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        counted = await openai_sdk.responses.input_tokens.count(model="m", input="one two")
        assert counted.input_tokens == 4
        assert not engine.jobs


class TestSdk:
    async def test_a_stream_is_accumulated(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        engine.script = reply(Thinking("Hm."), "Yes", ".", CALL)
        async with openai_sdk.responses.stream(
            model="m",
            input="x",
            tools=[READ],
        ) as events:
            text = [e.delta async for e in events if e.type == "response.output_text.delta"]
            final = await events.get_final_response()
        assert text == ["Yes", "."]
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]

    async def test_a_reply_is_parsed(
        self, openai_sdk: openai.AsyncOpenAI, engine: FakeEngine
    ) -> None:
        class Answer(pydantic.BaseModel):
            number: int

        engine.script = reply('{"number"', ": 4}")
        parsed = await openai_sdk.responses.parse(model="m", input="x", text_format=Answer)
        assert parsed.output_parsed == Answer(number=4)
        form = engine.jobs[0].format
        assert form is not None
        assert '"number"' in form.value
