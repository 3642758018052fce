"""Endpoints of OpenAI's Responses API: create, retrieve, delete, cancel, list input items.

Source: https://platform.openai.com/docs/api-reference/responses.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api import sse
from mlxcache.api.errors import build_openai_error
from mlxcache.api.headers import (
    read_arrival,
    read_client_name,
    read_job_options,
    read_session_label,
)
from mlxcache.api.http import (
    Deps,
    accepts_images,
    get_request_id,
    json_response,
    read_json,
    read_number,
    require_model,
    while_connected,
)
from mlxcache.api.late import LateReply
from mlxcache.errors import (
    BadRequest,
    Busy,
    ContextLengthExceeded,
    NotFound,
    StoreError,
)
from mlxcache.owner import OWNER
from mlxcache.store.response_rows import StoredResponse
from mlxcache.types import Arrival, Chat, Finished, Job, Progress
from mlxcache.wire import responses_request as wire
from mlxcache.wire.openai_request import read_stop_strings, to_sampling
from mlxcache.wire.responses_reply import Payload, ResponseWriter, make_response
from mlxcache.wire.responses_tools import Toolbox
from mlxcache.wire.responses_types import RawItem, ResponsesRequest
from mlxcache.wire.titles import title_from_messages

if TYPE_CHECKING:
    from mlxcache.engine.engine import Stream

T = TypeVar("T")

log = logging.getLogger(__name__)

PREFIX = "resp_"
MAX_ITEMS = 100
"""Maximum input items on one page of a list."""


def routes(deps: Deps) -> list[Route]:
    """Return the routes of the Responses API."""
    running = RunningResponses()
    one = "/v1/responses/{id}"
    return [
        Route("/v1/responses", partial(create_response, deps, running), methods=["POST"]),
        Route("/v1/responses/input_tokens", partial(count_input_tokens, deps), methods=["POST"]),
        Route(one, partial(retrieve_response, deps, running), methods=["GET"]),
        Route(one, partial(delete_response, deps), methods=["DELETE"]),
        Route(f"{one}/cancel", partial(cancel_response, deps, running), methods=["POST"]),
        Route(f"{one}/input_items", partial(list_input_items, deps), methods=["GET"]),
    ]


@dataclass(slots=True)
class Reply:
    """A response that is being computed, with its engine stream and its owner.

    `writer` builds the `response` object and its events. `items` are the input items of the request
    itself. `cancelled` is True after a client cancelled it.
    """

    writer: ResponseWriter
    stream: Stream
    owner: str | None
    items: list[RawItem]
    cancelled: bool = False

    @property
    def id(self) -> str:
        """Id of the response, as in its `response` object."""
        return str(self.writer.response["id"])

    async def cancel(self) -> Payload:
        """Stop generating, and return the response with the status `cancelled`.

        A response that has ended is returned unchanged. The cancelled response is stored by the
        coroutine that reads its stream.
        """
        response = self.writer.response
        if response["status"] != "in_progress":
            return response
        self.cancelled = True
        await sse.close_stream(self.stream)
        return {**response, "status": "cancelled"}


class RunningResponses:
    """Responses that are being computed, by id. For the event loop only."""

    def __init__(self) -> None:
        self._replies: dict[str, Reply] = {}

    def add(self, reply: Reply) -> None:
        """Add a response when its computation begins."""
        self._replies[reply.id] = reply

    def remove(self, reply: Reply) -> None:
        """Remove a response when its computation has ended. Idempotent."""
        self._replies.pop(reply.id, None)

    def find(self, id: str) -> Reply | None:
        """Return the response `id` of the current owner; None if it is not being computed."""
        reply = self._replies.get(id)
        return reply if reply is not None and reply.owner == OWNER.get() else None


# -- create ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A checked request: its body, its conversation (`talk`), and its tools.

    The conversation includes the stored responses that the request continues.
    """

    body: ResponsesRequest
    talk: wire.Conversation
    tools: Toolbox


async def create_response(deps: Deps, running: RunningResponses, request: Request) -> Response:
    """Generate a response to a conversation, which may continue a stored response."""
    body = await read_json(request, ResponsesRequest, deps)
    wire.check_supported(body)
    session = read_session_label(request.headers, prompt_cache_key=body.prompt_cache_key)
    arrival = read_arrival(request.headers, get_request_id(request), "responses", session)
    if not body.stream:
        work = _whole(deps, running, request, body, arrival)
        return json_response(await while_connected(request, work))
    writer = _writer(deps, request, body)

    async def begin() -> Begun:
        own = await deps.of(body.model, arrival)
        return Begun(own, await _start(own, request, await _check(own, body), writer))

    late = LateReply(begin(), arrival, lambda one: sse.close_stream(one.reply.stream))
    begun = await while_connected(request, late.begun(deps.settings.queue_grace))
    return sse.EventStream(
        late if begun is None else begun.reply.stream,
        _late_events(late, running, writer, deps) if begun is None else _events(begun, running),
        deps.settings,
        ping=lambda: sse.make_comment("waiting"),
        on_error=partial(_failed, writer),
    )


async def count_input_tokens(deps: Deps, request: Request) -> Response:
    """Count the tokens of a request's prompt without generating a response."""
    body = await read_json(request, ResponsesRequest, deps)
    wire.check_supported(body)
    deps = await while_connected(request, deps.of(body.model))
    asked = await _check(deps, body)
    chat = wire.to_chat(body, asked.talk, asked.tools, images=accepts_images(deps))
    prompt = await deps.engine.render(chat)  # without a session: a count is not a turn
    return json_response({"object": "response.input_tokens", "input_tokens": len(prompt.ids)})


async def _check(deps: Deps, body: ResponsesRequest) -> Asked:
    require_model(deps)
    tools = Toolbox(body.tools or ())
    return Asked(body, await _continued(deps, body), tools)


async def _continued(deps: Deps, body: ResponsesRequest) -> wire.Conversation:
    """Return the input and output items of the responses that `body` continues, then its own items.

    These are the stored response `previous_response_id`, if any, and those that it continues.
    Raises BadRequest if one of them is not stored.
    """
    items = wire.read_input(body)
    if not body.previous_response_id:
        return wire.Conversation(items)
    try:
        chain = await deps.engine.sessions.response_chain(body.previous_response_id)
    except NotFound as error:
        raise BadRequest(
            f"Previous response cannot be continued: {error}",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from error
    before: list[RawItem] = []
    for response in chain:
        before += msgspec.json.decode(response.items)
        before += msgspec.json.decode(response.body)["output"]
    return wire.Conversation([*before, *items], len(before))


def _writer(deps: Deps, request: Request, body: ResponsesRequest) -> ResponseWriter:
    """Return the writer that builds the response to a request. Renders nothing."""
    tools, id = Toolbox(body.tools or ()), get_request_id(request).replace("req_", PREFIX)
    form, use = wire.read_text_format(body), tools.read_use(body)
    model = body.model or require_model(deps).id
    response = make_response(id, model, body, to_sampling(body), tools)
    return ResponseWriter(response, body, tools, whole=form is not None or use.choice.required)


async def _start(deps: Deps, request: Request, asked: Asked, writer: ResponseWriter) -> Reply:
    """Render a checked request, submit it to the engine, and wait until it leaves the queue.

    Waits at most `ApiSettings.queue_grace` seconds, and then returns with the job still queued.
    Raises BadRequest, Unsupported or ContextLengthExceeded if it cannot be rendered, and the errors
    of `Engine.submit`.
    """
    body, info = asked.body, require_model(deps)
    chat = wire.to_chat(body, asked.talk, asked.tools, images=accepts_images(deps))
    form, use = wire.read_text_format(body), asked.tools.read_use(body)
    session = read_session_label(request.headers, prompt_cache_key=body.prompt_cache_key)
    stop, sampling = read_stop_strings(body), to_sampling(body)
    max_tokens = wire.read_max_tokens(body, deps.settings.default_max_tokens)
    id = get_request_id(request).replace("req_", PREFIX)
    began = time.perf_counter()
    if body.truncation == "auto":
        reply = min(max_tokens or 1, info.context_length // 2)
        chat = await _truncate(deps, chat, info.context_length - reply)
    prompt = await deps.engine.render(chat, session=session, stop=stop)
    job = Job(
        id=get_request_id(request),
        prompt=prompt,
        sampling=sampling,
        max_tokens=max_tokens,
        stop=stop,
        tools=use.tools,
        tool_choice=use.choice,
        parallel_tools=use.parallel,
        format=form,
        thinking_budget=wire.read_thinking_budget(body, takes_effort=info.takes_effort),
        top_logprobs=(body.top_logprobs or 0) if wire.wants_logprobs(body) else None,
        session=session,
        client=read_client_name(request.headers),
        title=title_from_messages(chat.messages),
        api="responses",
        render_s=time.perf_counter() - began,
        loaded_s=deps.loaded_s,
        response=None if body.store is False else id,
        speculate=body.speculate is not False,
        **read_job_options(request.headers),
    )
    stream, _ = await sse.start_stream(deps, job)
    own = asked.talk.items[asked.talk.stored :]
    return Reply(writer, stream, OWNER.get(), list(own))


async def _truncate(deps: Deps, chat: Chat, limit: int) -> Chat:
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


async def _whole(
    deps: Deps,
    running: RunningResponses,
    request: Request,
    body: ResponsesRequest,
    arrival: Arrival,
) -> Payload:
    deps = await deps.of(body.model, arrival)
    asked = await _check(deps, body)
    writer = _writer(deps, request, body)
    reply = await _start(deps, request, asked, writer)
    running.add(reply)
    try:
        async for event in reply.stream:
            if not (reply.cancelled and isinstance(event, Finished)):
                writer.feed(event)
        await _end(deps, reply)
    finally:
        running.remove(reply)
        await sse.close_stream(reply.stream)
    return writer.response


async def _end(deps: Deps, reply: Reply) -> None:
    """Store a response that has ended, unless the client set `store` to false.

    If it cannot be stored, the cause is logged and `store` becomes false in the response.
    """
    if reply.cancelled:
        reply.writer.cancel()
    response = reply.writer.response
    if not response["store"]:
        return
    stored = StoredResponse(
        id=reply.id,
        owner=reply.owner,
        previous=response["previous_response_id"] or None,  # "" continues none
        created_at=time.time(),
        body=msgspec.json.encode(response),
        items=msgspec.json.encode(reply.items),
    )
    try:
        await deps.engine.sessions.save_response(stored)
    except (StoreError, Busy) as error:
        log.warning("%s: response not stored: %s", reply.stream.record.id, error)
        response["store"] = False


# -- stream ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begun:
    """A submitted request, with the engine of its model in `deps`."""

    deps: Deps
    reply: Reply


async def _late_events(
    late: LateReply[Begun], running: RunningResponses, writer: ResponseWriter, deps: Deps
) -> sse.Events:
    """Yield the events of a response whose model is still being loaded when the response begins.

    The events that come before the first token are sent at once, then pings until the model is
    loaded and the request submitted.
    """
    for payload in writer.begin():
        yield _event(payload)
    while not await late.wait(0.9 * deps.settings.ping_seconds):
        yield _event(writer.ping())
    async with aclosing(_events(await late.get(), running, begins=False)) as events:
        async for item in events:
            yield item


async def _events(begun: Begun, running: RunningResponses, *, begins: bool = True) -> sse.Events:
    """Yield the server-sent events of a response. Stores the response before its last event.

    The response is among those of `running` meanwhile. `begins`: include the events that come
    before the first token.
    """
    deps, reply = begun.deps, begun.reply
    writer, silence_s = reply.writer, 0.9 * deps.settings.ping_seconds
    sent = time.monotonic()
    running.add(reply)  # here: a generator that never begins removes nothing
    try:
        for payload in writer.begin() if begins else ():
            yield _event(payload)
        async with aclosing(with_silences(reply.stream, silence_s)) as events:
            async for event in events:
                payloads: list[Payload] = []
                if event is None or isinstance(event, Progress):
                    if time.monotonic() - sent >= silence_s:
                        payloads = [writer.ping()]
                elif not (reply.cancelled and isinstance(event, Finished)):
                    payloads = writer.feed(event)
                for payload in payloads:
                    yield _event(payload)
                    sent = time.monotonic()
        await _end(deps, reply)
        yield _event(writer.finish())
    finally:
        running.remove(reply)


async def with_silences(events: AsyncIterable[T], seconds: float) -> AsyncGenerator[T | None, None]:
    """Yield `events`, and None whenever no event has come for `seconds`.

    Raises the errors of `events`.
    """
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
    return sse.make_event(payload, name=payload["type"])


def _failed(writer: ResponseWriter, error: Exception) -> ServerSentEvent:
    body = build_openai_error(error)["error"]
    codes = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}
    return _event(writer.fail(codes.get(body["type"], "server_error"), body["message"]))


# -- stored ----------------------------------------------------------------------------------


async def retrieve_response(deps: Deps, running: RunningResponses, request: Request) -> Response:
    """Return a stored response, or one that is being computed. `?stream=true` is a 400."""
    id = request.path_params["id"]
    if request.query_params.get("stream", "false").lower() == "true":
        raise BadRequest("`stream`: a stored response is not streamed again.", param="stream")
    if (reply := running.find(id)) is not None:
        return json_response(reply.writer.response)
    require_model(deps)
    stored = await deps.engine.sessions.response(id)
    return Response(stored.body, media_type="application/json")


async def delete_response(deps: Deps, request: Request) -> Response:
    """Delete a stored response. Its session and the cached tokens are kept."""
    id = request.path_params["id"]
    require_model(deps)
    await deps.engine.sessions.delete_response(id)
    return json_response({"id": id, "object": "response.deleted", "deleted": True})


async def cancel_response(deps: Deps, running: RunningResponses, request: Request) -> Response:
    """Cancel a response that is being computed, and return it. One that has ended is unchanged."""
    id = request.path_params["id"]
    require_model(deps)
    reply = running.find(id)
    if reply is None:
        return Response(
            (await deps.engine.sessions.response(id)).body, media_type="application/json"
        )
    return json_response(await reply.cancel())


async def list_input_items(deps: Deps, request: Request) -> Response:
    """List the input items of a stored response, including those of the responses it continues.

    `?limit=` is the number of items, 20 by default and at most 100. `?order=` is `asc`, oldest
    first, or `desc`, the default. `?after=` is the id of the last item of the previous page.
    """
    query, limit = request.query_params, read_number(request, "limit", 20)
    if not 1 <= limit <= MAX_ITEMS:
        raise BadRequest(f"`limit` must be from 1 to {MAX_ITEMS}.", param="limit")
    if query.get("order", "desc") not in ("asc", "desc"):
        raise BadRequest("`order` must be 'asc' or 'desc'.", param="order")
    require_model(deps)
    chain = await deps.engine.sessions.response_chain(request.path_params["id"])
    items = _input_items(chain)
    if query.get("order", "desc") == "desc":
        items.reverse()
    if after := query.get("after"):
        places = [i for i, item in enumerate(items) if item["id"] == after]
        if not places:
            raise BadRequest(f"`after`: no item has the id {after[:80]!r}.", param="after")
        items = items[places[0] + 1 :]
    page = items[:limit]
    ids = [item["id"] for item in page] or [None]
    body = {"object": "list", "data": page, "first_id": ids[0], "last_id": ids[-1]}
    return json_response({**body, "has_more": len(items) > limit})


def _input_items(chain: Sequence[StoredResponse]) -> list[RawItem]:
    """Return the input items of the last response of `chain`, each with an id of its own.

    They include the inputs and outputs of the earlier responses. An id that is missing, is not a
    text, or is that of an item before, is replaced, so that the query parameter `after` can name
    any item.
    """
    found: list[RawItem] = []
    seen = set[str]()
    for i, response in enumerate(chain):
        items = [_with_parts(item) for item in msgspec.json.decode(response.items)]
        if i < len(chain) - 1:
            items += msgspec.json.decode(response.body)["output"]
        own = response.id.removeprefix(PREFIX)
        for j, item in enumerate(items):
            id = item.get("id")
            if not isinstance(id, str) or not id or id in seen:
                id = f"item_{own}_{j}"
            seen.add(id)
            found.append({**item, "id": id})
    return found


def _with_parts(item: RawItem) -> RawItem:
    """Return an input item with omitted members added, if it is a message.

    These are `type` and `status`; a `content` that is a string becomes a list with one text part.
    Other items are returned unchanged.
    """
    if item.get("type", "message") != "message":
        return item
    content = item.get("content")
    if isinstance(content, str):
        kind = "output_text" if item.get("role") == "assistant" else "input_text"
        content = [{"type": kind, "text": content}]
    return {"type": "message", "status": "completed", **item, "content": content}
