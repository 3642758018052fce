"""ModelRuntime: one loaded model with everything that serves it. Built once, on the MLX thread."""

from __future__ import annotations

import logging
import math
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

import mlx.core as mx

from mlxcache.cache.capacity import copy_bytes, warnings
from mlxcache.cache.kv_cache import KVCache
from mlxcache.cache.pressure import Pressure
from mlxcache.config import Settings
from mlxcache.config.memory import read_pressure
from mlxcache.engine.figures import FiguresOfModel, Totals
from mlxcache.engine.opening import open_images, open_store, open_tier, watch_pressure
from mlxcache.errors import BadRequest, Busy, ContextLengthExceeded, Unsupported
from mlxcache.explain.prefix_loss import PrefixLossReporter
from mlxcache.guess.rule import ANY, DraftCosts, PassCosts, Passes
from mlxcache.mlx_thread import MlxThread
from mlxcache.model import device, kv, serialise
from mlxcache.model.guidance.grammar import Guides
from mlxcache.model.guidance.thinking import ThinkingBudget, read_closing
from mlxcache.model.heads import WithHeads
from mlxcache.model.load import Loaded
from mlxcache.model.mlx_lm_format import PromptCache, agrees, prompt_ids
from mlxcache.model.output import OutputParser, reader
from mlxcache.model.pair import Pair
from mlxcache.model.sampling import (
    Processor,
    describe,
    make_processors,
    make_sampler,
    not_before,
    text_ends,
    token_text,
    top_logprobs,
)
from mlxcache.model.vision import shift_of, too_large
from mlxcache.model.weights import is_resident
from mlxcache.prompt.builder import PromptBuilder
from mlxcache.prompt.chat_prompt import ChatPrompt
from mlxcache.prompt.replies import GeneratedReply, Replies
from mlxcache.ranks.rank_zero import RankZero
from mlxcache.residency.memory import (
    MIN_CONTEXT,
    Shared,
    bits_of,
    has_room,
    plan_memory,
)
from mlxcache.scheduling.anticipate import NextTurnRenderer
from mlxcache.scheduling.decoder import DecoderRow
from mlxcache.scheduling.loop_guard import LoopGuard
from mlxcache.scheduling.parts import WHOLE
from mlxcache.scheduling.prefill import Limits
from mlxcache.scheduling.scheduler import Scheduler
from mlxcache.scheduling.short_passes import measure_passes, passes_key, stored_passes
from mlxcache.scheduling.speculation import (
    Conversations,
    DraftModel,
    HeadsOfModel,
    Source,
    Speculation,
)
from mlxcache.scheduling.task import Output, Task
from mlxcache.sessions.book import ModelSessions
from mlxcache.sessions.files import PromptCacheReader, Submit, remove_stale
from mlxcache.sessions.journal import Served
from mlxcache.store.database import Database, TemporaryDatabase
from mlxcache.store.leaves import conversation_key_tokens, digest_of
from mlxcache.store.reply_rows import ReplyRow
from mlxcache.store.session_rows import Gain, SessionFigures
from mlxcache.store.sessions import Sessions
from mlxcache.tree.eviction import Worth
from mlxcache.types import WARMING, Chat, Job, ModelInfo, Prompt, TokenLogprob, Tokens

if TYPE_CHECKING:
    from mlxcache.remote.objects import Objects
    from mlxcache.remote.tier import RemoteTier

log = logging.getLogger("mlxcache.engine")

RESERVED = ("pool", "transient", "pending", "images")

RECORDED = ("done", "cancelled")
"""Statuses of ended requests that are turns of a session."""

FLUSH_S = 5.0
"""Most seconds for writing KV to disk when the server stops."""


class PromptBuilders:
    """Prompt builders by owner, each made at its first use. Thread-safe.

    A builder remembers replies, tool results and texts: one shared between owners would leak data
    of one to another. `make(replies)` returns a new builder over the known replies of its owner.
    """

    def __init__(self, make: Callable[[Replies], PromptBuilder]):
        self._make = make
        self._lock = Lock()
        self._replies: defaultdict[str | None, Replies] = defaultdict(Replies)
        self._made: dict[str | None, PromptBuilder] = {}

    def of(self, owner: str | None) -> PromptBuilder:
        with self._lock:
            if owner not in self._made:
                self._made[owner] = self._make(self._replies[owner])
            return self._made[owner]

    def learn(self, rows: Mapping[str | None, Sequence[ReplyRow]]) -> None:
        for owner, replies in rows.items():
            with self._lock:
                known = self._replies[owner]
            known.learn(replies)


class ModelRuntime:
    """A loaded model with its cache, scheduler, sessions and prompt builders.

    Make it on the MLX thread. `submit`: `Engine.submit`. `shared`: the budget of several models, to
    which the weights of this one are charged already. The other arguments are those of `Engine`.
    Raises ModelError, or with `shared` BadRequest, if the budget is too small for the model, Busy
    if other models use the memory now, and StoreError if the table of sessions cannot be opened.

    `info.context_length` is reduced to the tokens that the budget has memory for. `pressure` is
    None with `shared`: one monitor serves all models.
    """

    def __init__(
        self,
        loaded: Loaded,
        settings: Settings,
        thread: MlxThread,
        submit: Submit,
        on_progress: Callable[[str, float | None], None] = lambda what, share: None,
        *,
        shared: Shared | None = None,
        remote: Objects | None = None,
        database: Database | None = None,
        ranks: RankZero | None = None,
    ):
        self.loaded = loaded
        self.settings = settings
        self.label = settings.entries[0].label
        self._ranks = ranks
        bits = bits_of(settings)(loaded.model, loaded.info)
        if settings.kv_bits == "auto":
            log.info("model %s: --kv-bits auto is %s", self.label, bits or "not quantised")
        self.layout = (
            kv.survey(loaded.model, kv_bits=bits)
            if ranks is None
            else ranks.survey(loaded.model, bits)
        )
        for name in self.layout.unknown:
            log.warning(
                "model %s: caching disabled, it is served without: cache class %s is unknown",
                *(self.label, name),
            )
        self._shared = shared.ram if shared is not None else None
        self._objects = remote
        self.remote: RemoteTier | None = None
        others = ranks.ram_limit if ranks is not None else None
        self._parts = parts = WHOLE if ranks is None else ranks.parts
        self._plan = plan = plan_memory(
            loaded, self.layout, settings, shared, others, lineage=parts.lineage
        )
        self.cost = plan.cost
        with ExitStack() as on_failure:
            on_failure.callback(plan.budget.release_all)  # other models may share the memory
            self.images = None
            if ranks is None:
                self.images = open_images(loaded, plan, settings)
            elif loaded.vision is not None:
                log.warning(
                    "model %s: images disabled: it is divided among several ranks", self.label
                )
            context = self._max_context()
            self.kv = self._open_cache(thread, on_progress)
            on_failure.callback(self.kv.close, 0.0)
            self.speculation = self._make_speculation(on_progress)
            limits = Limits(settings.concurrency, settings.prefill_chunk, context, plan.transient)
            self.scheduler = Scheduler(
                loaded.model,
                self.kv,
                self.cost,
                limits,
                prepare=self.prepare_output,
                on_end=self._end_request,
                thread=thread,
                on_tick=self._publish,
                images=self.images,
                speculation=self.speculation,
                parts=parts,
            )
            self.guides = Guides(loaded.tokenizer, self.layout.vocab_size, self.label)
            self._totals = Totals()
            self.figures = FiguresOfModel(
                self.kv,
                self._totals,
                self.scheduler.idle_prefill,
                self.scheduler.wall,
                self._no_disk,
            )
            self.builders = PromptBuilders(partial(self._make_builder, context))
            builder = self.builders.of(None)
            self.info: ModelInfo = replace(
                loaded.info,
                context_length=context,
                has_images=builder.takes_images,
                sampling=self._sampling_defaults(),
            )
            self._kept = text_ends(loaded.tokenizer)
            self._closing = read_closing(
                loaded.tokenizer, loaded.info.architecture, self.layout.vocab_size, self.label
            )
            self.book = self._open_book(thread, submit, database)
            on_failure.pop_all()
        self.prefix_loss = PrefixLossReporter(
            builder, lambda: self.cost.rate, self.book.shared_with_sessions
        )
        idle = self.scheduler.idle_prefill
        self.next_turns = NextTurnRenderer(
            self.builders.of,
            lambda prompt, before: thread.post(lambda: idle.add(prompt, before)),
        )
        self.pressure: Pressure | None = None
        if shared is None:
            look = read_pressure if ranks is None else ranks.read_pressure
            self.pressure = watch_pressure(
                self.kv.ram.shared, thread, loaded.info.weights_bytes, look
            )
        self.figures.publish()

    # -- making ------------------------------------------------------------------------------------

    def _open_cache(
        self, thread: MlxThread, on_progress: Callable[[str, float | None], None]
    ) -> KVCache:
        plan, layout = self._plan, self.layout
        store, self._no_disk = None, None
        if plan.pending:
            on_progress("opening the disk tier", None)
            store, self._no_disk = open_store(self.loaded, layout, self.settings, self._ranks)
            if store is None:
                plan.budget.release("pending", plan.pending)
        if store is not None and self._objects is not None and layout.cacheable:
            self.remote = open_tier(self._objects, store, layout, self.cost.seconds, self.label)
        worth = Worth(layout.bytes_per_token, layout.checkpoint_bytes, self.cost.growth)
        return KVCache.open(
            layout,
            plan.budget,
            store,
            pending_limit=plan.pending,
            wake=thread.wake,
            worth=worth,
            device_buffers=self._ranks.buffer_limit if self._ranks else device.buffer_limit(),
            copy_bytes=copy_bytes(plan.transient, device.kind()),
            shared=self._shared,
            remote=self.remote,
            lineage=self._parts.lineage,
            files=self._parts.files,
            label=self.label,
        )

    def _make_speculation(
        self, on_progress: Callable[[str, float | None], None]
    ) -> Speculation | None:
        """Make what proposes tokens; measure the time of passes unless that was done before."""
        model, most = self.loaded.model, self.settings.speculate_tokens
        sources: list[Source] = []
        guesses = self.settings.speculate != "off"
        if not self.layout.rewinds and guesses:
            log.warning("model %s: no guesses: its cache cannot be rewound", self.label)
        if not self.layout.rewinds or not (guesses or isinstance(model, Pair | WithHeads)):
            return None
        served = model.verify if isinstance(model, Pair) else model
        part = "target" if isinstance(model, Pair) else ""
        passes = self._measured_passes(served, part, on_progress)
        lengths = passes.equal if self.settings.speculate == "exact" else ANY
        costs = PassCosts(passes.curves, lengths)
        log.info(
            "model %s: tokens of a pass that give the bits of passes over one (measured): %s",
            *(self.label, ", ".join(map(str, passes.equal)) or "none but one"),
        )
        if guesses:
            sources.append(Conversations(most, forms=self._result_forms))
            self._tell_costs("guesses from the conversation are on", costs)
        if isinstance(model, Pair | WithHeads):
            draft = self._measured_passes(model.propose, "draft", on_progress)
            drafting = DraftCosts(passes.curves, draft.curves, lengths)
            most = self.settings.num_draft_tokens
            if isinstance(model, Pair):
                sources.append(DraftModel(model, drafting, most))
            else:
                sources.append(HeadsOfModel(model, drafting, most))
            self._tell_costs("drafts are verified", drafting)
        return Speculation(costs, sources, passes.equal)

    def _tell_costs(self, what: str, costs: PassCosts) -> None:
        log.info(
            "model %s: %s: a pass over 2, 4, 8 and 16 tokens takes %s times as long as a pass over "
            "one (measured)",
            *(self.label, what),
            ", ".join(f"{costs.at(0)(tokens):.2f}" for tokens in (2, 4, 8, 16)),
        )

    def _measured_passes(
        self, model: object, part: str, on_progress: Callable[[str, float | None], None]
    ) -> Passes:
        """Return passes of `model`, measured unless that was done before."""
        on_progress("measuring passes over several tokens", None)
        key, disk = None, self.kv.disk
        if disk is not None:
            key = passes_key(disk.store.namespace + part, self.layout)
        room = self._plan.budget.own_free // 2
        return stored_passes(
            self.settings.cache_dir / "passes.json",
            key,
            lambda: measure_passes(model, self.layout, room),
        )

    def _result_forms(self, task: Task) -> Mapping[str, Tokens]:
        prompt = task.job.prompt
        if not isinstance(prompt, ChatPrompt):
            return {}
        return self.builders.of(task.job.owner).forms.of(prompt.chat.messages)

    def learn_forms(self, prompt: Prompt, owner: str | None) -> None:
        """Keep the tool results of a conversation as a reply would repeat them, as tokens, for
        guesses.

        A reply that repeats a file, for example, omits the line numbers of the result. Blocks while
        new results are tokenised. Any thread.
        """
        if self.settings.speculate != "off" and isinstance(prompt, ChatPrompt):
            self.builders.of(owner).forms.learn(prompt.chat.messages)

    def _make_builder(self, context: int, replies: Replies) -> PromptBuilder:
        loaded, settings = self.loaded, self.settings
        return PromptBuilder(
            loaded.tokenizer,
            settings.chat_template_args,
            context,
            self.images.vision if self.images else None,
            settings.rules,
            read=reader(loaded.tokenizer),
            replies=replies,
            label=self.label,
        )

    def _open_book(
        self, thread: MlxThread, submit: Submit, database: Database | None
    ) -> ModelSessions:
        loaded, layout, settings = self.loaded, self.layout, self.settings
        store = self.kv.disk.store if self.kv.disk is not None else None
        namespace = store.namespace if store is not None else f"ram:{self.label}"
        path = settings.model or str(loaded.path)
        ranks = self._ranks
        spec = serialise.run_spec(layout if ranks is None or ranks.whole is None else ranks.whole)
        whole = None if ranks is None else ranks.namespace
        served = Served(self.info.id, path, namespace, spec, layout.vocab_size, whole)
        found = store.database if store is not None else database
        sessions = Sessions(TemporaryDatabase() if found is None else found)
        self.scheduler.prefill.speed.resume(sessions.prefill_times(namespace))
        incoming = settings.cache_dir / "incoming"
        remove_stale(incoming)
        reader_ = PromptCacheReader(self.kv, self._agrees, partial(prompt_ids, loaded.tokenizer))
        book = ModelSessions(
            sessions,
            served,
            self.kv,
            thread,
            submit=submit,
            prompt_caches=reader_,
            before_removal=self.scheduler.idle_prefill.clear,
            incoming=incoming,
            decode=loaded.tokenizer.decode,
            learn=self.builders.learn,
        )
        book.open()
        return book

    def _agrees(self, found: PromptCache, ids: Tokens) -> bool:
        if not is_resident(self.loaded.model):
            raise Busy(
                f"The weights of {self.info.id} are not in memory, and the file cannot be compared "
                f"with what they compute: load them with `mlxcache models load {self.info.id}`."
            )
        return agrees(self.loaded.model, self.layout, found, ids)

    def _sampling_defaults(self) -> Mapping[str, float]:
        defaults = {} if self.settings.no_generation_config else self.loaded.info.sampling
        if defaults:
            log.info("model %s: sampling defaults: %s", self.label, describe(defaults))
        return defaults

    def _max_context(self) -> int:
        """Return the most tokens of a prompt and reply that both model and budget allow.

        Refuses a budget with room for less than `MIN_CONTEXT` tokens, or than the model's own
        context.
        """
        context = self.loaded.info.context_length
        free, transient = self._plan.budget.own_free, self._plan.transient

        def too_long(tokens: int) -> bool:
            return not has_room(tokens, self.layout, self.cost, free=free, transient=transient)

        longest = bisect_left(range(1, context + 1), True, key=too_long)
        if longest < min(context, MIN_CONTEXT):
            self._plan.refuse(f"has room for {longest} tokens of this model")
        if longest < context:
            log.warning(
                "model %s: context limited to %d of %d tokens: %s has no room for more",
                *(self.label, longest, context, self._plan.setting),
            )
        for line in warnings(
            self.layout, context=context, weights=self.loaded.info.weights_bytes,
            ram=self._plan.budget.limit, machine=self._plan.machine,
        ):  # fmt: skip
            log.warning("model %s: memory may be insufficient: %s", self.label, line)
        return longest

    @property
    def reserved(self) -> Mapping[str, int]:
        """Bytes of the model's budget that are reserved now, whatever is cached, by kind."""
        kinds = self.kv.budget.by_kind()
        return {kind: kinds[kind] for kind in RESERVED if kinds.get(kind)}

    # -- requests ----------------------------------------------------------------------------------

    def check(self, prompt: Prompt, *, logprobs: bool = False) -> None:
        """Raise an error if a prompt cannot be fed, however much memory is free. Any thread.

        ContextLengthExceeded if it leaves no token of the context for a reply; BadRequest if it is
        empty, or has a token id outside the vocabulary or an image too large for the memory;
        Unsupported if the `logprobs` of its tokens are wanted of a model that is divided among
        ranks: the others would not compute the logits.
        """
        if logprobs and self._ranks is not None:
            message = "`echo` with `logprobs` is not supported by a model on several machines."
            raise Unsupported(message, param="echo")
        tokens, context = len(prompt.ids), self.info.context_length
        if tokens == 0:
            raise BadRequest("The prompt is empty: it needs at least one token.", param="prompt")
        if tokens >= context:
            own, setting = self.loaded.info.context_length, self._plan.setting
            why = f" (all that {setting} has room for)" if context < own else ""
            raise ContextLengthExceeded(
                f"prompt is too long: {tokens} tokens > {context - 1} maximum{why}",
                param=prompt.param,
            )
        longest = max((span.end - span.start for span in prompt.images), default=0)
        if self.images is not None and longest > self.images.largest:
            raise too_large(longest, self.images.largest)
        ids, vocabulary = prompt.fed, self.layout.vocab_size
        if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
            # the CPU reads beyond the embedding table without a check
            raise BadRequest(f"Token ids must be from 0 to {vocabulary - 1}.", param="prompt")

    def prepare_output(self, task: Task) -> Output:
        """Make the parser, sampler and logits processors for the reply of a task.

        MLX thread only.
        """
        job, tokenizer = task.job, self.loaded.tokenizer
        parser = OutputParser(
            tokenizer,
            tools=job.tools,
            parallel_tools=job.parallel_tools,
            stop=job.stop,
            shows_stop=job.shows_stop,
            stop_tokens=job.sampling.stop_tokens,
            thinking_open=job.prompt.thinking_open,
            continued=job.prompt.continued,
            generic_tools=job.prompt.generic_tools,
            plain=job.raw,
            id=task.record.id,
            prime=job.prompt.fed[-4:].tolist() if job.raw or job.prompt.continued else (),
        )
        ends = {*tokenizer.eos_token_ids, *job.sampling.stop_tokens}
        processors = make_processors(job.sampling, task.prompt_tokens, ends)
        budget = self._limit_thinking(job, processors)
        context = mx.array(task.fed[:-1]) if processors else None
        kept = self._kept if job.sampling.xtc_probability else ()
        sampler = make_sampler(job.sampling, self.layout.vocab_size, kept)
        guide = task.guide.copy() if task.guide is not None else None
        if budget is not None and job.prompt.thinking_open:
            guide = budget.begin(guide)
        row = DecoderRow(
            sampler,
            processors,
            context,
            id=task.record.id,
            guide=guide,
            shift=shift_of(task.images),
        )
        loop = None if self.settings.no_loop_guard else LoopGuard()
        wanted = job.top_logprobs
        if wanted is None:
            return Output(parser, row, loop=loop, budget=budget)

        def logprob(logprobs: mx.array, tokens: Sequence[int]) -> list[TokenLogprob]:
            found: list[TokenLogprob] = top_logprobs(logprobs, tokens, wanted, tokenizer)
            return found

        first = int(task.fed[0])
        scores = [TokenLogprob(token_text(tokenizer, first), first, math.nan)]
        return Output(parser, row, logprob, loop, budget, scores)

    def _limit_thinking(self, job: Job, processors: list[Processor]) -> ThinkingBudget | None:
        """Return the limit of a reply's thinking, or let none begin, where one token begins it."""
        closing, limit, tools = self._closing, job.thinking_budget, bool(job.tools)
        if job.raw or closing is None:
            return None
        opened, reopens = job.prompt.thinking_open, True
        if limit == 0:
            if not opened and closing.is_closed_by(job.prompt.fed):
                return None
            if len(closing.opening) == 1:
                processors.append(not_before(math.inf, closing.opening))
                if not opened:
                    return None
                reopens = False
        tokenizer = self.loaded.tokenizer
        return ThinkingBudget(closing, tokenizer, limit, tools=tools, reopens=reopens)

    def _end_request(self, task: Task) -> None:
        """Add a request that is over to the metrics, before its client is told. MLX thread only.

        Its reply is remembered for later prompts, and added to its session if the request did not
        fail.
        """
        if task.admitted:
            figures = self._totals.add(task.record, self.scheduler.prefill.speed)
            reply = task.generated()
            self.builders.of(task.job.owner).remember(reply)
            self._share_reply(task, reply)
            self._add_turn(task, reply, figures)
        self._publish()

    def _publish(self) -> None:
        self.figures.publish()

    def _share_reply(self, task: Task, reply: GeneratedReply | None) -> None:
        prompt = task.job.prompt
        if self.remote is None or reply is None or not isinstance(prompt, ChatPrompt):
            return
        if prompt.asked:
            self.remote.share_reply(task.job.owner, prompt.asked, reply.row)

    def note_begin(self, job: Job) -> None:
        """Begin to look up in the remote the session of a request, which other servers may have.

        Returns at once. Any thread.
        """
        if self.remote is not None and job.api != WARMING:
            ids = job.prompt.ids
            key = conversation_key_tokens(job.prompt.marks, len(ids))
            self.remote.sessions.look_up(job.owner, digest_of(ids[:key]))

    def fetch_replies(self, chat: Chat, session: str | None, owner: str | None) -> None:
        """Fetch from the remote the replies in `chat` that other servers generated, for replay.

        Blocks for a small part of the time that computing the conversation would take. Any thread.
        """
        if self.remote is None:
            return
        builder = self.builders.of(owner)
        unknown = builder.unknown_replies(chat, session)
        if not unknown:
            return
        rows = self.remote.replies_to(owner, unknown, builder.estimate_tokens(chat))
        if rows:
            self.builders.learn({owner: rows})

    def _add_turn(self, task: Task, reply: GeneratedReply | None, figures: SessionFigures) -> None:
        job = task.job
        if task.record.status not in RECORDED or job.api == WARMING or task.scores_prompt:
            return
        ids = task.tokens()
        if task.out and self.kv.match(ids) < len(ids):
            ids = ids[:-1]  # the last token was drawn and not fed, so it has no KV
        gain = Gain(figures, self.scheduler.prefill.speed.take_unsaved())
        row = reply.row if reply else None
        self.book.writer.add_turn(job, ids, time.time(), row, gain)

    # -- the end -----------------------------------------------------------------------------------

    def close(self, *, died: bool) -> None:
        """Write committed KV to disk, for at most `FLUSH_S` seconds, and release everything.

        `died`: the MLX thread ended with an error, so that committed KV of running requests is
        written too. An error in one step is logged, and the next step runs. MLX thread only.
        """
        steps: list[tuple[str, Callable[[], object]]] = [
            ("writing the table of sessions", self.book.close),
            ("writing KV to disk", self._close_cache),
        ]
        if died:
            steps.insert(0, ("saving what running requests computed", self.scheduler.persist_all))
        for what, step in steps:
            try:
                step()
            except Exception:
                log.exception(
                    "model %s: shutdown step failed, the other steps are still done: %s",
                    *(self.label, what),
                )

    def _close_cache(self) -> None:
        if self.pressure is not None:
            self.pressure.stop()
        left = self.kv.close(FLUSH_S)
        if left:
            log.warning(
                "model %s: shutdown: KV of up to %d tokens was not written to disk within %g s, "
                "and will be computed again",
                *(self.label, left, FLUSH_S),
            )
