"""A folder that vanished under an open store: made again, or found again, without a restart."""

from __future__ import annotations

import logging
import threading
import time

from mlxcache.errors import StoreError, Vanished
from mlxcache.store import index
from mlxcache.store.core import Core
from mlxcache.store.database import translated
from mlxcache.store.owner import Owner, opening
from mlxcache.store.recover import recover

log = logging.getLogger(__name__)

GONE_S = 1.0
"""For how long a folder has to be gone: whoever removes it is not to find new files in it."""


class Comeback:
    """Called before each transaction of an open store; does nothing as long as all is there."""

    def __init__(self, core: Core):
        self._core = core
        self._turn = threading.RLock()
        self._coming = False
        self._missed_at: float | None = None

    def __call__(self) -> None:
        """Raises StoreError where the folder has vanished and cannot be made again."""
        if self._core.database.is_there() and not self._coming:
            self._missed_at = None
            return
        with self._turn:
            if not self._core.database.is_there():
                self._coming = True
                try:
                    self._come_back()
                finally:
                    self._coming = False
        self._missed_at = None

    def _come_back(self) -> None:
        core = self._core
        folder = core.folder
        now = time.monotonic()
        if self._missed_at is None:
            self._missed_at = now
        if now - self._missed_at < GONE_S and not folder.index.exists():
            core.check_there()
        with translated(folder.path):
            core.database.check_open()
            if not folder.may_be_made_again():
                raise Vanished(f"{folder.path} has vanished with the disk that it was on.")
            folder.make()
            with opening(folder):
                core.owner.release()
                core.owner = Owner(folder)
                core.database.renew()
                with core.database.read() as connection:
                    if not index.shapes() <= set(connection.execute(index.SHAPES)):
                        raise StoreError(f"{folder.index} is not an index of this version.")
                recover(core)
        log.warning("%s had vanished: it is used again as it is there now", folder.path)
