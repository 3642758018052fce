"""A whole reply, gathered from the engine's events."""

from __future__ import annotations

from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from mlxcache.errors import GenerationFailed, NotReady
from mlxcache.types import Event, Finished, Text, Thinking, TokenLogprob, ToolCall


@dataclass(slots=True)
class WholeReply:
    """Text, reasoning, tool calls and log probabilities of one finished reply."""

    last: Finished
    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


async def gather_reply(events: AsyncIterable[Event]) -> WholeReply:
    """Read `events` to their end.

    Raises what `events` raises, and what `finished_or_raise` raises.
    """
    text: list[str] = []
    thinking: list[str] = []
    calls: list[ToolCall] = []
    logprobs: list[TokenLogprob] = []
    last: Finished | None = None
    async for item in events:
        match item:
            case Text():
                text.append(item.text)
                logprobs += item.logprobs
            case Thinking():
                thinking.append(item.text)
            case ToolCall():
                calls.append(item)
            case Finished():
                last = item
    return WholeReply(finished_or_raise(last), "".join(text), "".join(thinking), calls, logprobs)


def finished_or_raise(last: Finished | None) -> Finished:
    """Return the final event of a reply that ended by itself.

    Raises GenerationFailed if the model failed, NotReady if the reply was cut short. A client that
    disconnected does not read the error, so the only other cause is that the server is stopping.
    """
    if last is not None and last.reason == "error":
        raise GenerationFailed("The model failed while it was answering.")
    if last is None or last.reason == "cancelled":
        raise NotReady("The reply was cut short because the server is stopping.")
    return last
