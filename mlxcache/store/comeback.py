"""A folder that vanished under an open store: made again, or found again, without a restart."""

from __future__ import annotations

import logging
import threading
import time

from mlxcache.errors import StoreError, Vanished
from mlxcache.store import index
from mlxcache.store.context import StoreContext
from mlxcache.store.database import translated
from mlxcache.store.owner import opening
from mlxcache.store.recover import recover

log = logging.getLogger(__name__)

GONE_S = 1.0
"""For how long a folder has to be gone: whoever removes it is not to find new files in it."""


class StoreReopener:
    """Called before each transaction of an open store; does nothing as long as all is there."""

    def __init__(self, context: StoreContext):
        self._context = context
        self._turn = threading.RLock()
        self._coming = False
        self._missed_at: float | None = None

    def __call__(self) -> None:
        """Raises StoreError where the folder has vanished and cannot be made again."""
        if self._context.database.is_there() and not self._coming:
            self._missed_at = None
            return
        with self._turn:
            if not self._context.database.is_there():
                self._coming = True
                try:
                    self._come_back()
                finally:
                    self._coming = False
        self._missed_at = None

    def _come_back(self) -> None:
        context = self._context
        folder = context.folder
        now = time.monotonic()
        if self._missed_at is None:
            self._missed_at = now
        if now - self._missed_at < GONE_S and not folder.index.exists():
            context.check_present()
        with translated(folder.path):
            context.database.check_open()
            if not folder.may_be_made_again():
                raise Vanished(f"{folder.path} has vanished with the disk that it was on.")
            folder.make()
            with opening(folder):
                context.renew_lock()
                context.database.renew()
                with context.database.read() as connection:
                    if not index.shapes() <= set(connection.execute(index.SHAPES)):
                        raise StoreError(f"{folder.index} is not an index of this version.")
                recover(context)
        log.warning("%s had vanished: it is used again as it is there now", folder.path)
