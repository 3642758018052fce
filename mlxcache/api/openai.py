"""Endpoints of OpenAI's API: POST /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any, ClassVar

from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response

from mlxcache.api import http
from mlxcache.api.errors import build_openai_error
from mlxcache.api.exchange import Exchange, merge
from mlxcache.api.operation import EVENTS, JSON, Operation
from mlxcache.api.sse import Events, make_comment, make_event, make_raw_event
from mlxcache.errors import BadRequest
from mlxcache.types import Admitted, Event, Job, Progress, Prompt
from mlxcache.wire import openai_reply as reply
from mlxcache.wire import openai_request as wire
from mlxcache.wire.openai_types import ChatRequest, Generation, TextRequest
from mlxcache.wire.reply import WholeReply, gather_reply
from mlxcache.wire.titles import title_from_messages, title_from_text

TEXT_MAX_TOKENS = 16
"""OpenAI's default limit for a text completion."""

MAX_PROMPT_LOGPROBS = 4_000_000
"""Most log-probabilities of the prompts of a request: each takes 200 bytes until it is answered."""


async def chat_completions(deps: http.Deps, request: Request) -> Response:
    """Generate a reply to a conversation."""
    body = await http.read_json(request, ChatRequest, deps)
    wire.check_supported(body)
    return await ChatExchange(deps, request, body).answer()


async def completions(deps: http.Deps, request: Request) -> Response:
    """Continue a prompt given as text or as token ids, without a chat template."""
    body = await http.read_json(request, TextRequest, deps)
    wire.check_supported(body)
    return await TextExchange(deps, request, body).answer()


class ReplyProgress:
    """Phase of one reply, to be sent as a comment at least every `ApiSettings.ping_seconds`.

    `load_share` returns the progress of loading the model, from 0 to 1, or None if the model is not
    being loaded (see `Engine.load_share`).
    """

    def __init__(self, load_share: Callable[[], float | None] = lambda: None) -> None:
        self._text: str | None = None
        self._load_share = load_share

    def update(self, event: Event) -> None:
        """Set the phase according to an event. Call this for every event of the stream."""
        match event:
            case Progress(done, total):
                self._text = f"prefill {done}/{total}"
            case Admitted():
                self._text = f"prefill {event.cached_tokens}/{event.prompt_tokens}"
            case _:
                self._text = "decode"

    def to_comment(self) -> ServerSentEvent:
        """Return a comment: `queued`, `loading 43%`, `prefill 512/18500`, or `decode`."""
        share = self._load_share() if self._text is None else None
        queued = "queued" if share is None else f"loading {share:.0%}"
        return make_comment(self._text or queued)


class Completions(Exchange):
    """A request for completions; each endpoint is a subclass.

    `id_prefix` begins the ids of replies. `object` and `chunk_object` are the values of the JSON
    field `object` in a whole reply and in the chunks of a streamed one, which `chunks` builds.
    """

    id_prefix: ClassVar[str]
    object: ClassVar[str]
    chunk_object: ClassVar[str]
    chunks: ClassVar[type[reply.Chunks]]
    _envelope: reply.Envelope

    def __init__(self, deps: http.Deps, request: Request, api: str, body: Generation):
        super().__init__(deps, request, api, body, body.prompt_cache_key)
        self._generation = body
        self._progress = ReplyProgress(lambda: deps.models.find(body.model).load_share)

    @staticmethod
    @abstractmethod
    def write(replies: Sequence[WholeReply], envelope: reply.Envelope) -> dict[str, Any]:
        """Return the body of a response with finished replies."""

    def choices(self, jobs: Sequence[Job], **more: Any) -> list[Job]:
        """Return a job for each of the `n` choices of each prompt, from one job for each prompt.

        They are ordered by prompt. If the request has a seed, the choices of a prompt have
        different seeds. The first job of all has the id of the request; the others add `-1`, `-2`
        and so on. `more`: fields of `Envelope`.
        """
        body, n = self._generation, wire.read_choices(self._generation)
        priority = wire.read_priority(body)
        usage = bool(body.stream_options and body.stream_options.include_usage)
        self._envelope = reply.Envelope(
            self.arrival.id.replace("req_", self.id_prefix),
            body.model or http.require_model(self.deps).id,
            self.chunk_object if body.stream else self.object,
            logprobs=wire.wants_logprobs(body),
            include_usage=usage,
            n=n,
            **more,
        )
        made = [
            replace(job, sampling=wire.of_choice(job.sampling, i), priority=priority)
            for job in jobs
            for i in range(n)
        ]
        return [
            replace(job, id=f"{job.id}-{i}", choice=i) if i else job for i, job in enumerate(made)
        ]

    async def whole(self) -> dict[str, Any]:
        tasks = [asyncio.ensure_future(gather_reply(one)) for one in self.streams]
        try:
            return self.write(await asyncio.gather(*tasks), self._envelope)
        finally:
            for task in tasks:
                task.cancel()

    async def events(self) -> Events:
        envelope, progress = self._envelope, self._progress
        chunks = [self.chunks(envelope, i) for i in range(len(self.streams))]
        for one in chunks:
            for chunk in one.begin():
                yield make_event(chunk)
        async with aclosing(merge(self.streams)) as items:
            async for index, item in items:
                progress.update(item)
                for chunk in chunks[index].feed(item):
                    yield make_event(chunk)
        usage = reply.usage_chunk(envelope, chunks)
        if envelope.include_usage:
            yield make_event(usage)
        yield make_raw_event("[DONE]")

    def ping(self) -> ServerSentEvent:
        return self._progress.to_comment()

    def failure(self, error: Exception) -> ServerSentEvent:
        return make_event(build_openai_error(error))


class ChatExchange(Completions):
    """A request to /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    chunks = reply.ChatChunks
    write = staticmethod(reply.chat_completion)

    def __init__(self, deps: http.Deps, request: Request, body: ChatRequest):
        super().__init__(deps, request, "chat", body)
        self._body = body

    async def jobs(self) -> list[Job]:
        body, deps = self._body, self.deps
        chat = wire.to_chat(body, images=http.accepts_images(deps))
        form = wire.read_format(body)
        use = wire.read_tool_use(body, chat.tools)
        info, stop = http.require_model(deps), wire.read_stop_strings(body)
        fields = {
            "sampling": wire.to_sampling(body),
            "max_tokens": wire.read_max_tokens(body, deps.settings.default_max_tokens),
            "thinking_budget": wire.read_thinking_budget(body, takes_effort=info.takes_effort),
        }
        began = time.perf_counter()
        job = self.make_job(
            await deps.engine.render(chat, session=self.arrival.session, stop=stop),
            began,
            stop=stop,
            shows_stop=wire.shows_stop(body),
            tools=use.tools,
            tool_choice=use.choice,
            parallel_tools=use.parallel,
            format=form,
            top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            title=title_from_messages(chat.messages),
            **fields,
        )
        # Of a reply that calls the function that `tool_choice` names, OpenAI's reason is `stop`.
        called = "stop" if use.named else "tool_calls"
        return self.choices([job], called=called, whole=form is not None or use.choice.required)


class TextExchange(Completions):
    """A request to /v1/completions."""

    id_prefix = "cmpl-"
    object = chunk_object = "text_completion"
    chunks = reply.TextChunks
    write = staticmethod(reply.text_completion)

    def __init__(self, deps: http.Deps, request: Request, body: TextRequest):
        super().__init__(deps, request, "completions", body)
        self._body, self._given = body, wire.read_prompts(body)

    async def jobs(self) -> list[Job]:
        body, deps = self._body, self.deps
        form = wire.read_format(body)
        http.require_model(deps)
        default = deps.settings.default_max_tokens or TEXT_MAX_TOKENS
        fields = {
            "sampling": wire.to_sampling(body),
            "stop": wire.read_stop_strings(body),
            "shows_stop": wire.shows_stop(body),
            "max_tokens": wire.read_max_tokens(body, default),
            "top_logprobs": body.logprobs,
            "prompt_logprobs": wire.wants_prompt_logprobs(body),
            "raw": True,
            "format": form,
        }
        shown = self._given if body.echo else ()
        echoes = tuple(one if isinstance(one, str) else deps.engine.decode(one) for one in shown)
        jobs = [await self._text_job(one, fields) for one in self._given]
        tokens = wire.read_choices(body) * sum(len(job.prompt.ids) for job in jobs)
        if fields["prompt_logprobs"] and tokens * (1 + (body.logprobs or 0)) > MAX_PROMPT_LOGPROBS:
            raise BadRequest(
                f"`logprobs` of {tokens:,} prompt tokens are too many for one request: its tokens "
                f"times their log-probabilities are at most {MAX_PROMPT_LOGPROBS:,}. Send fewer "
                "prompts at once.",
                param="prompt",
            )
        return self.choices(jobs, echoes=echoes, whole=form is not None)

    async def _text_job(self, one: str | Prompt, fields: dict[str, Any]) -> Job:
        began = time.perf_counter()
        prompt = await self.deps.engine.render_text(one) if isinstance(one, str) else one
        if not len(prompt.ids):
            raise BadRequest("The prompt is empty.", param="prompt")
        title = title_from_text(one) if isinstance(one, str) else None
        return self.make_job(prompt, began, title=title, **fields)


ENDPOINTS = {
    "POST /v1/chat/completions": Operation(
        chat_completions, ChatRequest, "ChatCompletion", types=(JSON, EVENTS)
    ),
    "POST /v1/completions": Operation(
        completions, TextRequest, "TextCompletion", types=(JSON, EVENTS)
    ),
}
