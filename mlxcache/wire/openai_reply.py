"""Chat completions, whole and in chunks.

Source: https://platform.openai.com/docs/api-reference/chat/object and .../chat/streaming.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mlxcache import __version__
from mlxcache.api.sse import Events, Pulse, event, finished_or_raise, raw_event
from mlxcache.types import Finished, Text, Thinking, TokenLogprob, ToolCall

if TYPE_CHECKING:
    from mlxcache.engine.engine import Stream

FINGERPRINT = f"mlxcache-{__version__}"


@dataclass(frozen=True, slots=True)
class Frame:
    """What all chunks of one reply have in common. `created` is in seconds since 1970."""

    id: str
    model: str
    object: str
    created: int = field(default_factory=lambda: int(time.time()))

    def around(self, **fields: Any) -> dict[str, Any]:
        """A reply's object, or a chunk's."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            **fields,
        }


@dataclass(slots=True)
class Reply:
    """All of a reply, gathered."""

    last: Finished
    text: str = ""
    thinking: str = ""
    calls: list[ToolCall] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


async def gather(stream: Stream) -> Reply:
    """Read `stream` to its end. Raises what the stream raises, NotReady if it was cut short."""
    text: list[str] = []
    thinking: list[str] = []
    calls: list[ToolCall] = []
    logprobs: list[TokenLogprob] = []
    last: Finished | None = None
    async for item in stream:
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
    return Reply(finished_or_raise(last), "".join(text), "".join(thinking), calls, logprobs)


def usage(last: Finished) -> dict[str, Any]:
    """Counts in tokens; `prompt_tokens` counts the cached ones too."""
    return {
        "prompt_tokens": last.prompt_tokens,
        "completion_tokens": last.generated_tokens,
        "total_tokens": last.prompt_tokens + last.generated_tokens,
        "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": last.reasoning_tokens},
    }


def finish_reason(last: Finished, *, called: bool) -> str:
    """`stop`, `length` or `tool_calls`."""
    if last.reason == "length":
        return "length"
    return "tool_calls" if called or last.reason == "tool_calls" else "stop"


def completion(reply: Reply, frame: Frame, *, logprobs: bool) -> dict[str, Any]:
    """The body of a reply that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.thinking:
        message["reasoning_content"] = reply.thinking
    if reply.calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": _function(call)} for call in reply.calls
        ]
    choice = {
        "index": 0,
        "message": message,
        "logprobs": _logprobs(reply.logprobs) if logprobs else None,
        "finish_reason": finish_reason(reply.last, called=bool(reply.calls)),
    }
    return frame.around(choices=[choice], usage=usage(reply.last))


async def chunks(
    stream: Stream, frame: Frame, pulse: Pulse, *, include_usage: bool, logprobs: bool
) -> Events:
    """The reply as events, from the role to `[DONE]`."""
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    called = False
    last: Finished | None = None

    def chunk(delta: dict[str, Any], finish: str | None = None, probs: Any = None) -> Any:
        choice = {"index": 0, "delta": delta, "logprobs": probs, "finish_reason": finish}
        return event(frame.around(choices=[choice], **extra))

    yield chunk({"role": "assistant", "content": ""})
    async for item in stream:
        pulse.see(item)
        match item:
            case Text(text, probs) if text or (logprobs and probs):
                yield chunk({"content": text}, probs=_logprobs(probs) if logprobs else None)
            case Thinking(text) if text:
                yield chunk({"reasoning_content": text})
            case ToolCall():
                called = True
                for delta in _call_deltas(item):
                    yield chunk({"tool_calls": [delta]})
            case Finished():
                last = item
    last = finished_or_raise(last)
    yield chunk({}, finish_reason(last, called=called))
    if include_usage:
        yield event(frame.around(choices=[], usage=usage(last)))
    yield raw_event("[DONE]")


def _function(call: ToolCall) -> dict[str, str]:
    return {"name": call.name, "arguments": call.arguments}


def _call_deltas(call: ToolCall) -> list[dict[str, Any]]:
    opening = {"name": call.name, "arguments": ""}
    return [
        {"index": call.index, "id": call.id, "type": "function", "function": opening},
        {"index": call.index, "function": {"arguments": call.arguments}},
    ]


def _logprobs(tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
    content = [
        _logprob(t.token, t.logprob)
        | {"top_logprobs": [_logprob(token, value) for token, _, value in t.top]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def _logprob(token: str, logprob: float) -> dict[str, Any]:
    """A token that is part of a character is shown as U+FFFD, which its bytes are not."""
    raw = None if "\ufffd" in token else list(token.encode())
    return {"token": token, "logprob": max(logprob, -9999.0), "bytes": raw}
