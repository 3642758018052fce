"""One request on the MLX thread: its prompt, its lease, its reply so far, and its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import mlx.core as mx

from mlxcache.cache.checkpoints import SPACING
from mlxcache.cache.kv_cache import Lease
from mlxcache.cache.restore import DiskLookup
from mlxcache.common_prefix import common_length
from mlxcache.errors import MlxcacheError
from mlxcache.model.guidance.guide import Guide
from mlxcache.model.guidance.thinking import ThinkingBudget
from mlxcache.model.output import OutputParser
from mlxcache.model.sampling import skip_draws
from mlxcache.owner import own_ids
from mlxcache.prompt.chat_prompt import make_reply
from mlxcache.prompt.replies import GeneratedReply
from mlxcache.scheduling.decoder import DecoderRow, Drawn, NonFiniteOutput, normalised
from mlxcache.scheduling.loop_guard import LoopGuard
from mlxcache.types import (
    Admitted,
    Event,
    Finished,
    FinishReason,
    GuessSource,
    Job,
    Piece,
    Progress,
    PromptLogprobs,
    RequestRecord,
    Text,
    TokenLogprob,
    Tokens,
    join_ids,
    token_ids,
)

log = logging.getLogger("mlxcache.engine")

Outcome = FinishReason | MlxcacheError


@dataclass(frozen=True, slots=True)
class Output:
    """Decoder row and parser of an admitted task's reply.

    `logprob`: computes the log-probabilities that the client requested, of tokens and logits or
    log-probabilities of shape (tokens, vocabulary). `loop`: detects a reply that repeats itself.
    `budget`: limits the tokens of thinking blocks. `scores`: the log-probabilities of the prompt's
    tokens so far, the first of which has none.
    """

    parser: OutputParser
    row: DecoderRow
    logprob: Callable[[mx.array, Sequence[int]], list[TokenLogprob]] | None = None
    loop: LoopGuard | None = None
    budget: ThinkingBudget | None = None
    scores: list[TokenLogprob] = field(default_factory=list)

    def feed(self, token: int) -> list[Piece]:
        parser, budget = self.parser, self.budget
        pieces = parser.feed(token)
        if budget is not None:
            used = parser.reasoning_tokens
            steering = budget.note(token, thinking=parser.thinking, used=used)
            if steering is not None:
                self.row.steer(steering)
        return pieces

    def may_steer(self, within: int) -> bool:
        """Return whether the reply's guide may change within the next `within` tokens.

        It changes to end a thinking block, and once more when that block has ended.
        """
        if self.budget is None:
            return False
        near = self.loop is not None and self.loop.near and self.parser.thinking
        return near or self.budget.may_steer(self.parser.reasoning_tokens, within)

    def is_loop(self, token: int) -> bool:
        """Add the reply's newest token, once; return whether the reply is a loop and must end.

        The first loop inside a thinking block with a `budget` ends only the block.
        """
        loop = self.loop
        if loop is None or not loop.add(token):
            return False
        period, thinking = loop.period, self.budget is not None and self.parser.thinking
        steering = self.budget.end() if self.budget is not None and thinking else None
        what = "reply" if steering is None else "thinking"
        log.warning("%s: %s ended: it repeats the same %d tokens", self.row.id, what, period)
        if steering is None:
            return True
        self.row.steer(steering)
        loop.reset()
        return False

    def replay(self, tokens: Sequence[int]) -> None:
        """Bring a new output into the state after tokens that the client already has."""
        for token in tokens:
            self.row.apply_steering()
            if self.row.guide is not None:
                self.row.guide.accept(token)
            self.feed(token)
            self.is_loop(token)
        skip_draws(self.row.sampler, len(tokens))


class Task:
    """One request, from its submission to its end. Use on the MLX thread.

    `push` passes an event to the request's readers, on any thread. `ids`: the prompt's token ids as
    the cache stores them, `fed`: as the model is fed them; the two differ for images and if the
    server has several keys. `stops`: positions at which the prefill takes a checkpoint. `skipped`:
    chunks of other prompts that were fed since its own last one. `deferred`: it waited for a prefix
    that another request computes. `matched`: prompt tokens in RAM at its admission, reusable or
    not. `guide`: restricts the reply, in its state before the first token; decoder rows get copies.

    Pieces of the reply are staged until `deliver`, because on a GPU, which reports errors late, the
    pass that drew them may have failed. After such an error, `begin_again` drops the tokens that
    were not delivered, and those delivered become part of `ids` and `fed`. `restarts` counts the
    restarts since the cache last held more of the prompt than before.
    """

    scores_prompt: ClassVar[bool] = False

    def __init__(
        self,
        job: Job,
        push: Callable[[Event | BaseException], None],
        record: RequestRecord,
        guide: Guide | None = None,
    ):
        self.job = job
        self.push = push
        self.record = record
        self.guide = guide
        self.ids = job.prompt.ids
        self.fed = job.prompt.fed
        self.images = job.prompt.images
        self.out: list[int] = []
        self.limit = job.max_tokens or 0
        self.lease: Lease | None = None
        self.output: Output | None = None
        self.lookup: DiskLookup | None = None
        self.stops: tuple[int, ...] = ()
        self.skipped = 0
        self.deferred = False
        self.restored = 0
        self.matched = 0
        self.admitted = False
        self.restarts = 0
        self.over = False
        self.prompt_tokens = len(self.ids)
        self.submitted = time.perf_counter()
        self.phase_began = self.submitted - job.loaded_s  # a part of the time in the queue
        self._oom_at = -1
        self._staged: list[PromptLogprobs | Piece] = []
        self._delivered = 0
        self._refed = 0
        self._kept = 0

    # -- its prompt --------------------------------------------------------------------------------

    @property
    def held(self) -> Lease:
        """The task's lease; only valid between its start and its end."""
        assert self.lease is not None
        return self.lease

    @property
    def restoring(self) -> bool:
        return self.lease is not None and self.lease.awaiting_state

    @property
    def target(self) -> int:
        """Positions to prefill: all but the last prompt token, which decoding feeds, if it does."""
        return len(self.ids) - (self.job.max_tokens != 0)

    @property
    def reusable(self) -> int:
        """Number of leading tokens of the prompt whose KV may come from the cache."""
        return self.target

    def shared_with(self, other: Task) -> int:
        """Return of how many tokens `other` can reuse the KV that the prefill of this task adds."""
        return min(common_length(self.ids, other.ids), other.reusable)

    @property
    def remaining(self) -> int:
        return self.target - self.held.length

    @property
    def behind(self) -> int:
        """Number of tokens of prompt and reply whose KV the task's lineage does not hold yet."""
        return self.length - self.held.length

    @property
    def length(self) -> int:
        return self.prompt_tokens + len(self.out)

    @property
    def spaced(self) -> bool:
        """True if a checkpoint is due, to limit what is lost if the request fails later."""
        return len(self.out) % SPACING == 0

    def tokens(self) -> Tokens:
        """Return prompt and reply so far as the cache stores them, shape (n,)."""
        return join_ids(self.ids, token_ids(self.out[self._refed :]))

    def fed_ids(self) -> Tokens:
        """Return prompt and reply so far as the model is fed them, shape (n,)."""
        return join_ids(self.fed, token_ids(self.out[self._refed :]))

    def shorten(self, length: int) -> None:
        self.ids, self.fed = self.ids[:length], self.fed[:length]
        self.prompt_tokens = len(self.ids)

    # -- its start ---------------------------------------------------------------------------------

    def defer(self, deferred: bool) -> bool:
        self.deferred = deferred
        return deferred

    def await_lookup(self, lookup: DiskLookup | None) -> None:
        self.lookup = lookup

    def drop_lookup(self) -> None:
        """End the disk lookup, if there is one: its files are not loaded."""
        if self.lookup is not None:
            self.lookup.drop()

    def limit_reply(self, most: int) -> None:
        self.limit = min(self.limit or most, most)

    def start(self, lease: Lease, began: float) -> None:
        """Begin prefill with `lease`. The admission began at `began`, by `time.perf_counter`."""
        self.lease = lease
        self.record.status = "prefill"
        self.note_phase("queue_s", began)
        self.note_phase("match_s")
        self.record.timing["restore_s"] = 0.0

    def lend(self, lease: Lease) -> None:
        self.lease = lease
        self.record.cached_tokens = lease.cached

    def give_up_lease(self) -> Lease:
        lease = self.held
        self.lease = None
        return lease

    def stop_restore(self) -> Lease:
        assert self.lookup is not None
        self.lookup.disable()
        return self.give_up_lease()

    def note_restored(self, tokens: int) -> None:
        self.restored += tokens

    def plan_stops(self, stops: Sequence[int]) -> None:
        self.stops = tuple(sorted(set(stops)))

    def note_reuse(self) -> None:
        """Record how much was reused; a task that began again keeps what its client was told."""
        if not self.admitted:
            # a piece that a device lost before the admission was read twice
            record, self.restored = self.record, min(self.restored, self.held.cached)
            record.cached_tokens, record.restored_tokens = self.held.cached, self.restored

    def admit(self, output: Output, matched: int) -> None:
        """Set the output of the reply, and tell the client, once, that its request was admitted."""
        if self.admitted:
            output.replay(self.out)
            self.output = output
            return
        self.output, self.matched = output, matched
        self.admitted = True
        self.push(Admitted(len(self.ids), self.held.cached, self.restored))

    def begin_again(self, kept: int) -> None:
        """Drop the tokens that were not delivered; append the delivered ones to the prompt.

        `kept`: number of leading tokens of `ids` that the cache still has. Without a lease only.
        """
        self.out = self.out[: self._delivered]
        self.ids, self.fed = self.tokens(), self.fed_ids()
        self._refed = len(self.out)
        self._staged.clear()
        self.record.generated_tokens = len(self.out)
        self.lookup, self.stops, self.output = None, (), None
        self.deferred = False
        self.restarts = self.restarts + 1 if kept <= self._kept else 1
        self._kept = max(kept, self._kept)

    # -- its course --------------------------------------------------------------------------------

    def pass_over(self, chosen: Task) -> None:
        self.skipped = 0 if self is chosen else self.skipped + 1

    def note_oom(self) -> bool:
        """Record a failed allocation; return False if the last one was at the same position too."""
        repeated = self._oom_at == self.held.length
        self._oom_at = self.held.length
        return not repeated

    def note_phase(self, name: str, now: float | None = None) -> None:
        """Record the seconds from the end of the last phase to `now`, by `time.perf_counter`."""
        now = time.perf_counter() if now is None else now
        self.record.timing[name] = round(now - self.phase_began, 6)
        self.phase_began = now

    def note_pass(self, source: GuessSource, checked: int, right: int) -> None:
        if checked:
            self.record.guesses[source].note_pass(checked, right)

    def note_saved(self, seconds: Mapping[GuessSource, float]) -> None:
        for source, saved in seconds.items():
            self.record.guesses[source].note_saved(saved)

    def may_steer(self, within: int) -> bool:
        return self.output is not None and self.output.may_steer(within)

    def show_progress(self) -> None:
        done = min(self.held.length, self.prompt_tokens)
        self.record.fed_tokens = max(0, done - self.record.cached_tokens)
        if not self.out:
            self.push(Progress(done, self.prompt_tokens))

    @property
    def draws_freely(self) -> bool:
        output = self.output
        assert output is not None
        return output.row.guide is None and output.budget is None and output.logprob is None

    @property
    def row_error(self) -> Exception | None:
        return self.output.row.error if self.output is not None else None

    def take(self, drawn: Sequence[Drawn]) -> FinishReason | None:
        """Add drawn tokens to the reply; return why it is over, None if it goes on."""
        if not drawn and self.row_error is not None:
            raise self.row_error
        outcomes = map(self._take, drawn)
        return next((outcome for outcome in outcomes if outcome is not None), None)

    def _take(self, drawn: Drawn) -> FinishReason | None:
        assert self.output is not None
        output, parser, logprob = self.output, self.output.parser, self.output.logprob
        self.out.append(drawn.token)  # before anything can fail: its KV is in the lineage
        if len(self.out) == 1:
            self.record.timing["first_token_s"] = round(
                self.job.loaded_s + self.job.render_s + time.perf_counter() - self.submitted, 6
            )
            self.note_phase("prefill_s")
            self.record.fed_tokens = max(0, self.prompt_tokens - self.record.cached_tokens)
        self.record.status = "decode"
        self.record.generated_tokens = len(self.out)
        in_text = parser.in_text
        pieces = output.feed(drawn.token)
        if logprob is not None:
            ended = parser.done in ("stop", "tool_calls")  # the token of the turn's end
            visible = in_text and parser.in_text and not ended
            (entry,) = logprob(drawn.logprobs[None], [drawn.token])
            pieces = _with_logprob(pieces, replace(entry, visible=visible))
        if len(self.out) == 1:
            self._staged += self._scores()
        self._staged += pieces
        if parser.done is not None:
            return parser.done
        if output.is_loop(drawn.token):
            return "repetition"
        return "length" if len(self.out) >= self.limit else None

    def score(self, at: int, logits: mx.array) -> None:
        """Do nothing with the `logits` of the prompt's positions from `at` on."""

    def _scores(self) -> list[PromptLogprobs]:
        return []

    @property
    def all_delivered(self) -> bool:
        return self._delivered == len(self.out)

    def deliver(self) -> None:
        """Send the client all staged pieces; call once the passes that drew them are confirmed."""
        staged, self._staged = self._staged, []
        self._delivered = len(self.out)
        for piece in staged:
            self.push(piece)

    # -- its end -----------------------------------------------------------------------------------

    def flush(self, reason: FinishReason) -> None:
        if not self.out and reason == "length":
            self._staged += self._scores()
        self.deliver()
        if self.output is not None:
            parser = self.output.parser
            for piece in parser.finish(reason):
                self.push(piece)
            reason = parser.done or reason
        self._close_record(reason)

    def end(self) -> None:
        """Send the last event, `Finished`. Before, call `flush` and the scheduler's `on_end`."""
        self.over = True
        parser, record = self.output.parser if self.output else None, self.record
        self.push(
            Finished(
                reason=record.finish_reason or "stop",
                prompt_tokens=self.prompt_tokens,
                cached_tokens=record.cached_tokens,
                restored_tokens=record.restored_tokens,
                generated_tokens=len(self.out),
                reasoning_tokens=parser.reasoning_tokens if parser else 0,
                stop_sequence=parser.stop_sequence if parser else None,
            )
        )

    def generated(self) -> GeneratedReply | None:
        """Return the reply in the form kept for replay; None if it cannot be replayed."""
        if self.output is None:
            return None
        calls = bool(self.job.tools)
        stopped = None if self.job.shows_stop else self.output.parser.stop_sequence
        hidden = bool(self.out) and self.out[-1] in self.job.sampling.stop_tokens
        out = self.out[:-1] if hidden else self.out
        return make_reply(self.job.prompt, out, calls=calls, stopped=stopped)

    def fail(self, error: MlxcacheError) -> None:
        """Complete the record of a failed request."""
        self.over = True
        self.record.error = str(error)
        self._close_record("error")

    def _close_record(self, reason: FinishReason) -> None:
        record = self.record
        record.generated_tokens = len(self.out)
        if self.lease is not None and self.admitted:  # before, it holds what was restored so far
            done = min(self.lease.length, self.prompt_tokens)
            record.fed_tokens = max(0, done - record.cached_tokens)
        if self.out:
            self.note_phase("decode_s")
        elif self.admitted:
            self.note_phase("prefill_s")
        else:
            self.note_phase("restore_s" if self.lease is not None else "queue_s")
        record.finish_reason = reason
        record.status = {"cancelled": "cancelled", "error": "failed"}.get(reason, "done")  # type: ignore[assignment]


class ScoredTask(Task):
    """A request for its prompt's log-probabilities too: all of it is fed, and no KV is shared."""

    scores_prompt = True

    @property
    def reusable(self) -> int:
        return 0

    def shared_with(self, other: Task) -> int:
        return 0

    def score(self, at: int, logits: mx.array) -> None:
        """Record the log-probabilities of the tokens after position `at`. Blocks until computed.

        `logits`: of the positions from `at` on, shape (1, n, vocabulary).
        """
        output = self.output
        assert output is not None
        assert output.logprob is not None
        tokens = self.fed[at + 1 : at + 1 + logits.shape[1]].tolist()
        if not tokens:
            return
        logprobs, finite = normalised(logits[0, : len(tokens)].astype(mx.float32))
        output.scores[at + 1 :] = output.logprob(logprobs, tokens)
        if not mx.all(finite).item():
            raise NonFiniteOutput

    def _scores(self) -> list[PromptLogprobs]:
        if self.output is None:
            return []
        return [PromptLogprobs(tuple(self.output.scores[: len(self.job.prompt.ids)]))]


def _with_logprob(pieces: list[Piece], entry: TokenLogprob) -> list[Piece]:
    """Attach a token's log-probability to the first text piece, or to an added empty one."""
    for i, piece in enumerate(pieces):
        if isinstance(piece, Text):
            return [*pieces[:i], Text(piece.text, (*piece.logprobs, entry)), *pieces[i + 1 :]]
    return [*pieces, Text("", (entry,))]


def for_owner(job: Job, owner: str | None) -> Job:
    """Return a copy of `job` whose prompt is cached under token ids that only `owner` has."""
    prompt = job.prompt
    if owner is None:
        return job
    return replace(
        job,
        owner=owner,
        prompt=replace(prompt, ids=own_ids(prompt.ids, owner), tokens=prompt.fed),
    )
