"""A trace played to servers: the same requests in the same order, one at a time.

The blocks of a trace become filler text: the same block is the same text. Where a prompt contains
the reply of an earlier request, it contains what that server really replied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import quantiles
from typing import Any

from mlxcache.bench.client import Client, Reply
from mlxcache.bench.text import Filler
from mlxcache.plan.trace import Request


@dataclass(frozen=True, slots=True)
class Played:
    """What one server did with a trace.

    `replies`: those of all requests in order. `prompt_tokens` and `cached_tokens`: sums of what the
    server reported; `cached_tokens` is None if it reported none.
    """

    replies: tuple[Reply, ...]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts."""
        return sum(one.prompt_tokens or 0 for one in self.replies)

    @property
    def cached_tokens(self) -> int | None:
        """Reused tokens of all prompts."""
        if all(one.cached_tokens is None for one in self.replies):
            return None
        return sum(one.cached_tokens or 0 for one in self.replies)

    @property
    def hit_rate(self) -> float | None:
        """Share of the prompt tokens that were reused."""
        if self.cached_tokens is None:
            return None
        return self.cached_tokens / max(1, self.prompt_tokens)

    def first_token_s(self) -> tuple[float, float]:
        """Return the median and the 95th percentile of the times to the first token."""
        times = sorted(one.first_s for one in self.replies)
        if len(times) < 2:
            return times[0], times[0]
        cuts = quantiles(times, n=20, method="inclusive")
        return cuts[9], cuts[18]

    def as_object(self) -> dict[str, Any]:
        """Return the figures for JSON."""
        median, late = self.first_token_s()
        cached = self.cached_tokens
        return {
            "requests": len(self.replies),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": cached,
            "fed_tokens": None if cached is None else self.prompt_tokens - cached,
            "hit_rate": self.hit_rate,
            "first_token_s": {"p50": median, "p95": late},
            "generated_tokens": sum(one.generated_tokens for one in self.replies),
        }


class Player:
    """Player of one trace to one server. `filler`: text for the server's model."""

    def __init__(self, client: Client, filler: Filler, seed: str = "trace"):
        self._client = client
        self._filler = filler
        self._seed = seed
        self._said: dict[int, str] = {}

    def play(
        self, requests: Iterable[Request], on_reply: Callable[[int], None] = lambda done: None
    ) -> Played:
        """Send `requests` one after another and return what came back. Blocks. Raises Refused."""
        replies: list[Reply] = []
        for one in requests:
            reply = self._client.chat(self.messages(one), max(1, one.reply_tokens))
            said = (reply.text, *("" for _ in one.ids))
            reply_parts = one.ids[one.prompt_parts :].tolist()
            self._said |= dict(zip(reply_parts, said, strict=False))
            replies.append(reply)
            on_reply(len(replies))
        return Played(tuple(replies))

    def messages(self, request: Request) -> list[dict[str, str]]:
        """Return the messages of a request's prompt, with the real replies of earlier ones."""
        messages: list[dict[str, str]] = []
        prompt = slice(request.prompt_parts)
        ids, lengths = request.ids[prompt].tolist(), request.lengths[prompt].tolist()
        for id, tokens in zip(ids, lengths, strict=True):
            role = "assistant" if id in self._said else "user"
            text = self._said.get(id)
            if text is None:
                text = self._filler.text(tokens, f"{self._seed}/{id}")
            if messages and messages[-1]["role"] == role:
                messages[-1]["content"] += text
            else:
                messages.append({"role": role, "content": text})
        return messages
