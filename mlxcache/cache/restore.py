"""Restore: read the part of a prompt's prefix that is on disk into a lineage.

Other threads look the prefix up and verify checksums, one file ahead of the MLX thread, which then
loads the verified files.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from mlxcache.cache.kv_io import KVFiles
from mlxcache.errors import StoreError
from mlxcache.model.kv import Layout
from mlxcache.model.lineage import Lineage
from mlxcache.store.found import Found, RunPart, Saved
from mlxcache.store.store import Store
from mlxcache.types import Tokens

if TYPE_CHECKING:
    from mlxcache.remote.tier import RemoteTier

log = logging.getLogger("mlxcache.engine")

MIN_UNKNOWN = 128
"""Minimum number of prompt tokens not in RAM for which the disk is searched."""

MIN_GAIN = 64
"""Minimum number of tokens on disk beyond those in RAM for which a restore is made."""


@dataclass(slots=True, eq=False)
class DiskLookup:
    """Progress and result of looking up one prompt on disk.

    A lookup thread writes the fields and the MLX thread reads them. `known`: leading tokens that
    are in RAM; files with only those are not verified. `found`: the search has ended. `target`:
    position up to which to restore, 0 if the gain would be too small. `verified`: position up to
    which the run files were verified. `failed`: nothing more will be verified. `dropped`: no
    request needs the result any more. `shared`: tokens shared with earlier prompts on disk.
    """

    ids: Tokens
    known: int = 0
    found: bool = False
    target: int = 0
    pieces: tuple[RunPart, ...] = ()
    state: Saved | None = None
    verified: int = 0
    state_verified: bool = False
    failed: bool = False
    dropped: bool = False
    shared: int = 0

    def drop(self) -> None:
        self.dropped = True

    def disable(self) -> None:
        self.target = 0


class Restorer:
    """Reader of the disk tier: looks prompts up, verifies files and loads them.

    `wake` is called on a lookup's thread when the lookup has verified another file or has ended.
    `min_unknown`: least number of prompt tokens not in RAM for which callers are to start a lookup.
    """

    def __init__(
        self,
        store: Store,
        files: KVFiles,
        wake: Callable[[], None],
        remote: RemoteTier | None = None,
        *,
        label: str = "unnamed",
    ):
        self._label = label
        self.min_unknown = MIN_UNKNOWN if remote is None else MIN_GAIN
        self._remote = remote
        self._store = store
        self._files = files
        self._layout: Layout = files.layout
        self._wake = wake
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="mlxcache-disk")
        self._last_warning = ""

    def look_up(self, ids: Tokens, known: int) -> DiskLookup:
        """Start looking for the longest prefix of `ids` on disk. Other threads write its result."""
        lookup = DiskLookup(ids, known)
        self._pool.submit(self._search, lookup, first=True)
        return lookup

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- on the lookup's threads -------------------------------------------------------------------

    def _search(self, lookup: DiskLookup, *, first: bool) -> None:
        """Search the disk for the prompt of `lookup`, and verify the files found.

        At `first`, if the remote may have more of the prefix than the disk, it is fetched, and the
        disk is searched again afterwards.
        """
        try:
            found = self._store.find(lookup.ids)
            if first and self._fetch(lookup, found):
                return
            self._plan(lookup, found)
            self._last_warning = ""
            self._end_search(lookup)
            if lookup.target:
                self._verify(lookup)
        except StoreError as error:
            self._warn_once(str(error))
            lookup.failed = True
        except Exception:
            log.exception(
                "model %s: disk lookup failed, computing the prefix: prompt of %d tokens",
                *(self._label, len(lookup.ids)),
            )
            lookup.failed = True
        self._end_search(lookup)

    def _end_search(self, lookup: DiskLookup) -> None:
        lookup.found = True
        self._wake()

    def _fetch(self, lookup: DiskLookup, found: Found) -> bool:
        if self._remote is None:
            return False
        return self._remote.look_up(
            lookup.ids,
            lookup.known,
            found,
            lambda: self._search_again(lookup),
            lambda: lookup.dropped,
        )

    def _search_again(self, lookup: DiskLookup) -> None:
        try:
            self._pool.submit(self._search, lookup, first=False)
        except RuntimeError:  # it was closed
            lookup.failed = True
            self._end_search(lookup)

    def _warn_once(self, why: str) -> None:
        if why != self._last_warning:
            log.warning(
                "model %s: restore from disk failed, computing the rest of the prefix: %s",
                *(self._label, why),
            )
        self._last_warning = why

    def _plan(self, lookup: DiskLookup, found: Found) -> None:
        most = len(lookup.ids) - 1
        target, state = min(found.length, most), None
        lookup.shared = target
        if self._layout.opaque:
            reach = target if self._layout.specs else most
            state = next((s for s in reversed(found.checkpoints) if s.position <= reach), None)
            target = state.position if state else 0
        if target - lookup.known < MIN_GAIN:
            return
        lookup.pieces = tuple(p for p in found.pieces if p.start < target)
        lookup.state, lookup.target = state, target

    def _verify(self, lookup: DiskLookup) -> None:
        if lookup.state is not None:
            self._store.verify_checkpoint(lookup.state, lookup.ids)
        lookup.state_verified = True
        pieces = [piece for piece in lookup.pieces if piece.end > lookup.known]
        for piece, following in zip_longest([None, *pieces], pieces):
            if lookup.dropped:
                return
            if following is not None:
                self._store.read_ahead(following)
            if piece is not None:
                self._store.verify(piece, lookup.ids)
                lookup.verified = piece.end
                self._wake()

    # -- on the MLX thread -------------------------------------------------------------------------

    def ready(self, lookup: DiskLookup, length: int) -> bool:
        """Return whether `load` can be called: it has verified data to load, or is to raise."""
        if lookup.failed:
            return True
        complete = length >= lookup.target or not self._layout.specs
        return lookup.state_verified and (complete or lookup.verified > length)

    def load(self, lookup: DiskLookup, lineage: Lineage) -> bool:
        """Append verified files to `lineage`, and set the checkpoint's state after the last one.

        Returns False if more is to come: call again when `ready`. Blocks while the files are read.
        Raises StoreError if the lookup failed or a file can no longer be used.
        """
        if lookup.failed:
            raise StoreError("a file of the prefix cannot be looked up or verified")
        if lineage.length < lookup.target:
            self._files.load_runs(lookup, lineage)
        if lineage.length < lookup.target:
            return False
        self._files.load_state(lookup, lineage)
        return True
