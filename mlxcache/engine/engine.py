"""The asyncio facade of the engine: start, render, submit, report figures, stop.

It never calls MLX itself.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mlxcache.config import Settings
from mlxcache.engine.figures import Figures, with_disk
from mlxcache.engine.first_load import FirstLoad
from mlxcache.engine.keep_awake import KeepAwake, Timer
from mlxcache.engine.metrics import Records, Tally
from mlxcache.engine.requests import LiveRequest, RequestTable, Stream, prefill_left_s
from mlxcache.engine.runtime import RECORDED, ModelRuntime
from mlxcache.engine.trace import Recordings
from mlxcache.errors import (
    BadRequest,
    Busy,
    GenerationFailed,
    MlxcacheError,
    NotReady,
    Unsupported,
)
from mlxcache.model import load
from mlxcache.model.guidance.grammar import is_constrained
from mlxcache.model.guidance.guide import Guide
from mlxcache.model.lark import STACK_BYTES
from mlxcache.model.sampling import resolve, validate
from mlxcache.model.weights import Weights
from mlxcache.owner import OWNER
from mlxcache.prompt.canonical.uuids import ReplyRestorer
from mlxcache.ranks.group import Place, end_process
from mlxcache.ranks.rank_zero import RankZero
from mlxcache.residency.memory import Shared
from mlxcache.residency.residency import Rounds
from mlxcache.residency.resident import Resident
from mlxcache.scheduling.task import for_owner
from mlxcache.sessions.book import ModelSessions, SessionBook
from mlxcache.sessions.journal import Served
from mlxcache.store.database import Database
from mlxcache.types import (
    Admitted,
    Chat,
    Event,
    Finished,
    Job,
    ModelInfo,
    Piece,
    Prompt,
    RequestRecord,
)

if TYPE_CHECKING:
    from mlxcache.remote.objects import Objects

log = logging.getLogger("mlxcache.engine")

LOST_S = 0.5
"""Seconds from the loss of a rank to the end of this process, for clients to read their errors."""

T = TypeVar("T")
State = Literal["loading", "ready", "failed", "stopped"]
RENDER_THREADS = 4
COMPILE_THREADS = 2
COMPILE_S = 15.0
"""Longest time, in seconds, that a request waits for its grammar to be compiled."""


def _ignore(*_: Any) -> None: ...


def _call_later(seconds: float, action: Callable[[], None]) -> Timer:
    return asyncio.get_running_loop().call_later(seconds, action)


class Engine:
    """One model and all that serves its requests. Use from one event loop.

    `failure`: the error that ended the MLX thread, or the group of ranks of a divided model; None
    without one. The event `dead` is set after it. `on_progress(what, share)` is called on any
    thread while the model loads; `share` is from 0 to 1, or None if unknown. `stall_s`: a client
    that takes none of its waiting events for so many seconds is treated as one that has left.
    `rounds`, `records` and `database`, the table of sessions without a disk tier, are shared by the
    engines of a process. `remote`: storage that is shared with other servers; the caller closes it.
    `place`: of this process, as rank 0, in the group of ranks that compute a divided model.
    """

    def __init__(
        self,
        settings: Settings,
        on_progress: Callable[[str, float | None], None] = _ignore,
        *,
        stall_s: float = 30.0,
        awake: KeepAwake | None = None,
        rounds: Rounds | None = None,
        records: Records | None = None,
        remote: Objects | None = None,
        database: Database | None = None,
        place: Place | None = None,
    ):
        self.settings = settings
        self.label, self.aliases = settings.entries[0].label, settings.entries[0].aliases
        self.failure: str | None = None
        self.dead = asyncio.Event()
        self._records = records or Records(_ignore)
        self._database = database
        self._awake = awake or KeepAwake(on=settings.keep_awake, call_later=_call_later)
        self._stall_s = stall_s
        self._requests = RequestTable(settings.queue, self._awake.note_running)
        self._rounds = rounds or Rounds()
        self._thread = self._rounds.thread
        heartbeat = self._thread.heartbeat
        self._ranks: RankZero | None = None
        if place is not None:
            self._ranks = RankZero(place, lambda: heartbeat.silent_s, self._on_loss)
        self.first_load = FirstLoad(
            settings,
            self._rounds,
            self._ranks,
            on_progress,
            records=self._records,
            serve=self._serve,
        )
        self._stopped = False
        self._runtime: ModelRuntime | None = None
        self._resident: Resident | None = None
        self._sessions = SessionBook(
            lambda: {self.label: self.book}, self._own_model, labelled=False
        )
        self._remote = remote
        self._pool = ThreadPoolExecutor(RENDER_THREADS, thread_name_prefix="mlxcache-render")
        # apart, so that a grammar that takes long keeps no prompt from being rendered
        self._compilers = _compile_threads()

    # -- life --------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises ModelError, ConfigError or BadRequest if it cannot be served."""
        self._loop = asyncio.get_running_loop()
        self._rounds.on_death(self._on_death)
        await self.first_load.run(self._pool)
        if self.state == "ready":
            # an error of it is that of each request that needs a grammar
            self._compilers.submit(self._ready().guides.prepare)

    @property
    def state(self) -> State:
        """Whether requests can be served: `loading` before the first load too. Any thread."""
        if self.failure is not None:
            return "failed"
        if self._stopped:
            return "stopped"
        if self._runtime is not None:
            return "ready"
        return "failed" if self.first_load.state == "failed" else "loading"

    def _serve(self, loaded: load.Loaded, weights: Weights) -> None:
        """Runs on the MLX thread."""
        residency = self._rounds.residency
        shared = None
        if residency.memory is not None:
            shared = Shared(residency.memory, residency.size_beside_kept(weights))
        runtime = self.make_runtime(loaded, shared)
        if self._stopped:  # `_close` has found nothing to close
            runtime.close(died=False)
            raise stopping()
        self._rounds.add(runtime.scheduler)
        keep = self.settings.keep_for(self.settings.entries[0])
        self._resident = Resident(
            self.label,
            weights,
            runtime.scheduler,
            reserved=runtime.reserved,
            keep=keep == "always",
            idle_s=keep if isinstance(keep, int | float) else None,
        )
        residency.add(self._resident)
        self._runtime = runtime

    def make_runtime(self, loaded: load.Loaded, shared: Shared | None = None) -> ModelRuntime:
        """Make the runtime of a loaded model. Call on the MLX thread."""
        return ModelRuntime(
            loaded,
            self.settings,
            self._thread,
            self.submit,
            self.first_load.report,
            shared=shared,
            remote=self._remote,
            database=self._database,
            ranks=self._ranks,
        )

    def _close(self) -> None:
        """Runs on the MLX thread."""
        if (runtime := self._runtime) is None:
            return
        self._rounds.remove(runtime.scheduler)
        runtime.scheduler.end_all()
        runtime.close(died=False)
        if self._ranks is not None:
            self._ranks.close()

    def _on_death(self, error: BaseException) -> None:
        """Record the error that ended the MLX thread, and write committed KV to disk."""
        self.failure = f"The MLX thread died ({type(error).__name__}: {str(error)[:200]})."
        self._loop.call_soon_threadsafe(self._died, self.failure)
        if self._runtime is not None:
            self._runtime.close(died=True)

    def _on_loss(self, why: str) -> None:
        """Fail all requests because another rank is lost, and end the process `LOST_S` s later.

        The MLX thread is not waited for: it may wait for that rank for ever, in a pass.
        """
        self.failure = f"The group of ranks has ended: {why}."
        self._loop.call_soon_threadsafe(self._died, self.failure)
        end = threading.Timer(LOST_S, end_process, (self.failure,))
        end.daemon = True
        end.start()

    def _died(self, why: str) -> None:
        error = GenerationFailed(f"{why} The server must be started again.")
        for record in self._requests.fail_all(error):
            self._records.end(record)
        self.first_load.end(error)
        self._thread.fail(error)
        self.dead.set()

    async def stop(self, seconds: float = 8.0) -> None:
        """End every request and the MLX thread, waiting at most `seconds`.

        Readers get an error at once, because the thread may be inside a long forward pass.
        """
        self._stopped = True
        error = stopping()
        for live in self._requests.all():
            live.fail(error)
        self.first_load.end(error)
        self._thread.fail(error)
        runtime = self._runtime
        self._thread.post(self._close)  # after a `_serve` that runs at this moment
        self._rounds.end()
        if runtime is not None:
            await self._loop.run_in_executor(None, self._thread.join, seconds)
            runtime.prefix_loss.close()
            runtime.next_turns.close()
        self._awake.stop()
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._compilers.shutdown(wait=False, cancel_futures=True)

    # -- requests ----------------------------------------------------------------------------------

    async def render(
        self, chat: Chat, *, session: str | None = None, stop: Sequence[str] = ()
    ) -> Prompt:
        """Render `chat` to a prompt, in a worker thread.

        `session`: label under which the text is remembered, to tokenise the next turn faster.
        `stop`: strings that will end the reply. Raises BadRequest or GenerationFailed if the prompt
        cannot be made, ContextLengthExceeded if it is so long that it is not even tokenised, and
        NotReady before the model is loaded.
        """
        runtime, owner = self._ready(), OWNER.get()

        def make() -> Prompt:
            runtime.fetch_replies(chat, session, owner)
            return runtime.builders.of(owner).chat(chat, session, stop)

        await runtime.book.refresh_replies()
        of = f"session {session}" if session is not None else "no session"
        prompt = await self._loop.run_in_executor(self._pool, self._run, make, of)
        if runtime.speculation is not None and self.state == "ready":  # not waited for
            self._pool.submit(_learn_forms, runtime, prompt, owner, of)
        return prompt

    async def render_text(self, text: str) -> Prompt:
        """Return the prompt of plain `text`, without a chat template. Raises as `render`."""
        builder = self._ready().builders.of(None)  # a text is not remembered
        make = partial(builder.text, text)
        return await self._loop.run_in_executor(self._pool, self._run, make, "plain text")

    def decode(self, prompt: Prompt) -> str:
        """Return the text of a prompt of token ids, including control tokens."""
        runtime = self._ready()
        runtime.check(prompt)
        decode = runtime.builders.of(None).decode
        return self._run(partial(decode, prompt.ids.tolist()), "a prompt of token ids")

    def _run(self, make: Callable[[], T], of: str, what: str = "Rendering the prompt") -> T:
        """Return the result of `make`; `what` describes the work, and `of` for whom it is done.

        Raises MlxcacheError unchanged and GenerationFailed for any other error. BaseException is
        caught because a panic in the tokenizer's Rust code is not an Exception.
        """
        try:
            return make()
        except MlxcacheError:
            raise
        except BaseException as error:
            work = what[0].lower() + what[1:]
            log.exception("model %s, %s: request refused: %s failed", self.label, of, work)
            raise GenerationFailed(f"{what} failed: {type(error).__name__}: {error}") from error

    def _ready(self) -> ModelRuntime:
        if self.state != "ready" or self._runtime is None:
            raise NotReady(f"The model is not ready ({self.state}).", retry_after=5.0)
        return self._runtime

    async def submit(self, job: Job) -> Stream:
        """Queue `job`, or join an identical request in progress; return the stream of the reply.

        If the reply must follow a grammar, it is compiled first, in a worker thread. Raises
        NotReady before the model is loaded and after `stop`, QueueFull or TooMany if too many wait,
        Busy or BadRequest for a grammar, BadRequest or ContextLengthExceeded if the job is not
        valid.
        """
        runtime, owner = self._ready(), OWNER.get()
        builder = runtime.builders.of(owner)
        job = for_owner(job, owner)
        job = replace(job, sampling=resolve(job.sampling, runtime.info.sampling))
        record = self._records.begin(job, self.label, runtime.book.id_for(job))
        try:
            runtime.check(job.prompt, logprobs=job.prompt_logprobs)
            validate(job.sampling, runtime.layout.vocab_size)
            guide = await self._compile(job, runtime) if is_constrained(job) else None
            live = self._requests.running(job)
            if live is None:
                scheduler = runtime.scheduler
                rate, round_s = scheduler.prefill.cost.rate, scheduler.balance.round_s
                self._requests.check_places(job, rate=rate, round_s=round_s)
        except (MlxcacheError, asyncio.CancelledError) as error:
            self._records.reject(record, error)
            raise
        if live is None:
            runtime.note_begin(job)
            keep = not self.settings.no_anticipate and runtime.next_turns.note_begin(job)
            live = LiveRequest(
                job,
                record,
                guide,
                runtime.scheduler,
                on_event=self._receive,
                on_left=self._records.end,
                stall_s=self._stall_s,
                keep_pieces=keep,
            )
            self._requests.add(live)
        reply = ReplyRestorer(job.prompt.names, builder.canonicaliser.remember_call)
        limits = (job.timeout_s, self.settings.request_timeout)
        return live.join(record, reply, min((s for s in limits if s is not None), default=None))

    async def _compile(self, job: Job, runtime: ModelRuntime) -> Guide | None:
        begun = threading.Event()

        def compiled() -> Guide | None:
            runtime.guides.prepare()  # seconds after the start, which are no fault of `job`
            begun.set()
            return runtime.guides.make(job)

        what = f"request {job.id}", "Compiling the grammar"
        making = self._loop.run_in_executor(self._compilers, self._run, compiled, *what)
        try:
            guide = await asyncio.wait_for(making, COMPILE_S)
        except TimeoutError:
            if not begun.is_set():
                raise Busy(
                    "The vocabulary, or the grammars of other requests, are still being read: try "
                    "again."
                ) from None
            raise BadRequest(
                f"The grammar or schema takes more than {COMPILE_S:g} s to compile: simplify it."
            ) from None
        self._ready()  # the server may have stopped meanwhile
        return guide

    def _receive(self, live: LiveRequest, event: Event | BaseException) -> None:
        try:
            if isinstance(event, Finished | BaseException):
                self._end(live)
        finally:  # readers wait for the event, even if the accounting failed
            live.put(event)
        runtime = self._runtime
        if runtime is None:
            return
        if isinstance(event, Admitted):
            runtime.prefix_loss.note_admission(live.task, event)
        elif isinstance(event, Piece) and live.take(event):
            runtime.prefix_loss.note_reply(live.task)

    def _end(self, live: LiveRequest) -> None:
        runtime, task = self._runtime, live.task
        if runtime is None or not self._requests.remove(live):
            return
        self._records.recordings.note(task)
        if not self.settings.no_anticipate:
            runtime.next_turns.note_end(task, live.pieces, idle=not self._requests)
        first, *joined = live.close()
        runtime.prefix_loss.note_end(task, lambda: self._records.end(first))
        for record in joined:
            self._records.end(record)

    async def call(self, action: Callable[[ModelRuntime], T]) -> T:
        """Run `action` on the MLX thread and return its result."""
        runtime = self._ready()
        return await self._thread.ask(lambda: action(runtime))

    # -- figures -----------------------------------------------------------------------------------

    @property
    def equal_passes(self) -> Sequence[int] | None:
        """Tokens of a pass that give the bits of passes over one; None if nothing is guessed."""
        speculation = self._runtime.speculation if self._runtime is not None else None
        return speculation.equal if speculation is not None else None

    @property
    def info(self) -> ModelInfo | None:
        return self._runtime.info if self._runtime is not None else None

    @property
    def residence(self) -> Mapping[str, Any] | None:
        """State of the weights, see `Resident.figures`; None until they were loaded once."""
        return self._resident.figures() if self._resident is not None else None

    async def find_obstacle(self) -> str | None:
        """Return why the unloaded weights cannot be read again; None if they can, or are loaded."""
        if self._resident is None or self._resident.state != "unloaded":
            return None
        return await asyncio.to_thread(self._resident.weights.find_obstacle)

    @property
    def load_share(self) -> float | None:
        """Part of the current loading step (download, reading weights) that is done, from 0 to 1.

        None if nothing is being loaded, and while the model waits for memory. Any thread.
        """
        if (one := self._resident) is None:
            return self.first_load.share
        return (one.progress or 0.0) if one.state == "loading" else None

    async def load_weights(self) -> None:
        """Begin to load the model's weights if they were unloaded; returns before they are read."""
        await self.call(lambda runtime: self._rounds.residency.ask(runtime.scheduler))

    async def unload_weights(self) -> None:
        """Drop the weights from memory, if the model was loaded; the next request reads them again.

        Raises Busy while requests of this model run, and Unsupported for a model divided among
        ranks.
        """
        unload = self._rounds.residency.unload
        if self.state != "ready":
            return
        if self._ranks is not None:
            raise Unsupported("A model that is divided among several ranks cannot be unloaded.")
        if not await self.call(lambda runtime: unload(runtime.scheduler)):
            raise Busy("Requests of this model are running: try again when they have ended.")

    async def prefetch(self) -> None:
        """Have the newest conversation of the current API key read from disk before it goes on.

        Only while no request runs, and into free memory. Returns before it is read.
        """
        if self.state != "ready" or self._requests or self.settings.no_anticipate:
            return
        try:
            ids = await self.book.newest_conversation()
            await self.call(lambda runtime: runtime.scheduler.idle_prefill.restore(ids))
        except MlxcacheError as error:  # no client waits for it
            log.debug("model %s: nothing is read from disk ahead: %s", self.label, error)

    @property
    def ranks(self) -> Mapping[str, Any] | None:
        return self._ranks.figures() if self._ranks and self._runtime else None

    @property
    def tally(self) -> Tally:
        return self._records.tally

    @property
    def prefill_growth(self) -> float:
        """Measured growth of prefill; 0 until the model is loaded.

        After k cached tokens, a token takes 1 + growth * k times as long as the first of a prompt.
        """
        return self._runtime.cost.growth if self._runtime is not None else 0.0

    @property
    def recordings(self) -> Recordings:
        return self._records.recordings

    @property
    def silent_s(self) -> float:
        """Seconds since the MLX thread began its step, which takes a few at most; 0 while it is
        idle.
        """
        return self._thread.heartbeat.silent_s if self._runtime is not None else 0.0

    @property
    def book(self) -> ModelSessions:
        """What the model keeps of sessions. Raises NotReady before it is loaded."""
        return self._ready().book

    @property
    def sessions(self) -> SessionBook:
        """The sessions, with this model alone. Raises NotReady before the model is loaded."""
        _ = self.book
        return self._sessions

    async def _own_model(self, namespace: str, name: str) -> tuple[str, Served]:
        return self.label, self.book.model  # which refuses a snapshot of another one

    def measure(self) -> Figures | None:
        """Return the figures of this model; None until it is loaded. Waits for the disk."""
        runtime = self._runtime
        if runtime is None:
            return None
        figures, disk, remote = runtime.figures.latest, runtime.kv.disk, None
        if disk is not None:
            figures = with_disk(figures, disk)
        if self._remote is not None:
            exchange = runtime.remote.figures() if runtime.remote is not None else {}
            remote = {**self._remote.figures(), "exchange": exchange}
        return replace(
            figures,
            remote=remote,
            ranks=self.ranks,
            sessions=runtime.book.writer.count,
            pressure=runtime.pressure.figures() if runtime.pressure else None,
            queue=self._requests.figures(),
        )

    def figures(self) -> dict[str, Any]:
        """Return the response body of `GET /v1/cache`; empty until the model is loaded."""
        figures = self.measure()
        return figures.as_object() if figures is not None else {}

    def requests(self) -> list[RequestRecord]:
        """Return the records of recent requests of the current API key, newest first."""
        return [self.with_session(record) for record in self._records.all(OWNER.get())]

    def running(self) -> list[RequestRecord]:
        """Return the records of this model's waiting and running requests, oldest first, of all
        owners.
        """
        return [one.record for one in self._requests.all()]

    def prefill_left_s(self, record: RequestRecord) -> float | None:
        """Estimate the seconds until the prompt of `record` is computed.

        None unless it is being computed, and before the end of its first chunk: a prefix may be
        restored.
        """
        fed = record.status == "prefill" and record.fed_tokens
        if self._runtime is None or not fed:
            return None
        cost = self._runtime.scheduler.prefill.cost
        return prefill_left_s(record, self.running(), cost.seconds)

    async def request(self, id: str) -> RequestRecord | None:
        """Return the record of request `id` if it is one of those of `requests`, else None.

        Waits for the analysis of its prefix loss and, for a bounded time, for its session.
        """
        if (runtime := self._runtime) is not None:
            await runtime.prefix_loss.wait_for(id)
        record = self._records.get(id, OWNER.get())
        if record is None or runtime is None:
            return record
        if self.with_session(record).session is None and record.status in RECORDED:
            if self.state == "ready":
                await runtime.book.writer.written()
            self.with_session(record)
        return record

    def with_session(self, record: RequestRecord) -> RequestRecord:
        """Set the session of a record of this model, if that is known by now, and return it."""
        if record.model not in (None, self.label):
            return record
        if record.session is None and self._runtime is not None:
            record.session = self._runtime.book.writer.session_of(record.joined or record.id)
        return record


def _compile_threads() -> ThreadPoolExecutor:
    pool = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="mlxcache-grammar")
    started = threading.Barrier(COMPILE_THREADS + 1)
    before = threading.stack_size(STACK_BYTES)  # of all threads that are started from now on
    try:
        for _ in range(COMPILE_THREADS):
            pool.submit(started.wait)
    finally:
        threading.stack_size(before)
    started.wait()
    return pool


def stopping() -> NotReady:
    return NotReady("The server is stopping.", retry_after=5.0)


def _learn_forms(runtime: ModelRuntime, prompt: Prompt, owner: str | None, of: str) -> None:
    try:
        runtime.learn_forms(prompt, owner)
    except Exception:
        log.exception(
            "model %s, %s: tool results not prepared, guesses are made without them",
            *(runtime.label, of),
        )
