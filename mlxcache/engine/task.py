"""One request on the MLX thread: its prompt, its lease, what it has drawn, and where that goes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import numpy as np

from mlxcache.cache.checkpoints import SPACING
from mlxcache.cache.kv_cache import Lease
from mlxcache.cache.restore import Look
from mlxcache.engine.decoder import Drawn, Row
from mlxcache.errors import GenerationFailed, MlxcacheError
from mlxcache.owner import own_ids
from mlxcache.prompt.replies import GeneratedReply, make_reply
from mlxcache.types import (
    Event,
    Finished,
    FinishReason,
    Job,
    Piece,
    Progress,
    RequestRecord,
    Text,
    TokenLogprob,
    Tokens,
)

log = logging.getLogger("mlxcache.engine")
T = TypeVar("T")


class Parser(Protocol):
    """Turns tokens into pieces; see `model.output.OutputParser`."""

    done: FinishReason | None
    stop_sequence: str | None
    reasoning_tokens: int

    def feed(self, token: int) -> list[Piece]: ...

    def finish(self, reason: FinishReason) -> list[Piece]: ...


class Task:
    """One request, from admission to its end.

    `ids` are the prompt's as the cache knows them, `fed` as the model does.
    """

    def __init__(self, job: Job, push: Callable[[Event | BaseException], None], r: RequestRecord):
        self.job = job
        self.push = push
        self.record = r
        self.ids = job.prompt.ids
        self.fed = job.prompt.fed
        self.images = job.prompt.images
        self.out: list[int] = []
        self.limit = job.max_tokens or 0
        self.lease: Lease | None = None
        self.parser: Parser | None = None
        self.row: Row | None = None
        self.logprob: Callable[[Drawn], TokenLogprob] | None = None
        self.stops: tuple[int, ...] = ()
        self.skipped = 0
        self.deferred = False
        self.look: Look | None = None
        self.restoring = False
        self.restored = 0
        self.scarce_at = -1
        self.over = False
        self.submitted = time.perf_counter()
        self.phase_began = self.submitted

    @property
    def held(self) -> Lease:
        """The lease; a task has one from its admission to its end."""
        assert self.lease is not None
        return self.lease

    @property
    def target(self) -> int:
        """Positions to prefill: all but the last token, which the first decode step feeds."""
        return len(self.ids) - 1

    @property
    def remaining(self) -> int:
        """Prompt tokens still to prefill."""
        return self.target - self.held.lineage.length

    @property
    def behind(self) -> int:
        """Positions of tokens that were handed out and that its lineage does not hold yet."""
        return len(self.ids) + len(self.out) - self.held.lineage.length

    @property
    def spaced(self) -> bool:
        """Whether a long reply is where a checkpoint is worth having, should it be lost."""
        return len(self.out) % SPACING == 0

    def tokens(self) -> Tokens:
        """Prompt and reply so far, as the cache knows them, shape (n,)."""
        return np.concatenate([self.ids, np.asarray(self.out, np.int32)])

    def fed_ids(self) -> Tokens:
        """Prompt and reply so far, as the model is fed them, shape (n,)."""
        return np.concatenate([self.fed, np.asarray(self.out, np.int32)])

    def phase(self, name: str, now: float | None = None) -> None:
        """Book the time from the last phase to `now` under `name`, in seconds."""
        now = time.perf_counter() if now is None else now
        self.record.timing[name] = round(now - self.phase_began, 6)
        self.phase_began = now

    def progress(self) -> None:
        """Tell the client how far the prefill is."""
        done = self.held.lineage.length
        self.record.fed_tokens = done - self.record.cached_tokens
        self.push(Progress(done, len(self.ids)))

    def take(self, drawn: Drawn) -> FinishReason | None:
        """Account for a drawn token and stream its pieces; why the reply is over, if it is."""
        assert self.parser is not None
        if not self.out:
            self.record.timing["first_token_s"] = round(
                self.job.render_s + time.perf_counter() - self.submitted, 6
            )
            self.phase("prefill_s")
            self.record.status = "decode"
        self.out.append(drawn.token)
        self.record.generated_tokens = len(self.out)
        pieces = self.parser.feed(drawn.token)
        if self.logprob is not None:
            pieces = _with_logprob(pieces, self.logprob(drawn))
        for piece in pieces:
            self.push(piece)
        if self.parser.done is not None:
            return self.parser.done
        return "length" if len(self.out) >= self.limit else None

    def flush(self, reason: FinishReason) -> None:
        """Stream what the parser held back, and make the record final."""
        if self.parser is not None:
            for piece in self.parser.finish(reason):
                self.push(piece)
            reason = self.parser.done or reason
        self.close_record(reason)

    def end(self) -> None:
        """Push the last event. Everything that the request did must be accounted for."""
        self.over = True
        parser, record = self.parser, self.record
        self.push(
            Finished(
                reason=record.finish_reason or "stop",
                prompt_tokens=len(self.ids),
                cached_tokens=record.cached_tokens,
                restored_tokens=record.restored_tokens,
                generated_tokens=len(self.out),
                reasoning_tokens=parser.reasoning_tokens if parser else 0,
                stop_sequence=parser.stop_sequence if parser else None,
            )
        )

    def generated(self) -> GeneratedReply | None:
        """The reply, to be put in where it comes back; None where that cannot be."""
        if self.parser is None:
            return None
        calls, stopped = bool(self.job.tools), self.parser.stop_sequence
        return make_reply(self.job.prompt, self.out, calls=calls, stopped=stopped)

    def fail(self, error: MlxcacheError) -> None:
        """Make the record that of a failure."""
        self.over = True
        self.record.error = str(error)
        self.close_record("error")

    def close_record(self, reason: FinishReason) -> None:
        """Write the request's last numbers."""
        record = self.record
        record.generated_tokens = len(self.out)
        if self.lease is not None:
            done = min(self.lease.lineage.length, len(self.ids))
            record.fed_tokens = max(0, done - record.cached_tokens)
        if self.out:
            self.phase("decode_s")
        record.finish_reason = reason
        record.status = {"cancelled": "cancelled", "error": "failed"}.get(reason, "done")  # type: ignore[assignment]


def _with_logprob(pieces: list[Piece], entry: TokenLogprob) -> list[Piece]:
    """Carry a token's log-probability on the text it completed, or on an empty text."""
    for i, piece in enumerate(pieces):
        if isinstance(piece, Text):
            return [*pieces[:i], Text(piece.text, (*piece.logprobs, entry)), *pieces[i + 1 :]]
    return [*pieces, Text("", (entry,))]


Outcome = FinishReason | MlxcacheError
"""How a reply ends."""


def take(task: Task, drawn: Sequence[Drawn]) -> Outcome | None:
    """Hand tokens out until the task is over; why it is, if it is."""
    if not drawn and task.row is not None and task.row.error is not None:
        return failure(task.row.error)
    try:
        outcomes = map(task.take, drawn)
        return next((outcome for outcome in outcomes if outcome is not None), None)
    except Exception as error:  # noqa: BLE001 - `failure` logs it
        return failure(error)


def rendered(make: Callable[[], T]) -> T:
    """What `make` makes of a conversation. Raises GenerationFailed for what a template or a
    tokenizer raises that nobody foresaw; a tokenizer's panic is no `Exception`."""
    try:
        return make()
    except MlxcacheError:
        raise
    except BaseException as error:
        log.exception("a prompt could not be made")
        raise GenerationFailed(
            f"The prompt could not be made: {type(error).__name__}: {error}"
        ) from error


def failure(error: Exception) -> MlxcacheError:
    """What the client is told of `error`, which the log gets whole."""
    if isinstance(error, MlxcacheError):
        return error
    log.error("a request failed", exc_info=error)
    return GenerationFailed(f"The model failed: {error}")


def owned(job: Job, owner: str | None) -> Job:
    """A job as one owner's: the cache knows its prompt by ids that are only the owner's."""
    prompt = job.prompt
    if owner is None:
        return job
    return replace(
        job,
        owner=owner,
        prompt=replace(prompt, ids=own_ids(prompt.ids, owner), tokens=prompt.fed),
    )
