"""Fetching: KV of a prompt's prefix that other servers computed is saved to this server's store.

A lookup has a time limit in proportion to the time that computing the prompt would take, and
fetches only objects that are expected to arrive sooner than their tokens could be computed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from mlxcache.errors import RemoteUnavailable, StoreError
from mlxcache.remote import grid
from mlxcache.remote.condition import Average
from mlxcache.remote.exchange import Exchange
from mlxcache.remote.run_objects import FetchedRun, unpack_checkpoint, unpack_run
from mlxcache.safetensors import Malformed, Tensor
from mlxcache.store.digests import BLOCK, Chain
from mlxcache.store.found import Found
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.engine")

T = TypeVar("T")

MIN_GAIN = 64
"""Least tokens beyond those known for which something is fetched."""

COLD_SHARE = 0.06
"""Share of the prompt's whole prefill that a lookup without a result may take."""

UNKNOWN_SHARE = 0.5
"""Share of the prefill of the unknown part that a lookup without a result may take."""

WORTH = 0.8
"""Largest ratio of the expected seconds of a fetch to those of the prefill that it spares."""

PARALLEL = 4
"""Number of objects that are read at once."""

STALL = 4.0
"""Factor of the expected seconds of an object after which waiting for it ends."""

LISTED = 100
"""Most checkpoints of a cell that are listed."""

BACK = 4
"""Number of cells before the last one whose checkpoints are listed too, if that one has none."""

SPARE_BYTES = 4 << 20
"""Bytes by which an object may exceed twice the size of its tensors, for its header."""

FORGET_S = 60.0
"""Seconds after which a measurement no longer decides anything, so that it is made again."""

PrefillSeconds = Callable[[int, int], float]
"""Callable that estimates the seconds for computing the tokens [start, stop) of a prompt."""


class Pace:
    """Measured seconds of reading from the remote: of a small call, and of each byte. Thread-safe.

    A small call moves almost no data.
    """

    def __init__(self) -> None:
        self._call, self._byte = Average(FORGET_S), Average(FORGET_S)

    def note_call(self, seconds: float) -> None:
        self._call.note(seconds)

    def note_silence(self, seconds: float) -> None:
        """Record that a small call had no answer after `seconds`, and was given up."""
        self._call.raise_to(2 * seconds)

    def note_bytes(self, nbytes: int, seconds: float) -> None:
        self._byte.note(seconds / max(1, nbytes))

    def note_unfinished(self, nbytes: int, seconds: float) -> None:
        """Record that a read of `nbytes` bytes had not ended after `seconds`, and was given up."""
        self._byte.raise_to(seconds / max(1, nbytes))

    @property
    def call_s(self) -> float | None:
        return self._call.value

    def seconds(self, nbytes: int) -> float | None:
        """Return the expected seconds for reading `nbytes` bytes, None if nothing was measured."""
        each = self._byte.value
        return None if each is None else (self.call_s or 0.0) + nbytes * each


class _Expired(Exception):
    """Raised inside a lookup after its time limit, or when nobody waits for its result any more."""


@dataclass(slots=True, eq=False)
class _Lookup:
    """One lookup of a prompt in the remote.

    `local`: number of leading tokens whose runs are on disk. `have`: number of leading tokens that
    the request can reuse without the remote. `most`: the largest number that it could reuse with
    the remote: all tokens but the last. `dropped()` returns True once nobody waits for the result.

    The request may wait for the remote until `began` plus `least` seconds, and in addition as long
    as computing the fetched tokens would have taken (`gained`). So it never takes longer than
    without the remote by more than `least`.
    """

    chain: Chain
    local: int
    have: int
    most: int
    began: float
    least: float
    dropped: Callable[[], bool]
    gained: float = 0.0

    def left(self) -> float:
        return self.began + self.least + self.gained - time.monotonic()


class Fetcher:
    """Fetches runs and checkpoints of prompts into the store. Thread-safe.

    `pool`: threads that make the calls to the remote.
    """

    def __init__(self, exchange: Exchange, seconds: PrefillSeconds, pool: ThreadPoolExecutor):
        self.pace = Pace()
        self._label, self._objects, self._store = exchange.label, exchange.objects, exchange.store
        self._exchange, self._shape = exchange, exchange.shape
        self._names, self._counts = exchange.names, exchange.counts
        self._seconds, self._pool = seconds, pool
        self._last_warning = ""

    def wanted(self, ids: Tokens, known: int, found: Found) -> bool:
        """Return whether looking a prompt up in the remote is worthwhile. Does not block.

        `known`: number of leading tokens that can be reused from RAM. `found`: what is on disk.
        """
        most = len(ids) - 1
        have = max(known, self._usable(found, most))
        if most - have < MIN_GAIN or not self._objects.available:
            return False
        call = self.pace.call_s
        return call is None or call < self._allowed(have, len(ids))

    def _usable(self, found: Found, most: int) -> int:
        length = min(found.length, most)
        if not self._shape.opaque:
            return length
        reach = length if self._shape.bytes_per_token else most
        return max((one.position for one in found.checkpoints if one.position <= reach), default=0)

    def _allowed(self, have: int, length: int) -> float:
        whole, unknown = self._seconds(0, length), self._seconds(have, length)
        return min(COLD_SHARE * whole, UNKNOWN_SHARE * unknown)

    def fetch(
        self, ids: Tokens, known: int, began: float, dropped: Callable[[], bool] = lambda: False
    ) -> int:
        """Fetch a prompt's runs and checkpoint and save them; return the number of tokens saved.

        The number is 0 if nothing is worth fetching, and smaller than expected if the remote fails.
        `began`: time by `time.monotonic` from which the time limit counts. Blocks until about that
        limit, which each run that is saved extends. Raises StoreError if the store cannot be read,
        or if the checkpoint cannot be saved.
        """
        found = self._store.find(ids, touch=False)
        most = len(ids) - 1
        have = max(known, self._usable(found, most))
        least = self._allowed(have, len(ids))
        chain = self._store.chain(ids)
        lookup = _Lookup(chain, found.length, have, most, began, least, dropped)
        self._counts.add(lookups=1)
        try:
            return self._fetch(lookup)
        except _Expired:
            self._counts.add(expired=1)
        except RemoteUnavailable as error:
            log.debug(
                "model %s: remote lookup failed, fetching nothing: prompt of %d tokens: %s",
                *(self._label, len(ids), error),
            )
        return 0

    def _fetch(self, lookup: _Lookup) -> int:
        ends = self._find_runs(lookup) if self._shape.bytes_per_token else []
        reach = min(ends[-1] + BLOCK - 1 if ends else lookup.local, lookup.most)
        if not self._shape.bytes_per_token:
            reach = lookup.most
        position = self._find_checkpoint(lookup, reach) if self._shape.opaque else None
        if self._shape.opaque:
            if position is None:
                return 0
            ends = [end for end in ends if grid.cell_start(end, self._shape.cell) < position]
        target = position or (min(ends[-1], lookup.most) if ends else 0)
        if target - lookup.have < MIN_GAIN or not self._is_worth(lookup, ends, target):
            return 0
        state = self._get_checkpoint(lookup, position) if position is not None else None
        if position is not None and state is None:
            return 0
        saved = self._save_runs(lookup, ends, target)
        if position is not None and state is not None and self._covers(lookup, position):
            self._store.write_checkpoint(lookup.chain.ids[:position], state)
            self._counts.add(fetched_checkpoints=1)
        return saved

    def _covers(self, lookup: _Lookup, position: int) -> bool:
        if not self._shape.bytes_per_token:
            return True
        return self._store.find(lookup.chain.ids[:position], touch=False).length >= position

    # -- what is there -----------------------------------------------------------------------------

    def _find_runs(self, lookup: _Lookup) -> list[int]:
        """Return the ends of the run objects to read: of whole cells, then of the tail."""
        chain, cell = lookup.chain, self._shape.cell
        length = len(chain.ids)

        def exist(cells: Sequence[int]) -> list[bool]:
            sizes = self._heads(lookup, [grid.run_name(chain, n * cell) for n in cells])
            return [size is not None for size in sizes]

        first = lookup.local // cell
        last = grid.find_last(first, length // cell, exist)
        ends = [n * cell for n in range(first + 1, last + 1)]
        tails = grid.tail_ends(last * cell, lookup.local, length, cell)
        if tails:
            sizes = self._heads(lookup, [grid.run_name(chain, end) for end in tails])
            held = [end for end, size in zip(tails, sizes, strict=True) if size is not None]
            ends += held[-1:]
        return ends

    def _heads(self, lookup: _Lookup, names: Sequence[str]) -> list[int | None]:
        return self._call(lookup, partial(self._objects.head_many, names))

    def _find_checkpoint(self, lookup: _Lookup, reach: int) -> int | None:
        cell = self._shape.cell
        cells = range(reach // cell, max(-1, reach // cell - 1 - BACK), -1)
        for n, at in enumerate(cells):
            if n and (at + 1) * cell - lookup.have < MIN_GAIN:
                return None
            prefix = grid.checkpoint_prefix(lookup.chain, at * cell, cell)
            names = self._call(lookup, partial(self._objects.list, prefix, LISTED))
            found = grid.checkpoint_positions(lookup.chain, names, reach)
            if found:
                return found[-1] if found[-1] - lookup.have >= MIN_GAIN else None
        return None

    def _is_worth(
        self, lookup: _Lookup, ends: Sequence[int], target: int, at: int | None = None
    ) -> bool:
        """Return whether fetching runs should take less time than computing their tokens."""
        nbytes = sum(self._run_bytes(end) for end in ends)
        if at is None and self._shape.opaque:
            nbytes += self._shape.checkpoint_bytes
        expected = self.pace.seconds(nbytes)
        have = lookup.have if at is None or self._shape.opaque else max(at, lookup.have)
        spared = self._seconds(have, target)
        if expected is None or expected < WORTH * spared:
            return True
        self._counts.add(slower=1)
        return False

    def _run_bytes(self, end: int) -> int:
        tokens = end - grid.cell_start(end, self._shape.cell)
        return tokens * self._shape.bytes_per_token

    # -- reading -----------------------------------------------------------------------------------

    def _get_checkpoint(self, lookup: _Lookup, position: int) -> list[Tensor] | None:
        name = grid.checkpoint_name(lookup.chain, position, self._shape.cell)
        began, nbytes = time.monotonic(), self._shape.checkpoint_bytes
        data = self._result(lookup, self._begin(lookup, name, nbytes), name, nbytes, began)
        if data is None:
            return None
        self._note_read(data, len(data), began)
        try:
            state = unpack_checkpoint(data, lookup.chain, position)
        except Malformed as error:
            self._note_wrong(name, error)
            return None
        self._names.note_present(name, position)
        return state

    def _save_runs(self, lookup: _Lookup, ends: Sequence[int], target: int) -> int:
        """Read the runs with the given `ends` and save them in order; return the tokens saved."""
        at, saved = lookup.local, 0
        try:
            for end, data in self._read(lookup, ends):
                run = self._verified(lookup, end, data)
                if run is None or not self._save(lookup, run):
                    break
                lookup.gained += self._seconds(max(at, lookup.have), min(run.stop, target))
                saved += run.stop - max(at, run.start)
                at = run.stop
                left = [each for each in ends if each > end]
                if lookup.dropped() or (left and not self._is_worth(lookup, left, target, at)):
                    break
        except _Expired:
            self._counts.add(expired=1)
        except RemoteUnavailable as error:
            log.debug(
                "model %s: fetching KV from the remote failed, keeping %d of %d tokens: %s",
                *(self._label, saved, target - lookup.local, error),
            )
        self._counts.add(fetched_tokens=saved)
        return saved

    def _verified(self, lookup: _Lookup, end: int, data: bytes) -> FetchedRun | None:
        name = grid.run_name(lookup.chain, end)
        try:
            run = unpack_run(data, lookup.chain, grid.cell_start(end, self._shape.cell), end)
        except Malformed as error:
            self._note_wrong(name, error)
            return None
        self._names.note_present(name, run.stop)
        return run

    def _save(self, lookup: _Lookup, run: FetchedRun) -> bool:
        try:
            ids = lookup.chain.ids[: run.stop]
            self._store.write_run(ids, run.start, run.tensors)
        except (StoreError, ValueError) as error:
            if str(error) != self._last_warning:
                log.warning(
                    "model %s: KV fetched from the remote not saved, computing it instead: %s",
                    *(self._label, error),
                )
            self._last_warning = str(error)
            return False
        self._last_warning = ""
        return True

    def _read(self, lookup: _Lookup, ends: Sequence[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the end and the content of each run object in order, reading several at once."""
        waiting = deque(ends)
        reading: deque[tuple[int, str, Future[bytes | None]]] = deque()
        began, total = time.monotonic(), 0
        try:
            while waiting or reading:
                while waiting and len(reading) < PARALLEL:
                    end = waiting.popleft()
                    name = grid.run_name(lookup.chain, end)
                    # it may hold the tokens of an incomplete block after its end
                    nbytes = self._run_bytes(end) + BLOCK * self._shape.bytes_per_token
                    reading.append((end, name, self._begin(lookup, name, nbytes)))
                end, name, future = reading.popleft()
                data = self._result(lookup, future, name, total + self._run_bytes(end), began)
                if data is None:
                    return
                total += len(data)
                self._note_read(data, total, began)
                yield end, data
        finally:
            for _, _, future in reading:
                future.cancel()

    def _begin(self, lookup: _Lookup, name: str, nbytes: int) -> Future[bytes | None]:
        within = max(0.0, lookup.left()) + self._seconds(lookup.have, lookup.most)
        return self._pool.submit(self._objects.get, name, within, most=2 * nbytes + SPARE_BYTES)

    def _result(
        self,
        lookup: _Lookup,
        future: Future[bytes | None],
        name: str,
        nbytes: int,
        began: float,
    ) -> bytes | None:
        expected, wait = self.pace.seconds(nbytes), lookup.left()
        if expected is not None:
            wait = min(wait, max(STALL * expected, lookup.least))
        try:
            data = future.result(max(0.0, wait))
        except TimeoutError:
            future.cancel()
            self.pace.note_unfinished(nbytes, time.monotonic() - began)
            raise _Expired from None
        if data is None:  # it was there a moment ago
            self._names.note_wrong(name)
        return data

    def _note_read(self, data: bytes, total: int, began: float) -> None:
        self.pace.note_bytes(total, time.monotonic() - began)
        self._counts.add(fetched_objects=1, fetched_bytes=len(data))

    def _call(self, lookup: _Lookup, action: Callable[[float], T]) -> T:
        began, left = time.monotonic(), lookup.left()
        if left <= 0 or lookup.dropped():
            raise _Expired
        try:
            found = action(left)
        except RemoteUnavailable:
            if lookup.left() > 0:
                raise
            self.pace.note_silence(time.monotonic() - began)
            raise _Expired from None
        self.pace.note_call(time.monotonic() - began)
        return found

    def _note_wrong(self, name: str, error: Malformed) -> None:
        self._names.note_wrong(name)
        self._exchange.note_corrupt(name, error)
