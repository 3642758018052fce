"""Endpoints of Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

Query strings and `anthropic-beta` headers are ignored.
Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import time
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api import http, sse
from mlxcache.api.cache import run_warming
from mlxcache.api.errors import build_anthropic_error
from mlxcache.api.headers import (
    read_arrival,
    read_client_name,
    read_job_options,
    read_session_label,
)
from mlxcache.api.late import LateReply
from mlxcache.errors import BadRequest
from mlxcache.types import Admitted, Arrival, Finished, Job, Text, Thinking, ToolCall, ToolChoice
from mlxcache.wire import anthropic_types as types
from mlxcache.wire.anthropic_output import (
    check_not_continued,
    read_format,
    read_thinking_budget,
    read_tool_choice,
    shows_thinking,
)
from mlxcache.wire.anthropic_reply import (
    ContentBlocks,
    StreamEvent,
    begin_message,
    count_prompt,
    count_usage,
    edit_fields,
    end_fields,
)
from mlxcache.wire.anthropic_request import to_chat, to_sampling
from mlxcache.wire.reply import finished_or_raise
from mlxcache.wire.titles import title_from_messages

if TYPE_CHECKING:
    from mlxcache.engine.engine import Stream


def routes(deps: http.Deps) -> list[Route]:
    """Return the routes of Anthropic's API."""

    async def messages(request: Request) -> Response:
        """Generate a reply to a conversation."""
        body = await http.read_json(request, types.Request, deps)
        arrival = read_arrival(
            request.headers, http.get_request_id(request), "messages", _label(request, body)
        )
        if body.max_tokens == 0:
            work = _warm(request, body, deps, arrival)
        elif body.stream:
            return await _streamed(request, body, deps, arrival)
        else:
            work = _whole(request, body, deps, arrival)
        return http.json_response(await http.while_connected(request, work))

    async def count_tokens(request: Request) -> Response:
        """Count the tokens of a conversation's prompt without generating a reply."""
        body = await http.read_json(request, types.Conversation, deps)
        own = await http.while_connected(request, deps.of(body.model))
        chat, _ = to_chat(body, strict=False, images=http.accepts_images(own))
        http.require_model(own)
        # The label and the stop strings change the prompt of a request, so they change its count.
        stop = tuple(body.stop_sequences or ())
        prompt = await own.engine.render(chat, session=_label(request, body), stop=stop)
        return http.json_response(count_prompt(prompt, edited=body.context_management is not None))

    return [
        Route("/v1/messages", messages, methods=["POST"]),
        Route("/v1/messages/count_tokens", count_tokens, methods=["POST"]),
    ]


async def _whole(
    request: Request, body: types.Request, deps: http.Deps, arrival: Arrival
) -> dict[str, Any]:
    deps = await deps.of(body.model, arrival)
    job = await _job(request, body, deps)
    blocks = ContentBlocks(show_thinking=shows_thinking(body))
    last: Finished | None = None
    stream = await deps.engine.submit(job)
    try:
        async for event in stream:
            if isinstance(event, Text | Thinking | ToolCall):
                blocks.feed(event)
            elif isinstance(event, Finished):
                last = event
    finally:
        await sse.close_stream(stream)
    last = finished_or_raise(last)
    blocks.close()
    counts = count_usage(job.prompt, last.cached_tokens, last.generated_tokens)
    reply = begin_message(_message_id(job), body.model, counts)
    ends = end_fields(last, whole=_must_be_whole(job))
    return reply | {"content": blocks.content} | ends | edit_fields(body)


async def _warm(
    request: Request, body: types.Request, deps: http.Deps, arrival: Arrival
) -> dict[str, Any]:
    """Compute the KV of a request's prompt, and return a message object without content.

    This answers a request with `max_tokens` 0. Raises BadRequest if the request asks for a stream,
    and the errors of `Deps.of`, of rendering and of `run_warming`.
    """
    if body.stream:
        raise BadRequest("stream: there is no reply to stream with max_tokens: 0.", param="stream")
    deps = await deps.of(body.model, arrival)
    asked = await _job(request, body, deps)
    job = replace(asked, tools=None, tool_choice=ToolChoice(), format=None, thinking_budget=None)
    last = await run_warming(deps.engine, job)
    counts = count_usage(job.prompt, last.cached_tokens)
    reply = begin_message(_message_id(job), body.model, counts)
    return reply | {"stop_reason": "max_tokens"} | edit_fields(body)


@dataclass(frozen=True, slots=True)
class Begun:
    """A submitted request: its stream and its job.

    `admitted`: the event that reports its cached prefix; None if the request is still queued.
    """

    stream: Stream
    job: Job
    admitted: Admitted | None


async def _streamed(
    request: Request, body: types.Request, deps: http.Deps, arrival: Arrival
) -> Response:
    async def begin() -> Begun:
        own = await deps.of(body.model, arrival)
        job = await _job(request, body, own)
        stream, admitted = await sse.start_stream(own, job)
        return Begun(stream, job, admitted)

    late = LateReply(begin(), arrival, lambda one: sse.close_stream(one.stream))
    begun = await http.while_connected(request, late.begun(deps.settings.queue_grace))
    return sse.EventStream(
        late if begun is None else begun.stream,
        _late_events(late, body) if begun is None else _events(begun, body),
        deps.settings,
        ping=lambda: _event({"type": "ping"}),
        on_error=lambda error: _event(build_anthropic_error(error, arrival.id)),
    )


async def _late_events(late: LateReply[Begun], body: types.Request) -> sse.Events:
    """Yield the events of a reply whose model is still being loaded; pings are sent meanwhile."""
    yield _event({"type": "ping"})
    async with aclosing(_events(await late.get(), body)) as events:
        async for item in events:
            yield item


async def _events(begun: Begun, body: types.Request) -> sse.Events:
    stream, job, admitted = begun.stream, begun.job, begun.admitted
    cached = admitted.cached_tokens if admitted else 0
    start = begin_message(_message_id(job), body.model, count_usage(job.prompt, cached))
    yield _event({"type": "message_start", "message": start})
    yield _event({"type": "ping"})
    blocks = ContentBlocks(show_thinking=shows_thinking(body))
    last: Finished | None = None
    async for event in stream:
        if isinstance(event, Text | Thinking | ToolCall):
            for item in blocks.feed(event):
                yield _event(item)
        elif isinstance(event, Finished):
            last = event
    last = finished_or_raise(last)
    for item in blocks.close():
        yield _event(item)
    counts = count_usage(job.prompt, last.cached_tokens, last.generated_tokens)
    delta = end_fields(last, whole=_must_be_whole(job))
    yield _event({"type": "message_delta", "delta": delta, "usage": counts} | edit_fields(body))
    yield _event({"type": "message_stop"})


async def _job(request: Request, body: types.Request, deps: http.Deps) -> Job:
    chat, tools = to_chat(body, images=http.accepts_images(deps))
    form = read_format(body)
    check_not_continued(chat, form)
    choice = read_tool_choice(body, tools)
    info = http.require_model(deps)
    session = _label(request, body)
    begun = time.perf_counter()
    stop = tuple(body.stop_sequences or ())
    prompt = await deps.engine.render(chat, session=session, stop=stop)
    single = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
    return Job(
        id=http.get_request_id(request),
        prompt=prompt,
        sampling=to_sampling(body),
        max_tokens=body.max_tokens,
        stop=stop,
        tools=None if choice is None else tools,
        tool_choice=choice or ToolChoice(),
        thinking_budget=read_thinking_budget(body, takes_effort=info.takes_effort),
        parallel_tools=not single,
        format=form,
        session=session,
        client=read_client_name(request.headers),
        **read_job_options(request.headers),
        title=title_from_messages(chat.messages),
        api="messages",
        render_s=time.perf_counter() - begun,
        loaded_s=deps.loaded_s,
        speculate=body.speculate is not False,
    )


def _must_be_whole(job: Job) -> bool:
    return job.format is not None or job.tool_choice.required


def _message_id(job: Job) -> str:
    return "msg_" + job.id.removeprefix("req_")


def _label(request: Request, body: types.Conversation) -> str | None:
    user = (body.metadata or {}).get("user_id")
    return read_session_label(
        request.headers, metadata_user_id=user if isinstance(user, str) else None
    )


def _event(data: StreamEvent) -> ServerSentEvent:
    return sse.make_event(data, name=data["type"])
