"""An engine without a model, whose replies are scripts."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any, Literal

from mlxcache.engine.figures import Figures
from mlxcache.engine.metrics import Tally
from mlxcache.errors import MlxcacheError, NotFound
from mlxcache.types import (
    Admitted,
    Chat,
    Event,
    Finished,
    FinishReason,
    Image,
    Job,
    ModelInfo,
    Piece,
    Progress,
    Prompt,
    RequestRecord,
    Text,
    Thinking,
    ToolCall,
    token_ids,
)

Step = Event | MlxcacheError | RuntimeError | float | asyncio.Event
"""An event to yield, an error to raise, or seconds to wait; until it is set, for an asyncio one."""

INFO = ModelInfo(
    id="org/model-4bit",
    context_length=8192,
    max_context_length=32768,
    weights_bytes=1000,
    architecture="llama",
    has_thinking=True,
    sampling={"temperature": 0.6, "top_k": 20},
    has_tools=True,
    created=1_700_000_000,
)


def reply(
    *pieces: Piece | str,
    reason: FinishReason = "stop",
    cached: int = 0,
    stop_sequence: str | None = None,
) -> list[Step]:
    """Build a script: progress, then the pieces (a string is a Text), then the end.

    The prompt's length is put in when it is known; each piece counts as one token.
    """
    parts: list[Piece] = [Text(p) if isinstance(p, str) else p for p in pieces]
    reasoning = sum(isinstance(p, Thinking) for p in parts)
    calls = any(isinstance(p, ToolCall) for p in parts)
    end = Finished(
        reason="tool_calls" if calls and reason == "stop" else reason,
        prompt_tokens=0,
        cached_tokens=cached,
        restored_tokens=0,
        generated_tokens=len(parts),
        reasoning_tokens=reasoning,
        stop_sequence=stop_sequence,
    )
    return [Progress(cached, 0), *parts, end]


class FakeStream:
    """One scripted reply; `closed` is set by aclose, `cancelled` if that was before its end."""

    def __init__(
        self, record: RequestRecord, steps: Sequence[Step], admitted: Admitted, wait: float
    ):
        self.record = record
        self.closed = threading.Event()
        self.cancelled = False
        self.yielded = 0
        self._steps = list(steps)
        self._admitted = admitted
        self._ready_at = time.monotonic() + wait
        self._closing = asyncio.Event()
        self._done = False

    async def admitted(self, timeout: float) -> Admitted | None:  # noqa: ASYNC109 (the facade has it)
        left = self._ready_at - time.monotonic()
        if left > timeout:
            await self._sleep(timeout)
            return None
        await self._sleep(left)
        return self._admitted

    async def __aiter__(self) -> AsyncIterator[Event]:
        await self._sleep(self._ready_at - time.monotonic())
        yield self._admitted
        for step in self._steps:
            if self._closing.is_set():
                yield self._finished("cancelled")
                return
            if isinstance(step, float):
                await self._sleep(step)
            elif isinstance(step, asyncio.Event):
                await step.wait()
            elif isinstance(step, Exception):
                self._done = True
                self.record.status = "failed"
                raise step
            else:
                await asyncio.sleep(0)
                self.yielded += 1
                self._done = isinstance(step, Finished)
                yield self._counted(step)

    async def aclose(self) -> None:
        await asyncio.sleep(0)
        if not self.closed.is_set():
            self.cancelled = not self._done
            self.record.status = "done" if self._done else "cancelled"
        self._closing.set()
        self.closed.set()

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _sleep(self, seconds: float) -> None:
        if seconds > 0:
            try:
                await asyncio.wait_for(self._closing.wait(), seconds)
            except TimeoutError:
                return

    def _counted(self, event: Event) -> Event:
        total = self._admitted.prompt_tokens
        if isinstance(event, Progress) and not event.total:
            return Progress(event.done, total)
        if isinstance(event, Finished) and not event.prompt_tokens:
            return self._finished(event.reason, event)
        return event

    def _finished(self, reason: FinishReason, event: Finished | None = None) -> Finished:
        return Finished(
            reason=reason,
            prompt_tokens=self._admitted.prompt_tokens,
            cached_tokens=self._admitted.cached_tokens,
            restored_tokens=self._admitted.restored_tokens,
            generated_tokens=event.generated_tokens if event else 0,
            reasoning_tokens=event.reasoning_tokens if event else 0,
            stop_sequence=event.stop_sequence if event else None,
        )


class FakeEngine:
    """The engine's interface over a script.

    `script` is what every reply plays; `scripts`, if any, are those of the next ones. `queue_s` is
    how long a request waits to be admitted. `render_error` and `submit_error` are raised where they
    are set. `chats`, `texts`, `jobs` and `streams` are what came in.
    """

    def __init__(self) -> None:
        self.info: ModelInfo | None = INFO
        self.state: Literal["loading", "ready", "failed", "stopped"] = "ready"
        self.failure: str | None = None
        self.label, self.aliases = "toy", ("short",)
        self.residence: dict[str, Any] | None = None  # None: it was never loaded
        self.silent_s = 0.0
        self.ranks: dict[str, Any] | None = None  # None: the model is not divided
        self.load_share: float | None = None
        self.equal_passes: Sequence[int] | None = None  # None: nothing is guessed
        self.script: Sequence[Step] = reply("Hello", ", ", "world")
        self.scripts: list[Sequence[Step]] = []
        self.cached_tokens = 0
        self.restored_tokens = 0
        self.queue_s = 0.0
        self.prefetched = 0
        self.render_error: Exception | None = None
        self.submit_error: Exception | None = None
        self.chats: list[Chat] = []
        self.texts: list[str] = []
        self.sessions: Any = []  # labels; a test of sessions puts a book here
        self.book: Any = None  # a test of stored responses puts them here
        self.jobs: list[Job] = []
        self.streams: list[FakeStream] = []
        self.records: list[RequestRecord] = []
        self.tally = Tally()

    async def prefetch(self) -> None:
        self.prefetched += 1

    async def find_obstacle(self) -> str | None:
        """Return that nothing is wrong with the files."""
        return None

    async def render(
        self, chat: Chat, *, session: str | None = None, stop: Sequence[str] = ()
    ) -> Prompt:
        """Return a prompt of one token per message and per word."""
        self.chats.append(chat)
        self.sessions.append(session)
        if self.render_error:
            raise self.render_error
        texts = [_text(message["content"], self.info) for message in chat.messages]
        "".join(texts).encode()  # as a tokenizer would
        length = sum(1 + len(text.split()) for text in texts)
        at = chat.breakpoint
        return Prompt(token_ids(range(length + 1)), breakpoint=at and min(at, length))

    async def render_text(self, text: str) -> Prompt:
        """Return a prompt of one token per word."""
        self.texts.append(text)
        if self.render_error:
            raise self.render_error
        return Prompt(token_ids(range(len(text.split()))))

    def decode(self, prompt: Prompt) -> str:
        """Return a word for each token id."""
        return " ".join(map(str, prompt.ids.tolist()))

    async def submit(self, job: Job) -> FakeStream:
        """Return a stream that plays the script."""
        self.jobs.append(job)
        if self.submit_error:
            raise self.submit_error
        record = RequestRecord(
            id=job.id,
            session=job.session,
            api=job.api,
            client=job.client,
            status="queued",
            created_at=time.time(),
            prompt_tokens=len(job.prompt.ids),
            cached_tokens=self.cached_tokens,
            fed_tokens=len(job.prompt.ids) - self.cached_tokens,
            timing={"render_s": job.render_s},
        )
        self.records.insert(0, record)
        admitted = Admitted(len(job.prompt.ids), self.cached_tokens, self.restored_tokens)
        script = self.scripts.pop(0) if self.scripts else self.script
        self.streams.append(FakeStream(record, script, admitted, self.queue_s))
        return self.streams[-1]

    def figures(self) -> dict[str, Any]:
        """Return fixed figures."""
        return {"ram": {"used_bytes": 1, "limit_bytes": 2}, "sessions": len(self.jobs)}

    def measure(self) -> Figures | None:
        """Return figures that are all 0, once a model is loaded."""
        return Figures(ranks=self.ranks) if self.info is not None else None

    def requests(self) -> list[RequestRecord]:
        """Return the records, newest first."""
        return self.records

    def prefill_left_s(self, record: RequestRecord) -> float | None:
        """Return 10 ms for each token that is left."""
        if record.status != "prefill":
            return None
        return (record.prompt_tokens - record.cached_tokens - record.fed_tokens) / 100

    async def request(self, id: str) -> RequestRecord | None:
        """Return one record by id."""
        return next((r for r in self.records if r.id == id), None)


class OneModel:
    """The models of a server that has one alone, with an engine that a test made."""

    def __init__(self, engine: Any):
        self.default = engine
        self.engines = [engine]

    async def of(self, requested: str | None, arrival: Any = None) -> Any:
        return self.default

    def find(self, requested: str | None) -> Any:
        return self.default

    def of_record(self, record: RequestRecord) -> Any:
        return self.default

    def named(self, name: str) -> Any:
        if name not in (self.default.info.id, self.default.label):
            raise NotFound(f"There is no model {name!r}.")
        return self.default

    @property
    def sessions(self) -> Any:
        return self.default.sessions

    def requests(self) -> Any:
        return self.default.requests()

    def measure(self) -> Any:
        return self.default.measure()

    def figures(self) -> dict[str, Any]:
        return self.default.figures()

    def describe(self) -> list[dict[str, Any]]:
        state = {"aliases": list(self.default.aliases), "default": True}
        return [{"label": self.default.label, **state, **(self.default.residence or {})}]


def _text(content: Any, info: ModelInfo | None) -> str:
    """Return a message's text; an image counts as a word if the model takes images."""
    if info is not None and info.has_images and isinstance(content, list):
        return " ".join("image" if isinstance(part, Image) else part for part in content)
    assert isinstance(content, str)
    return content
