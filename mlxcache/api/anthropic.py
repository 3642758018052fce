"""Endpoints of Anthropic's Messages API: /v1/messages and /v1/messages/count_tokens.

Query strings and `anthropic-beta` headers are ignored.
Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from mlxcache.api import http, sse
from mlxcache.api.cache import run_warming
from mlxcache.api.errors import build_anthropic_error
from mlxcache.api.exchange import Exchange
from mlxcache.api.operation import EVENTS, JSON, Operation
from mlxcache.errors import BadRequest
from mlxcache.types import Finished, Job, Piece, ToolChoice
from mlxcache.wire import anthropic_reply as reply
from mlxcache.wire import anthropic_request as wire
from mlxcache.wire import anthropic_types as types
from mlxcache.wire.reply import finished_or_raise
from mlxcache.wire.titles import title_from_messages


async def messages(deps: http.Deps, request: Request) -> Response:
    """Generate a reply to a conversation."""
    body = await http.read_json(request, types.Request, deps)
    exchange = MessageExchange(deps, request, body)
    if body.max_tokens > 0:
        return await exchange.answer()
    return http.json_response(await http.while_connected(request, exchange.warm()))


async def count_tokens(deps: http.Deps, request: Request) -> Response:
    """Count the tokens of a conversation's prompt without generating a reply."""
    body = await http.read_json(request, types.Conversation, deps)
    own = await http.while_connected(request, deps.of(body.model))
    chat, tools = wire.to_chat(body, strict=False, images=http.accepts_images(own))
    wire.read_format(body)  # these two are not in the prompt, but refused as for a message
    wire.read_tool_choice(body, tools)
    http.require_model(own)
    # The label and the stop strings change the prompt of a request, so they change its count.
    stop = tuple(body.stop_sequences or ())
    session = http.read_session_label(request.headers, _session(body))
    prompt = await own.engine.render(chat, session=session, stop=stop)
    return http.json_response(
        reply.count_prompt(prompt, edited=body.context_management is not None)
    )


def _session(body: types.Conversation) -> str | None:
    user = (body.metadata or {}).get("user_id")
    return http.session_of_user_id(user) if isinstance(user, str) else None


class MessageExchange(Exchange):
    """A request for a message."""

    _job: Job

    def __init__(self, deps: http.Deps, request: Request, body: types.Request):
        super().__init__(deps, request, "messages", body, _session(body))
        self._body = body
        self._blocks = reply.ContentBlocks(show_thinking=wire.shows_thinking(body))

    async def jobs(self) -> list[Job]:
        body = self._body
        chat, tools = wire.to_chat(body, images=http.accepts_images(self.deps))
        form = wire.read_format(body)
        wire.check_not_continued(chat, form)
        choice = wire.read_tool_choice(body, tools)
        info = http.require_model(self.deps)
        began = time.perf_counter()
        stop = tuple(body.stop_sequences or ())
        prompt = await self.deps.engine.render(chat, session=self.arrival.session, stop=stop)
        single = body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use
        self._job = self.make_job(
            prompt,
            began,
            sampling=wire.to_sampling(body),
            max_tokens=body.max_tokens,
            stop=stop,
            tools=None if choice is None else tools,
            tool_choice=choice or ToolChoice(),
            thinking_budget=wire.read_thinking_budget(body, takes_effort=info.takes_effort),
            parallel_tools=not single,
            format=form,
            title=title_from_messages(chat.messages),
        )
        return [self._job]

    async def warm(self) -> dict[str, Any]:
        """Compute the prompt's KV for a request with `max_tokens` 0; return an empty message."""
        if self._body.stream:
            raise BadRequest(
                "stream: there is no reply to stream with max_tokens: 0.", param="stream"
            )
        await self.find_model()
        (asked,) = await self.jobs()
        free = replace(asked, tools=None, tool_choice=ToolChoice(), format=None)
        last = await run_warming(self.deps.engine, replace(free, thinking_budget=None))
        begun = self._begin(last.cached_tokens)
        return begun | {"stop_reason": "max_tokens"} | reply.edit_fields(self._body)

    async def whole(self) -> dict[str, Any]:
        last: Finished | None = None
        async for event in self.streams[0]:
            if isinstance(event, Piece):
                self._blocks.feed(event)
            elif isinstance(event, Finished):
                last = event
        last = finished_or_raise(last)
        self._blocks.close()
        begun = self._begin(last.cached_tokens, last.generated_tokens)
        content = {"content": self._blocks.content}
        return begun | content | self._end(last) | reply.edit_fields(self._body)

    async def events(self) -> sse.Events:
        cached = self.admitted.cached_tokens if self.admitted else 0
        yield _event({"type": "message_start", "message": self._begin(cached)})
        yield self.ping()
        last: Finished | None = None
        async for event in self.streams[0]:
            if isinstance(event, Piece):
                for item in self._blocks.feed(event):
                    yield _event(item)
            elif isinstance(event, Finished):
                last = event
        last = finished_or_raise(last)
        for item in self._blocks.close():
            yield _event(item)
        usage = reply.count_usage(self._job.prompt, last.cached_tokens, last.generated_tokens)
        ended = {"type": "message_delta", "delta": self._end(last), "usage": usage}
        yield _event(ended | reply.edit_fields(self._body))
        yield _event({"type": "message_stop"})

    def ping(self) -> ServerSentEvent:
        return _event({"type": "ping"})

    def failure(self, error: Exception) -> ServerSentEvent:
        return _event(build_anthropic_error(error, self.arrival.id))

    def _begin(self, cached: int, generated: int = 0) -> dict[str, Any]:
        id = "msg_" + self.arrival.id.removeprefix("req_")
        usage = reply.count_usage(self._job.prompt, cached, generated)
        return reply.begin_message(id, self._body.model, usage)

    def _end(self, last: Finished) -> dict[str, Any]:
        whole = self._job.format is not None or self._job.tool_choice.required
        return reply.end_fields(last, whole=whole)


def _event(data: reply.StreamEvent) -> ServerSentEvent:
    return sse.make_event(data, name=data["type"])


ENDPOINTS = {
    "POST /v1/messages": Operation(messages, types.Request, "Message", types=(JSON, EVENTS)),
    "POST /v1/messages/count_tokens": Operation(count_tokens, types.Conversation, "InputTokens"),
}
