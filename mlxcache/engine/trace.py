"""Traces: token counts and shared prefixes of recent requests, without text, for `mlxcache plan`.

A path of token ids becomes blocks of `BLOCK` tokens, each named by a MAC (keyed digest) of all
tokens up to its end. The key is random, belongs to one recording, and is never written anywhere, so
equal prefixes can be recognised and prompts cannot be guessed. A block is divided where a prompt or
a reply ended, so that a next turn that continues there is known to continue exactly there.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxcache.cache.main_conversation import CacheHints
from mlxcache.lru import LRU
from mlxcache.store.digests import BLOCK
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.scheduling.task import Task

VERSION = 1

MOST_SESSIONS, MOST_ENDS = 1024, 65_536

MOST_WAITING = 1000
"""Requests that a recording may be behind before it ends."""

_NAME_BYTES = 9

Part = tuple[str, int]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """The data of an ended request that a recording needs.

    `ids`: of prompt and reply. `arrived`, `ended`: seconds since 1970. `key`, `head`: numbers of
    leading tokens that identify the conversation (None if unknown), and of tools and system prompt.
    """

    ids: Tokens
    prompt_tokens: int
    cached_tokens: int
    restored_tokens: int
    arrived: float
    ended: float
    session: str | None
    key: int | None
    head: int

    @classmethod
    def of(cls, task: Task) -> TracedRequest:
        record, hints = task.record, CacheHints.of(task.job)
        return cls(
            ids=task.tokens(),
            prompt_tokens=len(task.job.prompt.ids),
            cached_tokens=record.cached_tokens,
            restored_tokens=record.restored_tokens,
            arrived=record.created_at,
            ended=time.time(),
            session=record.session,
            key=hints.conversation_key,
            head=hints.head,
        )


class TraceWriter:
    def __init__(self, began: float):
        self._began = began
        self._key = secrets.token_bytes(32)
        self._last: LRU[str | None, Sequence[Part]] = LRU(MOST_SESSIONS)
        self._ends: LRU[bytes, dict[int, set[bytes]]] = LRU(MOST_ENDS)

    def header(self) -> dict[str, Any]:
        return {"trace": "mlxcache", "version": VERSION, "block_tokens": BLOCK}

    def line(self, one: TracedRequest) -> dict[str, Any]:
        """Return the line of a request, as docs/configuration.md describes it.

        100,000 tokens take about 10 ms.
        """
        parts = self._parts(one.ids, one.prompt_tokens)
        session = None if one.session is None else self._name(b"session", one.session.encode())
        before = self._last.peek(session) or ()
        same = 0
        while same < min(len(before), len(parts)) and before[same] == parts[same]:
            same += 1
        self._last.put(session, parts)
        return {
            "time": round(max(0.0, one.arrived - self._began), 3),
            "seconds": round(max(0.0, one.ended - one.arrived), 3),
            "session": session,
            "prompt_tokens": one.prompt_tokens,
            "generated_tokens": len(one.ids) - one.prompt_tokens,
            "cached_tokens": one.cached_tokens,
            "restored_tokens": one.restored_tokens,
            "key": one.key,
            "head": one.head,
            "same": same,
            "blocks": [name if size == BLOCK else [name, size] for name, size in parts[same:]],
        }

    def _parts(self, ids: Tokens, prompt_tokens: int) -> Sequence[Part]:
        raw = ids.tobytes()
        parts: list[Part] = []
        digest = self._mac(b"", b"")
        for start in range(0, len(ids), BLOCK):
            block = raw[start * 4 : (start + BLOCK) * 4]
            size = len(block) // 4
            own = {end - start for end in (prompt_tokens, len(ids)) if start < end < start + BLOCK}
            cuts = own | set(self._known(digest, block))
            for cut in own:
                tails = self._ends.peek(digest) or {}
                tails.setdefault(cut, set()).add(self._mac(digest, block[: cut * 4]))
                self._ends.put(digest, tails)
            at = 0
            for cut in sorted(cuts | {size}):
                parts.append((_text(self._mac(digest, block[: cut * 4])), cut - at))
                at = cut
            digest = self._mac(digest, block)
        return parts

    def _known(self, digest: bytes, block: bytes) -> Iterator[int]:
        """Yield the positions inside a block at which earlier paths with the same tokens ended."""
        for cut, tails in (self._ends.peek(digest) or {}).items():
            if cut * 4 < len(block) and self._mac(digest, block[: cut * 4]) in tails:
                yield cut

    def _mac(self, before: bytes, raw: bytes) -> bytes:
        return hmac.digest(self._key, before + raw, "sha256")[:_NAME_BYTES]

    def _name(self, kind: bytes, text: bytes) -> str:
        return _text(self._mac(kind, b"\0" + text))


def _text(digest: bytes) -> str:
    return urlsafe_b64encode(digest).decode()


class Recording:
    """One recording in progress: a queue of ended requests to be written. Event loop only."""

    def __init__(self, owner: str | None):
        self.owner = owner
        self.writer = TraceWriter(time.time())
        self.lagging = False
        self._waiting: asyncio.Queue[TracedRequest] = asyncio.Queue(MOST_WAITING)

    def put(self, one: TracedRequest) -> None:
        """Queue a request.

        If `MOST_WAITING` wait already, `lagging` ends the recording after those.
        """
        try:
            self._waiting.put_nowait(one)
        except asyncio.QueueFull:
            self.lagging = True

    async def take(self, seconds: float) -> dict[str, Any] | None:
        """Take the next request from the queue, and return its line; None if none comes in
        `seconds`.
        """
        try:
            one = await asyncio.wait_for(self._waiting.get(), seconds)
        except TimeoutError:
            return None
        return await asyncio.to_thread(self.writer.line, one)


class Recordings:
    def __init__(self) -> None:
        self._open: list[Recording] = []

    @contextmanager
    def record(self, owner: str | None) -> Iterator[Recording]:
        recording = Recording(owner)
        self._open.append(recording)
        try:
            yield recording
        finally:
            self._open.remove(recording)

    def note(self, task: Task) -> None:
        """Add an ended task to the recordings of its owner, if it was admitted."""
        readers = [
            recording
            for recording in self._open
            if recording.owner == task.job.owner and not recording.lagging
        ]
        if not readers or not task.admitted:
            return
        one = TracedRequest.of(task)
        for recording in readers:
            recording.put(one)
