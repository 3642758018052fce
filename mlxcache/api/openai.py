"""Endpoints of OpenAI's API: POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from mlxcache.api.choices import Choices, start_choices
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
    require_model,
    while_connected,
)
from mlxcache.api.late import LateReply
from mlxcache.api.sse import (
    Events,
    EventStream,
    ReplyProgress,
    close_stream,
    make_event,
    make_raw_event,
)
from mlxcache.errors import BadRequest
from mlxcache.types import Job, Prompt
from mlxcache.wire import openai_request as wire
from mlxcache.wire.openai_output import read_format, read_tool_use
from mlxcache.wire.openai_reply import (
    ChatChunks,
    Chunks,
    Envelope,
    TextChunks,
    Wish,
    chat_completion,
    text_completion,
    usage_chunk,
)
from mlxcache.wire.openai_types import ChatRequest, Generation, TextRequest
from mlxcache.wire.reply import WholeReply
from mlxcache.wire.titles import title_from_messages, title_from_text

TEXT_MAX_TOKENS = 16
"""OpenAI's default limit for a text completion."""


Whole = Callable[[Sequence[WholeReply], Envelope, Wish], dict[str, Any]]
"""Function that builds the response body from finished replies."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Reply format of one endpoint.

    `id_prefix` begins the ids of replies. `whole` builds a reply that is not streamed, with the
    value `object` in its JSON field `object`. The class `chunks` builds the chunks of a streamed
    reply, with the value `chunk_object` in that field. `called` is the `finish_reason` of a reply
    that calls tools.
    """

    id_prefix: str
    object: str
    chunk_object: str
    whole: Whole
    chunks: type[Chunks]
    called: str = "tool_calls"


CHAT = Endpoint(
    "chatcmpl-", "chat.completion", "chat.completion.chunk", chat_completion, ChatChunks
)
CHAT_NAMED = replace(CHAT, called="stop")
"""Chat whose `tool_choice` names a function. Its `finish_reason` is `stop`, as in OpenAI's API."""
TEXT = Endpoint("cmpl-", "text_completion", "text_completion", text_completion, TextChunks)


def routes(deps: Deps) -> list[Route]:
    """Return the routes of OpenAI's API."""
    return [
        Route("/v1/chat/completions", partial(chat_completions, deps), methods=["POST"]),
        Route("/v1/completions", partial(completions, deps), methods=["POST"]),
    ]


async def chat_completions(deps: Deps, request: Request) -> Response:
    """Generate a reply to a conversation."""
    body = await read_json(request, ChatRequest, deps)
    wire.check_supported(body)

    async def prepare(deps: Deps) -> Prepared:
        chat = wire.to_chat(body, images=accepts_images(deps))
        form = read_format(body)
        use = read_tool_use(body, chat.tools)
        fields = _fields(deps, request, body) | {
            "tools": use.tools,
            "tool_choice": use.choice,
            "parallel_tools": use.parallel,
            "format": form,
            "max_tokens": wire.read_max_tokens(body, deps.settings.default_max_tokens),
            "thinking_budget": wire.read_thinking_budget(
                body, takes_effort=require_model(deps).takes_effort
            ),
            "top_logprobs": (body.top_logprobs or 0) if body.logprobs else None,
            "title": title_from_messages(chat.messages),
            "api": "chat",
        }
        began = time.perf_counter()
        prompt = await deps.engine.render(chat, session=fields["session"], stop=fields["stop"])
        job = Job(prompt=prompt, render_s=time.perf_counter() - began, **fields)
        endpoint = CHAT_NAMED if use.named else CHAT
        held = form is not None or use.choice.required
        return Prepared(_jobs([job], body), endpoint, held=held)

    return await _answer(deps, request, body, "chat", prepare)


async def completions(deps: Deps, request: Request) -> Response:
    """Continue a prompt given as text or as token ids, without a chat template."""
    body = await read_json(request, TextRequest, deps)
    wire.check_supported(body)
    given = wire.read_prompts(body)

    async def prepare(deps: Deps) -> Prepared:
        form = read_format(body)
        fields = _fields(deps, request, body) | {
            "max_tokens": wire.read_max_tokens(
                body, deps.settings.default_max_tokens or TEXT_MAX_TOKENS
            ),
            "top_logprobs": body.logprobs,
            "api": "completions",
            "raw": True,
            "format": form,
        }
        shown = given if body.echo else ()
        echoes = tuple(one if isinstance(one, str) else deps.engine.decode(one) for one in shown)
        jobs = [await _text_job(deps, one, fields) for one in given]
        return Prepared(_jobs(jobs, body), TEXT, echoes, held=form is not None)

    return await _answer(deps, request, body, "completions", prepare)


async def _text_job(deps: Deps, one: str | Prompt, fields: dict[str, Any]) -> Job:
    began = time.perf_counter()
    prompt = await deps.engine.render_text(one) if isinstance(one, str) else one
    if not len(prompt.ids):
        raise BadRequest("The prompt is empty.", param="prompt")
    title = title_from_text(one) if isinstance(one, str) else None
    return Job(prompt=prompt, title=title, render_s=time.perf_counter() - began, **fields)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A rendered request: a job for each choice, and the form in which its reply is written.

    `echoes`: the texts of its prompts, if choices must begin with them. `held`: a format or a tool
    call is required, so that a part of a reply is useless. A reply that was stopped because it
    repeats itself then has the `finish_reason` `length`.
    """

    jobs: list[Job]
    endpoint: Endpoint
    echoes: tuple[str, ...] = ()
    held: bool = False


def _jobs(jobs: Sequence[Job], body: Generation) -> list[Job]:
    """Return a job for each of the `n` choices of each prompt, from one job for each prompt.

    They are ordered by prompt. If the request has a seed, the choices of a prompt have different
    seeds. The first job of all has the id of the request; the others add `-1`, `-2` and so on.
    """
    n = wire.read_choices(body)
    made = [
        replace(job, sampling=wire.of_choice(job.sampling, i)) for job in jobs for i in range(n)
    ]
    return [replace(job, id=f"{job.id}-{i}", choice=i) if i else job for i, job in enumerate(made)]


def _fields(deps: Deps, request: Request, body: Generation) -> dict[str, Any]:
    require_model(deps)
    return {
        "id": get_request_id(request),
        "sampling": wire.to_sampling(body),
        "stop": wire.read_stop_strings(body),
        "session": read_session_label(request.headers, prompt_cache_key=body.prompt_cache_key),
        "client": read_client_name(request.headers),
        "loaded_s": deps.loaded_s,
        "speculate": body.speculate is not False,
        **read_job_options(request.headers),
    }


@dataclass(frozen=True, slots=True)
class Begun:
    """A submitted request: the streams of its choices, and the form in which it is answered.

    `count` is the number of choices of all prompts together. `envelope` has the fields that all
    JSON objects of the answer share, such as its id, and `wish` what the request asked the answer
    to include, such as log-probabilities.
    """

    choices: Choices
    count: int
    endpoint: Endpoint
    envelope: Envelope
    wish: Wish


async def _answer(
    deps: Deps,
    request: Request,
    body: Generation,
    api: str,
    prepare: Callable[[Deps], Awaitable[Prepared]],
) -> Response:
    session = read_session_label(request.headers, prompt_cache_key=body.prompt_cache_key)
    arrival = read_arrival(request.headers, get_request_id(request), api, session)

    async def begin() -> Begun:
        own = await deps.of(body.model, arrival)
        asked = await prepare(own)
        endpoint = asked.endpoint
        wish = Wish(
            logprobs=wire.wants_logprobs(body),
            include_usage=bool(body.stream_options and body.stream_options.include_usage),
            n=wire.read_choices(body),
            echoes=asked.echoes,
            called=endpoint.called,
            whole=asked.held,
        )
        name = endpoint.chunk_object if body.stream else endpoint.object
        id = arrival.id.replace("req_", endpoint.id_prefix)
        envelope = Envelope(id, body.model or require_model(own).id, name)
        choices = await start_choices(own, asked.jobs)
        return Begun(choices, len(asked.jobs), endpoint, envelope, wish)

    async def whole() -> dict[str, Any]:
        begun = await begin()
        try:
            replies = await begun.choices.gather()
            return begun.endpoint.whole(replies, begun.envelope, begun.wish)
        finally:
            await close_stream(begun.choices)

    if not body.stream:
        return json_response(await while_connected(request, whole()))
    late = LateReply(begin(), arrival, lambda one: close_stream(one.choices))
    begun = await while_connected(request, late.begun(deps.settings.queue_grace))
    progress = ReplyProgress(lambda: deps.load_share(body.model))
    return EventStream(
        late if begun is None else begun.choices,
        _late_events(late, progress) if begun is None else _events(begun, progress),
        deps.settings,
        ping=progress.to_comment,
        on_error=_late_error,
    )


async def _late_events(late: LateReply[Begun], progress: ReplyProgress) -> Events:
    """Yield a progress comment at once, then the events of the reply when it has begun.

    Used if the model is still being loaded when the response begins.
    """
    yield progress.to_comment()
    async with aclosing(_events(await late.get(), progress)) as events:
        async for item in events:
            yield item


async def _events(begun: Begun, progress: ReplyProgress) -> Events:
    envelope, wish = begun.envelope, begun.wish
    chunks = [begun.endpoint.chunks(envelope, wish, i) for i in range(begun.count)]
    for one in chunks:
        for chunk in one.begin():
            yield make_event(chunk)
    async with aclosing(begun.choices.read()) as items:
        async for index, item in items:
            progress.update(item)
            for chunk in chunks[index].feed(item):
                yield make_event(chunk)
    usage = usage_chunk(envelope, chunks, wish.n)
    if wish.include_usage:
        yield make_event(usage)
    yield make_raw_event("[DONE]")


def _late_error(error: Exception) -> Any:
    return make_event(build_openai_error(error))
