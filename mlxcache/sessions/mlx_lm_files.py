"""mlx-lm's own prompt caches: what a session holds, as a file for its tools."""

from __future__ import annotations

import queue
import secrets
import weakref
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from mlxcache.errors import Busy, Unsupported
from mlxcache.model.mlx_lm_format import PromptCacheFile
from mlxcache.owner import own_ids
from mlxcache.types import WARMING, Job, Prompt, Tokens

if TYPE_CHECKING:
    from mlxcache.engine.runtime import Core
    from mlxcache.engine.stream import Stream

ANSWER_S = 120.0
"""Seconds that a part of a file may wait for the MLX thread, which may be in a long pass."""

Submit = Callable[[Job], Awaitable["Stream"]]
"""`Engine.submit`."""


class PromptCacheExport:
    """A prompt cache on its way out: iterate once, on any thread but MLX's, for `nbytes` bytes.

    A lineage is held until the iteration ends, or until nobody holds this any more.
    """

    def __init__(self, core: Core, ids: Tokens, model: str, owner: str | None = None):
        """On the MLX thread. `ids`: as the model is fed them.

        Raises Busy where not all of them is in RAM, with its state.
        """
        memory, inbox = core.memory, core.scheduler.inbox
        lease = memory.acquire(own_ids(np.append(ids, ids[-1:]), owner), 1)
        if lease is None:
            raise Busy("There is no memory for a prompt cache now.", retry_after=5.0)
        if lease.cached < len(ids):
            memory.release(lease)
            raise Busy("The session was evicted meanwhile; try again.", retry_after=1.0)
        file = PromptCacheFile(lease.lineage, model, ids)
        parts = [iter(file)]
        self.nbytes = file.nbytes
        self._parts = parts
        self._inbox = inbox

        def release() -> None:
            parts.clear()  # its views go before anybody writes to the buffers again
            memory.release(lease)

        self._release = weakref.finalize(self, inbox.put, release)
        self._release.atexit = False

    def __iter__(self) -> Iterator[bytes]:
        try:
            while part := _on_mlx_thread(self._inbox, lambda: next(self._parts[0], b"")):
                yield part
        finally:
            self._release()


def _on_mlx_thread(
    inbox: queue.SimpleQueue[Callable[[], None]], action: Callable[[], bytes]
) -> bytes:
    answer: Future[bytes] = Future()

    def run() -> None:
        try:
            answer.set_result(action())
        except BaseException as error:  # noqa: BLE001 - it is raised again in `result`
            answer.set_exception(error)

    inbox.put(run)
    return answer.result(ANSWER_S)


async def compute(submit: Submit, ids: Tokens) -> None:
    """Have all of `ids` in RAM, and the state after them. Raises what `Engine.submit` raises.

    One token more is fed, so that there is a place to stop before it.
    """
    if not len(ids) or int(ids.min()) < 0:
        raise Unsupported("mlx-lm's prompt caches are of text alone; this session has images.")
    prompt = Prompt(np.append(ids, ids[-1:]), marks=(len(ids),))
    job = Job(f"req_{secrets.token_hex(12)}", prompt, max_tokens=1, raw=True, api=WARMING)
    async with await submit(job) as stream:
        async for _ in stream:
            pass
