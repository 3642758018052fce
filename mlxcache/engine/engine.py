"""The engine as asyncio code sees it: render, submit, figures. It never touches MLX itself."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from mlxcache.config import Settings
from mlxcache.engine.anticipate import Anticipation
from mlxcache.engine.metrics import Records, Totals, snapshot, with_disk
from mlxcache.engine.open_book import open_book
from mlxcache.engine.prefix_loss import Losses
from mlxcache.engine.requests import Arrivals, Shared
from mlxcache.engine.runtime import Builders, Core, demo_spec, fetch_model, maker
from mlxcache.engine.scheduler import Scheduler
from mlxcache.engine.stream import Stream
from mlxcache.engine.task import Task, owned, rendered
from mlxcache.errors import GenerationFailed, MlxcacheError, NotReady
from mlxcache.model import load
from mlxcache.model.sampling import validate
from mlxcache.owner import OWNER
from mlxcache.prompt.canonical.restore import ReplyRestorer
from mlxcache.sessions.book import SessionBook
from mlxcache.types import Chat, Job, ModelInfo, Prompt, RequestRecord

if TYPE_CHECKING:
    from mlxcache.sessions.book import SessionBook

log = logging.getLogger("mlxcache.engine")
T = TypeVar("T")

FLUSH_S = 5.0
"""Seconds for which what is not on disk yet is written at the end."""


def end(core: Core, book: SessionBook | None, *, died: bool) -> None:
    """Write what was committed, for at most `FLUSH_S`, and let everything go.

    A thread that `died` may have left anything behind: what fails of this is logged, and the rest
    is done all the same.
    """
    steps: list[Callable[[], None]] = [lambda: core.close(FLUSH_S)]
    if book is not None:
        steps.insert(0, book.close)  # before the database that it writes to
    if died:
        steps.insert(0, lambda: salvage(core.scheduler))
    for step in steps:
        try:
            step()
        except Exception:
            log.exception("an end of the MLX thread's failed")


def salvage(scheduler: Scheduler) -> None:
    """Have written what was committed of requests that were running."""
    disk = scheduler.disk
    if disk is None:
        return
    decoding = [task for lane in scheduler.lanes.all for task in lane.tasks]
    for task in [*scheduler.prefilling, *decoding]:
        if task.lease is not None and not task.restoring:
            disk.ended(task.lease, task.tokens())


State = Literal["loading", "ready", "failed", "stopped"]
RENDER_THREADS = 4


def _silent(*_: Any) -> None:
    """The default for callbacks that nobody listens to."""


class Engine:
    """One model, served. Call everything from one event loop.

    `failure`: why the MLX thread died, `dead` is set then; it ends once what it held is on disk.
    `on_progress(what, share)` is called from other threads while it loads (`share` from 0 to 1, or
    None), `on_request(record)` when a request is over, on the event loop.
    """

    def __init__(
        self,
        settings: Settings,
        on_progress: Callable[[str, float | None], None] = _silent,
        on_request: Callable[[RequestRecord], None] = _silent,
        *,
        stall_s: float = 30.0,
    ):
        self.settings = settings
        self.info: ModelInfo | None = None
        self.state: State = "loading"
        self.failure: str | None = None
        self.dead = asyncio.Event()
        self.stall_s = stall_s
        self._on_progress = on_progress
        self._records = Records(on_request)
        self.tally = self._records.tally
        self._live = Arrivals(settings.queue)
        self._totals = Totals()
        self._figures: dict[str, Any] = {}
        self._core: Core | None = None
        self._book: SessionBook | None = None
        self._builders: Builders | None = None
        self._losses: Losses | None = None
        self._anticipation: Anticipation | None = None
        self._thread: threading.Thread | None = None
        self._pool = ThreadPoolExecutor(RENDER_THREADS, thread_name_prefix="mlxcache-render")

    # -- life --------------------------------------------------------------------------------

    async def start(self) -> None:
        """Load the model. Raises ModelError or ConfigError where it cannot be served."""
        self._loop = asyncio.get_running_loop()
        try:
            spec = await self._loop.run_in_executor(
                self._pool, fetch_model, self.settings, self._on_progress
            )
            ready: asyncio.Future[None] = self._loop.create_future()
            self._thread = threading.Thread(
                target=self._main, args=(spec, ready), name="mlxcache-mlx", daemon=True
            )
            self._thread.start()
            await ready
            core = self._core
            assert core is not None
            self._builders = Builders(maker(core, self.settings))
            builder = self._builders.of(None)
            learn = self._builders.learn
            self._book = await open_book(core, self.settings, self.submit, learn)
            self._losses = Losses(builder, lambda: core.cost.rate, self._book.booked)
            if not self.settings.no_anticipate:
                scheduler = core.scheduler
                self._anticipation = Anticipation(
                    self._builders.of, scheduler.ahead, scheduler.inbox.put
                )
        except BaseException:
            self.state = "failed"
            raise
        self.info = replace(core.info, has_images=builder.takes_images)
        self.state = "ready"

    def _main(self, spec: load.ModelSpec | None, ready: asyncio.Future[None]) -> None:
        """The MLX thread, from the first array to the last."""
        call = self._loop.call_soon_threadsafe
        try:
            self._on_progress("loading the weights", None)
            spec = spec or demo_spec(self.settings)
            core = Core(load.load(spec), self.settings, self._ended, self._publish)
            if self.settings.disk != "off":
                self._on_progress("opening the disk tier", None)
            core.open_disk(self.settings)
            core.watch()
            self._core = core
            self._publish()
        except BaseException as error:  # noqa: BLE001 - it is raised again in `start`
            call(ready.set_exception, error)
            return
        call(ready.set_result, None)
        try:
            core.scheduler.run()
        except BaseException as error:
            log.critical("the MLX thread died", exc_info=error)
            self.failure = f"The MLX thread died ({type(error).__name__}: {str(error)[:200]})."
            call(self._died, self.failure)
        end(core, self._book, died=self.failure is not None)

    def _died(self, why: str) -> None:
        self.state = "failed"
        error = GenerationFailed(f"{why} The server must be started again.")
        for record in self._live.fail(error):
            self._records.over(record)
        if self._book is not None:
            self._book.fail(error)
        self.dead.set()

    async def stop(self, seconds: float = 8.0) -> None:
        """End every request and the MLX thread, waiting at most `seconds`.

        Readers are told at once: the thread may be inside a long forward pass.
        """
        if self.state == "ready":
            self.state = "stopped"
        for shared in self._live.all():
            shared.fail(NotReady("The server is stopping.", retry_after=5.0))
        if self._book is not None:
            self._book.fail(NotReady("The server is stopping.", retry_after=5.0))
        thread, core = self._thread, self._core
        if thread is not None and core is not None:
            core.scheduler.inbox.put(core.scheduler.stop)
            await self._loop.run_in_executor(None, thread.join, seconds)
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._losses is not None:
            self._losses.close()
        if self._anticipation is not None:
            self._anticipation.close()

    # -- requests ----------------------------------------------------------------------------

    async def render(
        self, chat: Chat, *, session: str | None = None, stop: Sequence[str] = ()
    ) -> Prompt:
        """The prompt that `chat` renders to, made in a worker thread; `stop` ends the reply.

        Raises BadRequest or GenerationFailed where it cannot be made, ContextLengthExceeded
        where it is far too long to be worth tokenising, NotReady before the model is loaded.
        """
        builders, owner = self._ready_builders(), OWNER.get()

        def made() -> Prompt:
            return rendered(lambda: builders.of(owner).chat(chat, session, stop))

        return await self._loop.run_in_executor(self._pool, made)

    async def render_text(self, text: str) -> Prompt:
        """The prompt of plain `text`, no template applied. Raises as `render`."""
        builder = self._ready_builders().of(None)  # a text is remembered by none
        return await self._loop.run_in_executor(self._pool, rendered, lambda: builder.text(text))

    def _ready_builders(self) -> Builders:
        if self.state != "ready" or self._builders is None:
            raise NotReady(f"The model is not ready ({self.state}).", retry_after=5.0)
        return self._builders

    async def submit(self, job: Job) -> Stream:
        """Queue `job`, or join the same one where that is computed already.

        Raises NotReady, QueueFull, TooMany, BadRequest or ContextLengthExceeded at once.
        """
        core = self._core
        builder = self._ready_builders().of(OWNER.get())
        assert core is not None
        job = owned(job, OWNER.get())
        record = self._records.begin(job)
        try:
            core.check(job.prompt)
            validate(job.sampling, core.layout.vocab_size)
            shared = self._live.running(job)
            if shared is None:
                self._live.check(job, core.scheduler)
        except MlxcacheError as error:
            record.status, record.error = "rejected", str(error)
            self._records.over(record)
            raise
        shared = shared or self._begin(job, record, core)
        reply = ReplyRestorer(job.prompt.names, builder.canonicaliser.remember_call)
        most = (job.timeout_s, self.settings.request_timeout)
        return shared.join(record, reply, min((s for s in most if s is not None), default=None))

    def _begin(self, job: Job, record: RequestRecord, core: Core) -> Shared:
        """Have `job` computed."""
        assert self._losses is not None
        live = self._live.add(job, record, core.scheduler, self.stall_s)
        self._losses.watch(live.task, core.memory)
        if self._anticipation is not None:
            self._anticipation.watch(live.task)
        core.scheduler.inbox.put(lambda: core.scheduler.submit(live.task))
        return live.shared

    def _ended(self, task: Task) -> None:
        """On the MLX thread, when a request is over and what it held is accounted for."""
        record = task.record
        if task.lease is not None:
            assert self._core is not None
            gain = self._totals.add(record, self._core.scheduler.prefill.speed)
            if self._builders is not None:  # before the client can have it all
                self._builders.of(task.job.owner).remember(task.generated())
            if self._book is not None:
                self._book.ended(task, gain)
        self._publish()
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._forget, task)

    def _publish(self) -> None:
        """On the MLX thread: let other threads see the figures as they are now."""
        assert self._core is not None
        core = self._core
        self._figures = snapshot(core.memory, self._totals, core.disk, core.scheduler.ahead)

    def _forget(self, task: Task) -> None:
        assert self._losses is not None
        live = self._live.pop(task)
        self._losses.ended(task, lambda: self._records.over(task.record))
        for record in live.shared.close() if live else ():
            self._records.over(record)
        if self._anticipation is not None:
            self._anticipation.ended(task, idle=not self._live)

    async def call(self, action: Callable[[Core], T]) -> T:
        """The result of `action`, run on the MLX thread. Raises what it raises, and NotReady."""
        return await self.sessions.call(action)

    # -- what others ask ---------------------------------------------------------------------

    @property
    def silent_s(self) -> float:
        """Seconds since the MLX thread last began a step, which takes seconds at most."""
        return self._core.scheduler.pulse.silent_s if self._core is not None else 0.0

    @property
    def sessions(self) -> SessionBook:
        """The sessions. Raises NotReady before the model is loaded."""
        self._ready_builders()
        assert self._book is not None
        return self._book

    def figures(self) -> dict[str, Any]:
        """The body of `GET /v1/cache`; empty until the model is loaded."""
        core, book = self._core, self._book
        if core is None or book is None:
            return self._figures
        figures = with_disk(self._figures, core.disk.stats()) if core.disk else self._figures
        now = {"sessions": book.count, "pressure": core.pressed(), "queue": self._live.figures()}
        return figures | now

    def requests(self) -> list[RequestRecord]:
        """The owner's recent requests, newest first."""
        return self._records.all(OWNER.get())

    async def request(self, id: str) -> RequestRecord | None:
        """One of the owner's recent requests, once it is known what it has lost."""
        if self._losses is not None:
            await self._losses.told(id)
        return self._records.get(id, OWNER.get())


__all__ = ["Engine", "MlxcacheError", "Stream"]
