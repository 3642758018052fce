"""Text completions, whole and in chunks.

Source: https://platform.openai.com/docs/api-reference/completions/object.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mlxcache.api.sse import Events, Pulse, event, finished_or_raise, raw_event
from mlxcache.types import Finished, Text, Thinking, TokenLogprob
from mlxcache.wire.openai_reply import Frame, Reply, finish_reason, usage

if TYPE_CHECKING:
    from mlxcache.engine.engine import Stream


def completion(reply: Reply, frame: Frame, *, logprobs: bool) -> dict[str, Any]:
    """The body of a completion that is not streamed."""
    choice = {
        "index": 0,
        "text": reply.thinking + reply.text,
        "logprobs": text_logprobs(reply.logprobs) if logprobs else None,
        "finish_reason": finish_reason(reply.last, called=False),
    }
    return frame.around(choices=[choice], usage=usage(reply.last))


async def chunks(
    stream: Stream, frame: Frame, pulse: Pulse, *, include_usage: bool, logprobs: bool
) -> Events:
    """The completion as events, the last of them `[DONE]`."""
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    last: Finished | None = None
    offset = 0

    def chunk(text: str, finish: str | None = None, probs: Any = None) -> Any:
        choice = {"index": 0, "text": text, "logprobs": probs, "finish_reason": finish}
        return event(frame.around(choices=[choice], **extra))

    async for item in stream:
        pulse.see(item)
        match item:
            case Text(text, probs) if text or (logprobs and probs):
                yield chunk(text, probs=text_logprobs(probs, offset) if logprobs else None)
                offset += len(text)
            case Thinking(text) if text:
                yield chunk(text)
                offset += len(text)
            case Finished():
                last = item
    last = finished_or_raise(last)
    yield chunk("", finish_reason(last, called=False))
    if include_usage:
        yield event(frame.around(choices=[], usage=usage(last)))
    yield raw_event("[DONE]")


def text_logprobs(tokens: Sequence[TokenLogprob], offset: int = 0) -> dict[str, Any]:
    """The older shape: parallel lists; `offset` is where the text begins, in characters."""
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token.token)
    return {
        "tokens": [t.token for t in tokens],
        "token_logprobs": [max(t.logprob, -9999.0) for t in tokens],
        "top_logprobs": [{token: max(p, -9999.0) for token, _, p in t.top} for t in tokens],
        "text_offset": offsets,
    }
