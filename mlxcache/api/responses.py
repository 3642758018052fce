"""Endpoints of OpenAI's Responses API: create, compact, retrieve, delete, cancel, list input items.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from mlxcache.api import http
from mlxcache.api.errors import build_openai_error
from mlxcache.api.exchange import Exchange
from mlxcache.api.operation import EVENTS, JSON, Number, Operation, Text, Word
from mlxcache.api.sse import Events, make_comment, make_event
from mlxcache.errors import BadRequest, Busy, ContextLengthExceeded, NotFound, StoreError
from mlxcache.owner import OWNER
from mlxcache.store.reply_rows import MAX_CHAIN_BYTES, StoredResponse
from mlxcache.types import Chat, Finished, Job, Progress
from mlxcache.wire import responses_request as wire
from mlxcache.wire.decode import Values
from mlxcache.wire.openai_request import (
    read_max_tokens,
    read_priority,
    read_stop_strings,
    shows_stop,
    to_sampling,
)
from mlxcache.wire.responses_reply import (
    PREFIX,
    Payload,
    ResponseWriter,
    SummaryWriter,
    make_response,
    response_of_item,
)
from mlxcache.wire.responses_types import RawItem, ResponsesRequest, is_reference
from mlxcache.wire.titles import title_from_messages

T = TypeVar("T")

log = logging.getLogger(__name__)

LIMIT, ORDER, AFTER = Number("limit", 20, most=100), Word("order", ("desc", "asc")), Text("after")
STREAM = Word("stream", ("false",))
INPUT_PREFIX = "item_"


# -- create ----------------------------------------------------------------------------------


async def create_response(deps: http.Deps, request: Request) -> Response:
    """Generate a response to a conversation, which may continue a stored response."""
    body = await http.read_json(request, ResponsesRequest, deps)
    wire.check_supported(body)
    exchange = SummaryExchange if wire.asks_for_summary(body) else ResponseExchange
    return await exchange(deps, request, body).answer()


async def count_input_tokens(deps: http.Deps, request: Request) -> Response:
    """Count the tokens of a request's prompt without generating a response."""
    body = await http.read_json(request, ResponsesRequest, deps)
    wire.check_supported(body)
    deps = await http.while_connected(request, deps.of(body.model))
    http.require_model(deps)
    tools, talk = wire.Toolbox(body.tools or ()), await _continued(deps, body)
    chat = wire.to_chat(body, talk, tools, images=http.accepts_images(deps))
    prompt = await deps.engine.render(chat)  # without a session: a count is not a turn
    return http.json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def compact_response(deps: http.Deps, request: Request) -> Response:
    """Summarise a conversation. Its next request has the items of `output` in place of it.

    They are its user messages, and the summary in an opaque form.
    """
    body = await http.read_json(request, ResponsesRequest, deps)
    wire.check_supported(body)
    return await CompactExchange(deps, request, replace(body, stream=False)).answer()


async def _continued(deps: http.Deps, body: ResponsesRequest) -> wire.Conversation:
    """Return the items of the responses that `body` continues, then its own."""
    items = await _resolved(deps, wire.read_input(body))
    if not body.previous_response_id:
        return wire.Conversation(items)
    try:
        chain = await deps.engine.book.response_chain(body.previous_response_id)
    except NotFound as error:
        raise BadRequest(
            f"Previous response cannot be continued: {error}",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from error
    before: list[RawItem] = []
    for asked, output in _decode_chain(chain):
        before += asked
        before += output
    return wire.Conversation([*before, *items], len(before))


def _decode_chain(
    chain: Sequence[StoredResponse],
) -> Iterator[tuple[list[RawItem], list[RawItem]]]:
    """Yield the input items and the output items of each response."""
    values = Values("The conversation of stored responses")
    for response in chain:
        values.add(response.items)
        values.add(response.body)
        yield msgspec.json.decode(response.items), msgspec.json.decode(response.body)["output"]


async def _resolved(deps: http.Deps, items: Sequence[RawItem]) -> list[RawItem]:
    """Return `items` with the stored items that the references among them name.

    As in OpenAI's API, an item is named once: a few bytes of a body stand for all of its size.
    """
    named: dict[str, int] = {}
    for i, item in enumerate(items):
        if is_reference(item) and named.setdefault(str(item.get("id")), i) != i:
            message = f"Duplicate item found with id {str(item.get('id'))[:80]!r}."
            raise BadRequest(message, param=f"input[{i}].id")
    known = await _stored_items(deps, named)
    for id, i in named.items():
        if id not in known:
            raise BadRequest(
                f"input[{i}]: no item with the id {id[:80]!r} is stored. Send the item itself: "
                "those of a response with `store`: false or of a deleted one are not stored.",
                param=f"input[{i}].id",
                code="item_not_found",
            )
    return [known[str(item.get("id"))] if is_reference(item) else item for item in items]


async def _stored_items(deps: http.Deps, ids: Iterable[str]) -> dict[str, RawItem]:
    """Return by id the items of the stored responses that have the items `ids`.

    Those after the first response that is not stored are left out. Raises BadRequest if all are
    larger than a conversation of stored responses.
    """
    found: list[StoredResponse] = []
    size = 0
    for response in dict.fromkeys(map(response_of_item, ids)):
        try:
            found.append(await deps.engine.book.response(response))
        except NotFound:
            break
        size += len(found[-1].items) + len(found[-1].body)
        if size > MAX_CHAIN_BYTES:
            message = f"The items are of responses of more than {MAX_CHAIN_BYTES:,} bytes."
            raise BadRequest(message, param="input")
    known: dict[str, RawItem] = {}
    for one, (asked, output) in zip(found, _decode_chain(found), strict=True):
        for j, item in enumerate(asked):
            id = f"{INPUT_PREFIX}{one.id.removeprefix(PREFIX)}_{j}"
            known[id] = {**_with_parts(item), "id": id}
        known |= {item["id"]: item for item in output}
    return known


async def _truncate(deps: http.Deps, chat: Chat, limit: int) -> Chat:
    """Return `chat` without the oldest turns, so that its prompt has at most `limit` tokens.

    The newest turn is always kept, even if its prompt alone has more tokens.
    """

    async def fits(one: Chat) -> bool:
        try:
            prompt = await deps.engine.render(one)  # without a session: it is no turn
        except ContextLengthExceeded:
            return False
        return len(prompt.ids) <= limit

    if await fits(chat):
        return chat
    shorter = wire.shorten(chat)
    low, high = 0, len(shorter) - 1
    while low < high:  # each is shorter than the one before
        middle = (low + high) // 2
        if await fits(shorter[middle]):
            high = middle
        else:
            low = middle + 1
    return shorter[low] if shorter else chat


class ResponseExchange(Exchange):
    """A request for a response. It is among `Deps.running` while it is computed."""

    writer = ResponseWriter

    def __init__(self, deps: http.Deps, request: Request, body: ResponsesRequest):
        super().__init__(deps, request, "responses", body, body.prompt_cache_key)
        self.id = self.arrival.id.replace("req_", PREFIX)
        self.owner = OWNER.get()
        self._body, self._running = body, deps.running
        self._tools = wire.Toolbox(body.tools or ())
        self._format, self._use = wire.read_text_format(body), self._tools.read_use(body)
        model = body.model or http.require_model(deps).id
        response = make_response(self.id, model, body, to_sampling(body), self._tools)
        whole = self._format is not None or self._use.choice.required
        self._writer = self.writer(response, body, self._tools, whole=whole)
        self._talk = wire.Conversation(())
        self._has_begun = self._is_cancelled = False

    @property
    def response(self) -> Payload:
        return self._writer.response

    async def cancel(self) -> Payload:
        """Stop generating, unless the response has ended; return it as `cancelled`.

        The cancelled response is stored by the coroutine that reads its stream.
        """
        if self.response["status"] != "in_progress":
            return self.response
        self._is_cancelled = True
        await self.close()
        return {**self.response, "status": "cancelled"}

    async def jobs(self) -> list[Job]:
        body, deps, info = self._body, self.deps, http.require_model(self.deps)
        talk = self._talk = await _continued(deps, body)
        chat = wire.to_chat(body, talk, self._tools, images=http.accepts_images(deps))
        stop, sampling = read_stop_strings(body), to_sampling(body)
        max_tokens = read_max_tokens(body, deps.settings.default_max_tokens)
        began = time.perf_counter()
        if body.truncation == "auto":
            reply = min(max_tokens or 1, info.context_length // 2)
            chat = await _truncate(deps, chat, info.context_length - reply)
        job = self.make_job(
            await deps.engine.render(chat, session=self.arrival.session, stop=stop),
            began,
            sampling=sampling,
            priority=read_priority(body),
            max_tokens=max_tokens,
            stop=stop,
            shows_stop=shows_stop(body),
            tools=self._use.tools,
            tool_choice=self._use.choice,
            parallel_tools=self._use.parallel,
            format=self._format,
            thinking_budget=wire.read_thinking_budget(body, takes_effort=info.takes_effort),
            top_logprobs=(body.top_logprobs or 0) if wire.wants_logprobs(body) else None,
            title=title_from_messages(chat.messages),
            response=None if body.store is False else self.id,
        )
        return [job]

    async def whole(self) -> Payload:
        self._running[self.id] = self
        try:
            async for event in self.streams[0]:
                if not (self._is_cancelled and isinstance(event, Finished)):
                    self._writer.feed(event)
            await self._store()
        finally:
            self._running.pop(self.id, None)
        return self.response

    async def wait(self, submitted: asyncio.Task[None]) -> Events:
        self._has_begun = True
        for payload in self._writer.begin():
            yield _event(payload)
        while not submitted.done():
            await asyncio.wait({submitted}, timeout=self._silence_s)
            if not submitted.done():
                yield _event(self._writer.ping())

    async def events(self) -> Events:
        writer, silence_s = self._writer, self._silence_s
        sent = time.monotonic()
        self._running[self.id] = self  # here: a generator that never begins removes nothing
        try:
            for payload in () if self._has_begun else writer.begin():
                yield _event(payload)
            async with aclosing(with_silences(self.streams[0], silence_s)) as events:
                async for event in events:
                    payloads: list[Payload] = []
                    if event is None or isinstance(event, Progress):
                        if time.monotonic() - sent >= silence_s:
                            payloads = [writer.ping()]
                    elif not (self._is_cancelled and isinstance(event, Finished)):
                        payloads = writer.feed(event)
                    for payload in payloads:
                        yield _event(payload)
                        sent = time.monotonic()
            await self._store()
            yield _event(writer.finish())
        finally:
            self._running.pop(self.id, None)

    @property
    def _silence_s(self) -> float:
        return 0.9 * self.deps.settings.ping_seconds

    def ping(self) -> ServerSentEvent:
        return make_comment("waiting")  # events have numbers, which are given in `events`

    def failure(self, error: Exception) -> ServerSentEvent:
        body = build_openai_error(error)["error"]
        codes = {
            "rate_limit_error": "rate_limit_exceeded",
            "invalid_request_error": "invalid_prompt",
        }
        code = codes.get(body["type"], "server_error")
        return _event(self._writer.fail(code, body["message"]))

    async def _store(self) -> None:
        """Store a response that has ended, unless the client set `store` to false.

        If it cannot be stored, `store` becomes false in the response.
        """
        if self._is_cancelled:
            self._writer.cancel()
        response = self.response
        if not response["store"]:
            return
        stored = StoredResponse(
            id=self.id,
            owner=self.owner,
            previous=response["previous_response_id"] or None,  # "" continues none
            created_at=time.time(),
            body=msgspec.json.encode(response),
            items=msgspec.json.encode(self._talk.items[self._talk.stored :]),
        )
        try:
            await self.deps.engine.book.save_response(stored)
        except (StoreError, Busy) as error:
            log.warning("%s: response not stored: %s", self.arrival.id, error)
            response["store"] = False


class SummaryExchange(ResponseExchange):
    """A request for a summary: its last item asks for it. The response is not stored."""

    writer = SummaryWriter

    def __init__(self, deps: http.Deps, request: Request, body: ResponsesRequest):
        super().__init__(deps, request, wire.ask_for_summary(body))


class CompactExchange(SummaryExchange):
    """A request for a summary, and for the user's messages before it."""

    async def whole(self) -> Payload:
        response = await super().whole()
        own = self.id.removeprefix(PREFIX)
        said = [
            {"id": f"{INPUT_PREFIX}{own}_{i}", **_with_parts(item)}
            for i, item in enumerate(self._talk.items)
            if item.get("role") == "user"
        ]
        kept = {name: response[name] for name in ("id", "created_at", "usage")}
        return {**kept, "object": "response.compaction", "output": [*said, *response["output"]]}


async def with_silences(events: AsyncIterable[T], seconds: float) -> AsyncGenerator[T | None, None]:
    """Yield `events`, and None whenever no event has come for `seconds`."""
    source = aiter(events)
    pending: asyncio.Task[T] | None = None
    try:
        while True:
            pending = pending or asyncio.ensure_future(_next(source))
            await asyncio.wait({pending}, timeout=seconds)
            if not pending.done():
                yield None
                continue
            done, pending = pending, None
            try:
                item = done.result()
            except StopAsyncIteration:
                return
            yield item
    finally:
        if pending is not None:
            pending.cancel()
            await asyncio.wait({pending})


async def _next(source: Any) -> Any:
    return await anext(source)


def _event(payload: Payload) -> ServerSentEvent:
    return make_event(payload, name=payload["type"])


# -- stored ----------------------------------------------------------------------------------


def _find(deps: http.Deps, id: str) -> ResponseExchange | None:
    found = deps.running.get(id)
    return found if found is not None and found.owner == OWNER.get() else None


async def retrieve_response(deps: http.Deps, request: Request) -> Response:
    """Return a stored response, or one that is being computed. It is not streamed again."""
    id = request.path_params["id"]
    STREAM.read(request)
    if (found := _find(deps, id)) is not None:
        return http.json_response(found.response)
    return await _stored(deps, id)


async def _stored(deps: http.Deps, id: str) -> Response:
    http.require_model(deps)
    stored = await deps.engine.book.response(id)
    return Response(stored.body, media_type="application/json")


async def delete_response(deps: http.Deps, request: Request) -> Response:
    """Delete a stored response. Its session and the cached tokens are kept."""
    id = request.path_params["id"]
    http.require_model(deps)
    await deps.engine.book.delete_response(id)
    return http.json_response({"id": id, "object": "response.deleted", "deleted": True})


async def cancel_response(deps: http.Deps, request: Request) -> Response:
    """Cancel a response that is being computed, and return it. One that has ended is unchanged."""
    id = request.path_params["id"]
    http.require_model(deps)
    found = _find(deps, id)
    return await _stored(deps, id) if found is None else http.json_response(await found.cancel())


async def list_input_items(deps: http.Deps, request: Request) -> Response:
    """List the input items of a stored response, including those of the responses it continues.

    `?limit=` is the number of items, 20 by default and at most 100. `?order=` is `asc`, oldest
    first, or `desc`, the default. `?after=` is the id of the last item of the previous page.
    """
    limit, order = LIMIT.read(request), ORDER.read(request)
    http.require_model(deps)
    chain = await deps.engine.book.response_chain(request.path_params["id"])
    items = _input_items(chain)
    if order == "desc":
        items.reverse()
    if after := request.query_params.get(AFTER.name):
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise BadRequest(f"`after`: no item has the id {after[:80]!r}.", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    ids = [item["id"] for item in page] or [None]
    body = {"object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1]}
    return http.json_response({**body, "has_more": len(items) > limit})


def _input_items(chain: Sequence[StoredResponse]) -> list[RawItem]:
    """Return the input items of the last response of `chain`, after those of the earlier ones.

    An id that is missing, is no text, or is that of an item before, is replaced, so that the query
    parameter `after` can name any item.
    """
    found: list[RawItem] = []
    seen = set[str]()
    for response, (asked, output) in zip(chain, _decode_chain(chain), strict=True):
        items = [_with_parts(item) for item in asked]
        if response is not chain[-1]:
            items += output
        own = response.id.removeprefix(PREFIX)
        for j, item in enumerate(items):
            id = item.get("id")
            if not isinstance(id, str) or not id or id in seen:
                id = f"{INPUT_PREFIX}{own}_{j}"
            seen.add(id)
            found.append({**item, "id": id})
    return found


def _with_parts(item: RawItem) -> RawItem:
    """Return an item with the members that a message may omit: `type`, `status`, and text parts."""
    if item.get("type", "message") != "message":
        return item
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    return {"type": "message", "status": "completed", **item, "content": content}


ENDPOINTS = {
    "POST /v1/responses": Operation(
        create_response, ResponsesRequest, "Response", types=(JSON, EVENTS)
    ),
    "POST /v1/responses/compact": Operation(compact_response, ResponsesRequest, "Compaction"),
    "POST /v1/responses/input_tokens": Operation(
        count_input_tokens, ResponsesRequest, "InputTokens"
    ),
    "GET /v1/responses/{id}": Operation(retrieve_response, answer="Response", query=(STREAM,)),
    "DELETE /v1/responses/{id}": Operation(delete_response, answer="Deleted"),
    "POST /v1/responses/{id}/cancel": Operation(cancel_response, answer="Response"),
    "GET /v1/responses/{id}/input_items": Operation(
        list_input_items, answer="List", query=(LIMIT, ORDER, AFTER)
    ),
}
