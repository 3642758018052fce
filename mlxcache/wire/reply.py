"""A whole reply, gathered from the events of an engine stream."""

from __future__ import annotations

from collections.abc import AsyncIterable, Sequence
from dataclasses import dataclass, field
from itertools import dropwhile

from mlxcache.errors import GenerationFailed, NotReady
from mlxcache.types import (
    Event,
    Finished,
    Piece,
    PromptLogprobs,
    Text,
    Thinking,
    TokenLogprob,
    ToolCall,
)


@dataclass(slots=True)
class WholeReply:
    """A finished reply; `last` is the event that ended it. `prompt`: log-probabilities of it."""

    last: Finished
    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt: tuple[TokenLogprob, ...] = ()


class HeldLogprobs:
    """Log-probabilities of visible text, held until that text is sent.

    Log-probabilities of text that is never sent are dropped: a stop string, blanks before a tool
    call, or the newlines that a template writes after a think block.
    """

    def __init__(self) -> None:
        self._held: list[TokenLogprob] = []
        self._begun = False

    def take(self, piece: Piece) -> Sequence[TokenLogprob]:
        """Add the log-probabilities of `piece`; return all held ones if it has text to send."""
        if not isinstance(piece, Text):
            self._held, self._begun = [], False
            return ()
        self._held += [one for one in piece.logprobs if one.visible]
        return self._release(piece.text) if piece.text else ()

    def end(self, last: Finished) -> Sequence[TokenLogprob]:
        rest = self._release("")
        return () if last.stop_sequence is not None else rest

    def _release(self, text: str) -> Sequence[TokenLogprob]:
        held, self._held = self._held, []
        if not self._begun and not text.startswith("\n"):
            held = list(dropwhile(lambda one: not one.token.strip("\n"), held))
        self._begun = True
        return held


async def gather_reply(events: AsyncIterable[Event]) -> WholeReply:
    """Read `events` to the end and return the whole reply."""
    text: list[str] = []
    thinking: list[str] = []
    calls: list[ToolCall] = []
    logprobs: list[TokenLogprob] = []
    prompt: tuple[TokenLogprob, ...] = ()
    held = HeldLogprobs()
    last: Finished | None = None
    async for item in events:
        if isinstance(item, Piece):
            logprobs += held.take(item)
        match item:
            case PromptLogprobs(tokens):
                prompt = tokens
            case Text():
                text.append(item.text)
            case Thinking():
                thinking.append(item.text)
            case ToolCall():
                calls.append(item)
            case Finished():
                last = item
                logprobs += held.end(item)
    said = "".join(text), "".join(thinking)
    return WholeReply(finished_or_raise(last), *said, calls, logprobs, prompt)


def is_cut(last: Finished, whole: bool) -> bool:
    """Return whether a reply that was not cancelled counts as cut off.

    One that repeated itself does so only if it must be `whole` (a format or a call was required):
    agents request the rest of a reply that was cut off, but clients parse one that was not.
    """
    return last.reason == "length" or (whole and last.reason == "repetition")


def finished_or_raise(last: Finished | None) -> Finished:
    """Return the final event of a reply that did not fail and was not cancelled.

    Raises GenerationFailed or NotReady. That the server is stopping is then true: a client that
    cancelled its reply by disconnecting does not read it.
    """
    if last is not None and last.reason == "error":
        raise GenerationFailed("The model failed while it was answering.")
    if last is None or last.reason == "cancelled":
        raise NotReady("The reply was cut short because the server is stopping.")
    return last
