"""Uploading: KV that is on disk is also put into the remote, in the background, records first.

If KV is dropped from a full queue, it is uploaded with the conversation's next turn.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence

import numpy as np

from mlxcache.errors import RemoteUnavailable, StoreError
from mlxcache.remote import grid
from mlxcache.remote.exchange import Exchange
from mlxcache.remote.run_objects import pack_checkpoint, pack_run
from mlxcache.safetensors import Malformed
from mlxcache.store.digests import BLOCK, Chain
from mlxcache.store.found import Found
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.engine")

MOST_PATHS, MOST_BYTES = 256, 64 << 20
"""Most conversations that wait to be uploaded, and most bytes of their token ids."""

MOST_RECORDS = 4096
"""Most small objects that wait to be uploaded."""

FIRST_RETRY_S, RETRY_S = 1.0, 30.0
"""Pause after a failed upload, in seconds: the first one, and the longest. Each pause doubles."""

NEWEST_STATES = 3
"""Number of a path's newest checkpoints that are uploaded, besides its first one."""


HEADS = 64
"""Number of objects whose presence is asked for at once."""

Record = tuple[str, Callable[[], None]]
"""Name of a small object, and what writes it."""


class Uploader:
    """Thread that writes runs, checkpoints and small records to the remote. Thread-safe.

    No method blocks, except `wait` and `close`.
    """

    def __init__(self, exchange: Exchange):
        self._exchange, self._label, self._counts = exchange, exchange.label, exchange.counts
        self._objects, self._store, self._names = exchange.objects, exchange.store, exchange.names
        self._cell = exchange.shape.cell
        self._paths: list[Tokens] = []
        self._records: OrderedDict[str, Callable[[], None]] = OrderedDict()
        self._state = threading.Condition()
        self._busy = self._closing = False
        self._pause = 0.0
        self._thread = threading.Thread(target=self._run, name="mlxcache-upload", daemon=True)
        self._thread.start()

    def add_path(self, ids: Tokens) -> None:
        """Queue the runs and checkpoints on disk of the path `ids` to be uploaded.

        The path replaces queued paths that it continues. If the queue is full, the path that was
        queued first is dropped.
        """
        with self._state:
            kept = [path for path in self._paths if not _continues(ids, path)]
            kept.append(ids)
            while len(kept) > MOST_PATHS or (
                len(kept) > 1 and sum(path.nbytes for path in kept) > MOST_BYTES
            ):
                kept.pop(0)
                self._counts.add(dropped=1)
            self._paths = kept
            self._state.notify_all()

    def add_record(self, name: str, put: Callable[[], None]) -> None:
        """Queue `put`, which writes the small object `name`, in place of one queued as `name`."""
        with self._state:
            self._records[name] = put
            self._records.move_to_end(name)
            while len(self._records) > MOST_RECORDS:
                self._records.popitem(last=False)
                self._counts.add(dropped=1)
            self._state.notify_all()

    @property
    def waiting(self) -> int:
        """Number of paths and records that are queued, plus 1 while one is uploaded."""
        with self._state:
            return len(self._paths) + len(self._records) + self._busy

    def wait(self, seconds: float) -> bool:
        with self._state:
            return self._state.wait_for(
                lambda: not (self._paths or self._records or self._busy), seconds
            )

    def close(self, seconds: float) -> int:
        """End the thread after the path or record in progress, waiting at most `seconds`."""
        with self._state:
            self._closing = True
            self._state.notify_all()
        self._thread.join(seconds)
        return self.waiting

    # -- on the uploader's thread ------------------------------------------------------------------

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._upload(item)
                self._pause = 0.0
            except RemoteUnavailable as error:
                log.debug(
                    "model %s: upload to the remote failed, and is tried again later: %s: %s",
                    *(self._label, _description(item), error),
                )
                self._put_back(item)
                self._pause = min(RETRY_S, 2 * self._pause or FIRST_RETRY_S)
            except (StoreError, OSError, Malformed) as error:  # evicted or damaged meanwhile
                log.debug(
                    "model %s: upload to the remote failed, and is not tried again: %s: %s",
                    *(self._label, _description(item), error),
                )
            except Exception:
                log.exception(
                    "model %s: upload to the remote failed, and is not tried again: %s",
                    *(self._label, _description(item)),
                )
            finally:
                with self._state:
                    self._busy = False
                    self._state.notify_all()

    def _next(self) -> Record | Tokens | None:
        with self._state:
            self._state.wait_for(lambda: self._closing, self._pause)
            self._state.wait_for(lambda: self._paths or self._records or self._closing)
            if self._closing:
                return None
            self._busy = True
            if self._records:
                return self._records.popitem(last=False)
            return self._paths.pop(0)

    def _put_back(self, item: Record | Tokens) -> None:
        with self._state:
            if isinstance(item, tuple):
                self._records.setdefault(*item)
                self._records.move_to_end(item[0], last=False)
            elif not any(_continues(path, item) for path in self._paths):
                self._paths.insert(0, item)

    def _upload(self, item: Record | Tokens) -> None:
        if isinstance(item, tuple):
            item[1]()
            return
        chain = self._store.chain(item)
        found = self._store.find(item, touch=False)
        ends = self._run_ends(min(found.length, len(item)))
        self._note_held(chain, [end for end, stop in ends if stop == end])
        for end, stop in ends[:-1]:
            self._put_run(chain, found, end, stop)
        self._put_checkpoints(chain, found)
        for end, stop in ends[-1:]:  # the last object shows others that all of it is there
            self._put_run(chain, found, end, stop)

    def _note_held(self, chain: Chain, ends: Sequence[int]) -> None:
        names = [(grid.run_name(chain, end), end) for end in ends]
        names = [one for one in names if not self._names.is_present(*one)]
        for at in range(0, len(names), HEADS):
            part = names[at : at + HEADS]
            sizes = self._objects.head_many([name for name, _ in part])
            for (name, end), size in zip(part, sizes, strict=True):
                if size is not None and not self._names.is_wrong(name):
                    self._names.note_present(name, end)

    def _run_ends(self, length: int) -> list[tuple[int, int]]:
        whole = length // BLOCK * BLOCK
        ends = [*range(self._cell, whole, self._cell), *([whole] if whole else [])]
        return [(end, length if end == whole else end) for end in ends]

    def _put_run(self, chain: Chain, found: Found, end: int, stop: int) -> None:
        """Write a run object unless the remote's is as long, and not known to be damaged."""
        name = grid.run_name(chain, end)
        if self._names.is_present(name, stop):
            return
        data = pack_run(self._store, found, chain, grid.cell_start(end, self._cell), stop)
        known = stop == end or self._names.is_wrong(name)  # that it is not there, or is useless
        size = None if known else self._objects.head(name)
        if size is None or size < len(data):
            self._exchange.put(name, data)
        self._names.note_present(name, stop)

    def _put_checkpoints(self, chain: Chain, found: Found) -> None:
        saved = found.checkpoints
        for one in [*saved[:1], *saved[max(1, len(saved) - NEWEST_STATES) :]]:
            name = grid.checkpoint_name(chain, one.position, self._cell)
            if self._names.is_present(name, one.position):
                continue
            if self._names.is_wrong(name) or self._objects.head(name) is None:
                self._exchange.put(name, pack_checkpoint(self._store, one, chain.ids))
            self._names.note_present(name, one.position)


def _description(item: Record | Tokens) -> str:
    return item[0] if isinstance(item, tuple) else f"KV of {len(item)} tokens"


def _continues(ids: Tokens, path: Tokens) -> bool:
    return len(path) <= len(ids) and bool(np.array_equal(path, ids[: len(path)]))
