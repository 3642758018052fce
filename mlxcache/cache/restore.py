"""Restoring: what of a prompt's prefix is on disk is read into its lineage before it is computed.

Other threads look up and verify, a file ahead of the MLX thread, which loads what was verified.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest

import mlx.core as mx

from mlxcache.cache.kv_cache import Lease
from mlxcache.errors import StoreError
from mlxcache.model import serialise as wire
from mlxcache.model.kv import Layout
from mlxcache.store.found import Found, Piece, Saved
from mlxcache.store.store import Store
from mlxcache.types import Tokens

log = logging.getLogger("mlxcache.engine")

WORTH_LOOKING = 128
"""Tokens beyond what RAM holds from which on a look at the disk is taken."""

WORTH_READING = 64
"""Tokens that the disk must have beyond what RAM holds."""


@dataclass(slots=True, eq=False)
class Look:
    """What the disk has of one prompt. Its thread writes it, the MLX thread reads it.

    `found` once it was looked up; `target`: the position up to which it can be restored, 0 where
    that is not worth while; `verified`: how far its files are known to be sound; `sound`: so is
    the checkpoint at `target`, if one is needed; `failed`: nothing more will be. `late_from`: files
    that end before it are read without sliding windows, which no later position sees.
    `known` tokens are in RAM, and their files are not looked at; `dropped`: nobody waits any more.
    `shared`: how many tokens an earlier prompt on disk shares, whether or not they can be restored.
    """

    ids: Tokens
    found: bool = False
    target: int = 0
    pieces: tuple[Piece, ...] = ()
    state: Saved | None = None
    verified: int = 0
    late_from: int = 0
    sound: bool = False
    failed: bool = False
    dropped: bool = False
    known: int = 0
    shared: int = 0


class Restorer:
    """Looks at the disk for the MLX thread. `wake` is called from other threads."""

    def __init__(self, store: Store, layout: Layout, wake: Callable[[], None]):
        self.store = store
        self.layout = layout
        self._wake = wake
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="mlxcache-disk")
        self._told = ""
        self._stream = mx.new_stream(mx.cpu)

    def look(self, ids: Tokens, known: int) -> Look:
        """Begin to look for the prefix of `ids`, of which RAM holds `known` tokens."""
        look = Look(ids, known=known)
        self._pool.submit(self._search, look)
        return look

    def close(self) -> None:
        """Stop looking."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    # -- on the disk's threads -------------------------------------------------------------------

    def _search(self, look: Look) -> None:
        try:
            self._plan(look, self.store.find(look.ids))
            self._told = ""
            look.found = True
            self._wake()
            if look.target:
                self._verify(look)
        except StoreError as error:
            self._tell(str(error))
            look.failed = True
        except Exception:
            log.exception("the disk tier failed to look up a prefix")
            look.failed = True
        finally:
            look.found = True
            self._wake()

    def _tell(self, why: str) -> None:
        """Log why the disk cannot be used; once as long as that does not change."""
        if why != self._told:
            log.warning("what is on disk cannot be used: %s", why)
        self._told = why

    def _plan(self, look: Look, found: Found) -> None:
        most = len(look.ids) - 1
        target, state = min(found.length, most), None
        look.shared = target
        if self.layout.opaque:
            reach = target if self.layout.specs else most
            state = next((s for s in reversed(found.checkpoints) if s.position <= reach), None)
            target = state.position if state else 0
        if target - look.known < WORTH_READING:
            return
        look.pieces = tuple(p for p in found.pieces if p.start < target)
        if not look.known and self.layout.longest_window:
            look.late_from = max(0, target - self.layout.longest_window)
        look.state, look.target = state, target

    def _verify(self, look: Look) -> None:
        if look.state is not None:
            self.store.verify_checkpoint(look.state, look.ids)
        look.sound = True
        for piece, following in zip_longest(look.pieces, look.pieces[1:]):
            if look.dropped:
                return
            if following is not None:
                self.store.read_ahead(following)
            if piece.end > look.known:
                self.store.verify(piece, look.ids, late=piece.end > look.late_from)
            look.verified = piece.end
            self._wake()

    # -- on the MLX thread -----------------------------------------------------------------------

    def ready(self, look: Look, at: int) -> bool:
        """Whether `load` has something to do for a lineage that ends at `at`."""
        if look.failed:
            return True
        there = at >= look.target or not self.layout.specs
        return look.sound and (there or look.verified > at)

    def load(self, look: Look, lease: Lease) -> bool:
        """Read one verified piece into the lineage, or the checkpoint at the end.

        True once the lineage is at `look.target`, its state restored. Raises StoreError where what
        was verified cannot be read any more, or is not of this model's shapes.
        """
        if look.failed:
            raise StoreError("a file of the prefix cannot be used")
        lineage = lease.lineage
        if self.layout.specs and lineage.length < look.target:
            piece = next(p for p in look.pieces if p.start <= lineage.length < p.end)
            end = min(piece.end, look.target)
            arrays = wire.load_run(piece.path, self.layout, self._stream)
            first, last = lineage.length - piece.first, end - piece.first
            late = piece.end > look.late_from
            lineage.append(self._slots(arrays, first, last, late), last - first, windows=late)
        if not self.layout.specs:
            lineage.length = look.target
        if lineage.length < look.target:
            return False
        if look.state is not None:
            lineage.restore(wire.load_state(look.state.path, self.layout, self._stream))
        return True

    def _slots(
        self, arrays: list[list[mx.array]], first: int, last: int, late: bool
    ) -> Iterator[list[mx.array]]:
        """Rows of one slot's arrays after the other's; those that were read are let go.

        Without `late`, nothing is read of sliding windows.
        """
        for window in self.layout.windows:
            rows = wire.row_major([arrays.pop(0)], first, last)[0]
            yield rows if late or window is None else [mx.zeros_like(row) for row in rows]
