"""Endpoints of OpenAI's API: POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api.errors import build_openai_error
from mlxcache.api.headers import read_client_name, read_job_options, read_session_label
from mlxcache.api.http import (
    Deps,
    accepts_images,
    get_request_id,
    json_response,
    read_json,
    require_model,
    while_connected,
)
from mlxcache.api.sse import (
    Events,
    EventStream,
    ReplyProgress,
    close_stream,
    make_event,
    make_raw_event,
    start_stream,
)
from mlxcache.errors import BadRequest
from mlxcache.types import Job
from mlxcache.wire import openai_request as wire
from mlxcache.wire.formats import check_not_continued
from mlxcache.wire.openai_output import read_format, read_tool_use
from mlxcache.wire.openai_reply import (
    ChatChunks,
    Chunks,
    Envelope,
    TextChunks,
    chat_completion,
    text_completion,
)
from mlxcache.wire.openai_types import ChatRequest, Generation, TextRequest
from mlxcache.wire.reply import WholeReply, gather_reply
from mlxcache.wire.titles import title_from_messages, title_from_text

if TYPE_CHECKING:
    from mlxcache.engine.engine import Stream

TEXT_MAX_TOKENS = 16
"""OpenAI's default limit for a text completion."""


class _Whole(Protocol):
    def __call__(
        self, reply: WholeReply, envelope: Envelope, *, logprobs: bool
    ) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Reply format of one endpoint: id prefix, object names, and builders of the bodies.

    `called`: the `finish_reason` of a reply that calls tools.
    """

    id_prefix: str
    object: str
    chunk_object: str
    whole: _Whole
    chunks: type[Chunks]
    called: str = "tool_calls"


CHAT = Endpoint(
    "chatcmpl-", "chat.completion", "chat.completion.chunk", chat_completion, ChatChunks
)
CHAT_NAMED = replace(CHAT, called="stop")
"""Chat whose `tool_choice` names a function: that it was called is no decision of the model's."""
TEXT = Endpoint("cmpl-", "text_completion", "text_completion", text_completion, TextChunks)


def routes(deps: Deps) -> list[Route]:
    """Return the routes of this API."""
    return [
        Route("/v1/chat/completions", partial(chat_completions, deps), methods=["POST"]),
        Route("/v1/completions", partial(completions, deps), methods=["POST"]),
    ]


async def chat_completions(deps: Deps, request: Request) -> Response:
    """Generate one reply to a conversation."""
    body = await read_json(request, ChatRequest, deps)
    wire.check_supported(body)
    chat = wire.to_chat(body, images=accepts_images(deps))
    form = read_format(body)
    check_not_continued(chat, form)
    use = read_tool_use(body, chat.tools)
    fields = _fields(deps, request, body) | {
        "tools": use.tools,
        "tool_choice": use.choice,
        "parallel_tools": use.parallel,
        "format": form,
        "max_tokens": wire.read_max_tokens(body, deps.settings.default_max_tokens),
        "top_logprobs": (body.top_logprobs or 0) if body.logprobs else None,
        "title": title_from_messages(chat.messages),
        "api": "chat",
    }

    async def job() -> Job:
        began = time.perf_counter()
        prompt = await deps.engine.render(chat, session=fields["session"], stop=fields["stop"])
        return Job(prompt=prompt, render_s=time.perf_counter() - began, **fields)

    return await _answer(deps, request, body, CHAT_NAMED if use.named else CHAT, job)


async def completions(deps: Deps, request: Request) -> Response:
    """Continue a text, or token ids as they are."""
    body = await read_json(request, TextRequest, deps)
    wire.check_supported(body)
    given = wire.read_prompt(body)
    fields = _fields(deps, request, body) | {
        "max_tokens": wire.read_max_tokens(
            body, deps.settings.default_max_tokens or TEXT_MAX_TOKENS
        ),
        "top_logprobs": body.logprobs,
        "title": title_from_text(given) if isinstance(given, str) else None,
        "api": "completions",
        "raw": True,
        "format": read_format(body),
    }

    async def job() -> Job:
        began = time.perf_counter()
        prompt = await deps.engine.render_text(given) if isinstance(given, str) else given
        if not len(prompt.ids):
            raise BadRequest("The prompt is empty.", param="prompt")
        return Job(prompt=prompt, render_s=time.perf_counter() - began, **fields)

    return await _answer(deps, request, body, TEXT, job)


def _fields(deps: Deps, request: Request, body: Generation) -> dict[str, Any]:
    require_model(deps)
    return {
        "id": get_request_id(request),
        "sampling": wire.to_sampling(body),
        "stop": wire.read_stop_strings(body),
        "session": read_session_label(request.headers, prompt_cache_key=body.prompt_cache_key),
        "client": read_client_name(request.headers),
        **read_job_options(request.headers),
    }


async def _answer(
    deps: Deps,
    request: Request,
    body: Generation,
    endpoint: Endpoint,
    make_job: Callable[[], Awaitable[Job]],
) -> Response:
    id = get_request_id(request).replace("req_", endpoint.id_prefix)
    model = body.model or require_model(deps).id

    async def begin() -> tuple[Stream, bool]:
        job = await make_job()
        stream, _ = await start_stream(deps, job)
        return stream, job.top_logprobs is not None

    async def whole() -> dict[str, Any]:
        stream, logprobs = await begin()
        try:
            envelope = Envelope(id, model, endpoint.object, endpoint.called)
            return endpoint.whole(await gather_reply(stream), envelope, logprobs=logprobs)
        finally:
            await close_stream(stream)

    if not body.stream:
        return json_response(await while_connected(request, whole()))
    stream, logprobs = await while_connected(request, begin())
    progress = ReplyProgress()
    chunks = endpoint.chunks(
        Envelope(id, model, endpoint.chunk_object, endpoint.called),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        logprobs=logprobs,
    )
    events = _events(stream, chunks, progress)
    return EventStream(
        stream, events, deps.settings, ping=progress.to_comment, on_error=_late_error
    )


async def _events(stream: Stream, chunks: Chunks, progress: ReplyProgress) -> Events:
    for chunk in chunks.begin():
        yield make_event(chunk)
    async for item in stream:
        progress.update(item)
        for chunk in chunks.feed(item):
            yield make_event(chunk)
    for chunk in chunks.end():
        yield make_event(chunk)
    yield make_raw_event("[DONE]")


def _late_error(error: Exception) -> Any:
    return make_event(build_openai_error(error))
